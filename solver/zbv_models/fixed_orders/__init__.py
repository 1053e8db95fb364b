"""Executors with fixed orders: Megatron-LM, torchtitan, and PyTorch's pipelining schedules.

This folder knows their orders, finds the best cut for them, and writes and reads their settings. It does not
search orders.
"""
