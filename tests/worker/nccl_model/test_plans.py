"""The real transport and executor run plans of every family on the model of NCCL."""

from __future__ import annotations

import pytest
