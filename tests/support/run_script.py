"""Runs a script, so that forked ranks can: ``python -m support.run_script FILE ARGUMENT …``."""

import runpy
import sys

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
