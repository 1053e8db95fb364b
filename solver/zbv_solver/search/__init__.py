"""The search: its phases, options and budgets, and the assembly of verified plans.

`run.search` is its entry point, `phases` runs one method after the other, `assemble` makes plans of orders,
and `claims` checks what a plan states. The methods themselves are in `bounds`, `construct`, `improve` and
`partition`.
"""
