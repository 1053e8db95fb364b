"""The ``zbv-worker`` command: options, help texts and printed results.

The work itself is done elsewhere; modules here import torch only when a command runs.
"""
