"""Values that pass between stages: nested containers of tensors and constants.

It knows their structure, and how they travel as one tensor.
"""
