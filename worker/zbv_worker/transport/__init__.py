"""How tensors and words get from rank to rank."""
