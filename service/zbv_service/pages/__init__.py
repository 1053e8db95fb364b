"""The service's HTML pages: pure functions from data to text. They know no HTTP and no database.

A page is a module here and a template of the same name in ``templates/``; what only the service's own pages
load is in ``static/``. The plan's page is the solver's, which also writes it as one file
(:mod:`zbv_solver.export.report`): its style sheet and script are shared by all pages.
"""
