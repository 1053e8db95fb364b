"""Tables in a database of each kind."""

from __future__ import annotations

import pytest
from zbv_service.database import Database, SearchTable


@pytest.fixture
def table(database: Database) -> SearchTable:
    return SearchTable(database)
