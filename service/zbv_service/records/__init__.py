"""The nouns of the service: plans, searches, runs, agents and tokens.

A class that ends in ``Document`` is what the database returns and the API sends; fields with ``exclude`` stay
in the service. Nothing here knows SQL or HTTP.
"""
