"""Suites of problems with what to measure the planner against: read, run, judged and printed (``zbv bench``).

``suite.py`` reads instances, ``measure.py`` searches one of them with a clock, ``judge.py`` says what a
measurement is worth, ``tally.py`` and ``ablation.py`` sum up; ``table.py`` and ``document.py`` are the two
forms of the result, and ``run.py`` puts it all in order. Nothing here decides how a search works.
"""
