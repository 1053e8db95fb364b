"""The answer: orders, and a `Plan` with its metrics, its certificate, its identity and its JSON document.

Plans are described here, not found (`search`), timed (`timing`) or checked (`verify`). `channels` derives
from the orders what ranks send to each other, and in which sequence.
"""
