"""The ``zbv`` command: `cli` defines its arguments, and the other modules run its subcommands.

Nothing else imports this folder, except for `interrupt` and `searching`, which other commands share.
"""
