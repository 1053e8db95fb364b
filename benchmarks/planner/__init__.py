"""Benchmarks of the planner: suites of problems, the choice of cuts, and the speed of the kernels.

``suite.py`` reads instances, ``measure.py`` searches one of them and records its progress, ``verdicts.py``
compares the result with other planners and targets, ``tally.py`` and ``ablation.py`` summarize, ``tables.py``
and ``report.py`` are the two forms of the result, and ``run.py`` runs a suite. Nothing here decides how a
search works.
"""
