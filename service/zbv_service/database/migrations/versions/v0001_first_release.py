"""All tables of the first release: those of the code, until the release fixes them here."""

from __future__ import annotations

from alembic import op

from zbv_service.database import models  # noqa: F401 (declares the tables)
from zbv_service.database.engine import Base

revision = "first_release_with_names"
"""A change before the first release changes this name, so that older databases of development are refused."""
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables."""
    Base.metadata.create_all(op.get_bind())
