"""The same plan on torch.distributed.pipelining."""
