"""Problems, plans and references that tests of several parts share."""
