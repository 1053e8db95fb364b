"""zbv_solver: plans zero-bubble V schedules. A library, and the ``zbv`` command.

A :class:`~zbv_solver.problem.problem.Problem` goes into :func:`~zbv_solver.search.search.search`, and a verified
:class:`~zbv_solver.plans.plan.Plan` comes out.
"""

__version__ = "0.1.0"
