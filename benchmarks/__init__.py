"""Measurements and long checks of zbv, run from a checkout; no part of the installed packages."""
