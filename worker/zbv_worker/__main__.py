"""``python -m zbv_worker``, which is also what ``torchrun -m zbv_worker`` starts."""

from __future__ import annotations

import sys

from zbv_worker.commands.cli import main

sys.exit(main())
