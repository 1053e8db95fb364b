"""Train a Llama of transformers as a pipeline, on one process or several::

    python examples/llama.py
    torchrun --nproc-per-node 2 examples/llama.py

A path of a folder with ``config.json`` and safetensors instead of the configuration continues from its
weights; every rank reads only its own.
"""

import os
from pathlib import Path

import torch
import transformers
import zbv_solver
import zbv_worker as zbv

config = transformers.LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4
)
text = torch.frombuffer(bytearray(Path(zbv_solver.__file__).read_bytes()), dtype=torch.uint8).long()
data = [text[torch.arange(64) + 32 * torch.arange(8)[:, None]] for _ in range(10)]  # bytes as tokens

ranks = int(os.environ.get("WORLD_SIZE", "1"))
costs = {"forward": 1, "backward_input": 1, "backward_weight": 1}
problem = zbv_solver.parse({"pp_degree": ranks, "microbatches": 4, "placement": "v", "costs": costs})
pipe = zbv.Pipeline(zbv_solver.plan(problem, "quick"), zbv.from_transformers(config))
optimizer = torch.optim.AdamW(pipe.named_parameters(), lr=3e-3)
for tokens in data:
    loss = pipe.step(tokens, tokens)
    optimizer.step()
    optimizer.zero_grad()
    if loss is not None:
        print(f"loss {loss:.4f}")
