"""``zbv-worker gpu-report``: a check of the machine's GPUs against the CPU, and their costs.

It needs at least one NVIDIA GPU, and with ``--device cpu`` none for the checks that a CPU can run.
"""
