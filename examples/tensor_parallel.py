"""Train a tensor-parallel decoder as a pipeline of two ranks, each of two tensor-parallel processes::

torchrun --nproc-per-node 4 examples/tensor_parallel.py
"""

from functools import partial

import torch
import zbv_solver
import zbv_worker as zbv
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH, HEADS, WORDS = 32, 4, 64


class Block(nn.Module):
    """Attention and a gated feed-forward network, as in Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        q, k, v = (
            project(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.second(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


# --- from here on: the pipeline
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
columns, rows = ColwiseParallel(), RowwiseParallel()
divided = {"query": columns, "key": columns, "value": columns, "out": rows}
divided |= {"gate": columns, "up": columns, "down": rows}


def block(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return parallelize_module(Block(), mesh["tp"], divided)


layers = [partial(nn.Embedding, WORDS, WIDTH), *(partial(block, seed) for seed in range(3))]
layers.append(partial(nn.Linear, WIDTH, WORDS))
costs = {"forward": 1, "backward_input": 1, "backward_weight": 1}
problem = zbv_solver.parse({"pp_degree": 2, "microbatches": 4, "placement": "v", "costs": costs})
torch.manual_seed(0)  # plain layers must be equal on the processes of a group
pipe = zbv.Pipeline(zbv_solver.plan(problem, "quick"), layers, loss=loss, mesh=mesh, backend="gloo")
optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2, foreach=False)
tokens = torch.arange(16 * 9).view(16, 9) % WORDS
for _ in range(12):
    mean = pipe.step(tokens[:, :-1], tokens[:, 1:])
    optimizer.step()
    optimizer.zero_grad()
    if mean is not None:
        print(f"loss {mean:.4f}")
pipe.close()
