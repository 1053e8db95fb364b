"""``python -m examples.demo``."""

from __future__ import annotations

import sys

from examples.demo.run import main

if __name__ == "__main__":
    sys.exit(main())
