"""When actions start and end, the exact span, and memory over time.

`verify` checks these results and shares no code with this folder.
"""
