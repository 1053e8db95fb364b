"""The search: its stages, options and budgets, and the assembly of verified plans.

`search.search` is its entry point, `assemble` makes plans of orders, and `claims` checks what a plan states.
The methods themselves are in `bounds`, `construct`, `improve` and `partition`.
"""
