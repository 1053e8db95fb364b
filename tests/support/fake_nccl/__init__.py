"""A model of CUDA streams and NCCL in virtual time, on which the real transport and executor run.

It refuses what torch refuses, detects memory that is used without an order between its users, and shows who
waits for what when nothing can ever happen again. docs/nccl-model.md names the source of every behaviour and
lists what is not modelled.
"""
