"""Plans zero-bubble V schedules: a library, and the ``zbv`` command."""

from zbv_solver._version import __version__ as __version__
