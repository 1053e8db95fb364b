"""A user's script for an agent's run: trains a few layers with the run's plan.

Rank 0 has the data.
"""

import argparse
from pathlib import Path

import torch
import zbv_worker as zbv
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, required=True)
asked = parser.parse_args()
torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
inputs, targets = torch.randn(16, 8), torch.randn(16, 8)
with zbv.Pipeline(zbv.run_plan(), layers, loss=nn.functional.mse_loss, data_rank=0, timeout=60) as pipe:
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for _ in range(asked.steps):
        loss = pipe.step(inputs, targets) if torch.distributed.get_rank() == 0 else pipe.step()
        optimizer.step()
        optimizer.zero_grad()
    print("trained", Path(__file__).name, asked.steps, "steps, loss", loss)  # noqa: T201 - a rank's log
