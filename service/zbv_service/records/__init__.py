"""Frozen records that the database stores and returns.

They have no behaviour and know neither SQL nor HTTP.
"""
