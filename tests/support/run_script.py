"""Runs a script, so that forked ranks can: ``python -m support.run_script FILE ARGUMENT … [+ ARGUMENT …]``.

After a plus sign, it runs the script again in the same process, with other arguments.
"""

import runpy
import sys

if __name__ == "__main__":
    file, *rest = sys.argv[1:]
    while True:
        end = rest.index("+") if "+" in rest else len(rest)
        sys.argv = [file, *rest[:end]]
        runpy.run_path(file, run_name="__main__")
        if end == len(rest):
            break
        rest = rest[end + 1 :]
