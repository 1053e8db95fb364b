"""``python -m zbv_worker.demo``."""

from __future__ import annotations

import sys

from zbv_worker.demo.run import main

if __name__ == "__main__":
    sys.exit(main())
