"""Train a Sequential as a pipeline, in one process or several::

python examples/sequential.py
torchrun --nproc-per-node 2 examples/sequential.py
"""

import os

import torch
import zbv_solver
import zbv_worker as zbv
from torch import nn

torch.manual_seed(0)
layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
batches = [(inputs := torch.randn(32, 16), inputs.flip(1) / 2) for _ in range(20)]

costs = {"forward": 1, "backward_input": 1, "backward_weight": 1}
problem = {"pp_degree": int(os.environ.get("WORLD_SIZE", "1")), "microbatches": 8, "costs": costs}
plan = zbv_solver.plan(zbv_solver.parse(problem), "quick")
with zbv.Pipeline(plan, layers, loss=nn.functional.mse_loss) as pipe:
    optimizer = torch.optim.AdamW(pipe.named_parameters(), lr=3e-2)
    for inputs, targets in batches:
        loss = pipe.step(inputs, targets)
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss}")  # None on ranks without the last layer
