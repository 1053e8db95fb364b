"""Runs a script, so that forked ranks can: ``python -m support.run_script FILE``."""

import runpy
import sys

if __name__ == "__main__":
    runpy.run_path(sys.argv[1], run_name="__main__")
