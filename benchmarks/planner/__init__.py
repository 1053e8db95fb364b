"""Benchmarks of the planner: files of problems, and problems of other kinds with their own tables.

``suite.py`` reads instances, ``outcome.py`` searches one of them and compares the plan with other planners
and targets, ``ablation.py`` leaves mechanisms out, ``run.py`` runs suites, and ``report.py`` has the two
forms of the result. ``lengths.py`` makes problems whose microbatches differ. Nothing here decides how a
search works.
"""
