"""The ``zbv`` command: `cli` defines its arguments, and the other modules run its subcommands.

The product imports it nowhere else; the benchmarks use `cli`, `interrupt` and `messages`.
"""
