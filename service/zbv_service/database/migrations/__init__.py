"""The Alembic environment and the versions of the tables, oldest first."""
