"""Failures of ranks: signs of life, the rank to blame, and the way out.

``progress`` says where a rank is, ``blame`` finds the rank that made others fail, ``liveness`` is the thread
that gives signs of life, and ``failures`` turns an error into the end of the pipeline, or of the process.
"""
