"""Train a small Llama on text, in one process or several::

    python examples/train.py
    torchrun --nproc-per-node 2 examples/train.py --steps 200 --checkpoints build/train

With ``--checkpoints``, the same command resumes, also with another number of processes.
"""

import argparse
from pathlib import Path

import torch
import transformers
import zbv_worker as zbv
from torch import Tensor

MICROBATCHES, ROWS, LENGTH = 8, 16, 64
DOCS = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))

parser = argparse.ArgumentParser(description="Train a small Llama on text.")
parser.add_argument("--steps", type=int, default=60, help="training steps in total (default 60)")
parser.add_argument("--checkpoints", type=Path, help="save checkpoints in this folder, and resume from it")
parser.add_argument("--text", type=Path, nargs="+", default=DOCS, help="text files (default: docs/*.md)")
options = parser.parse_args()

text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in options.text)), dtype=torch.uint8)
if len(text) < 20 * LENGTH:
    parser.error(f"--text: found {len(text)} bytes of text; must be at least {20 * LENGTH}")
training, held_out = text.long().split([len(text) * 9 // 10, len(text) - len(text) * 9 // 10])


def batch(data: Tensor, seed: int) -> Tensor:
    """Rows of bytes as tokens, from random places; the same on every rank."""
    places = torch.randint(len(data) - LENGTH, (ROWS, 1), generator=torch.Generator().manual_seed(seed))
    return data[places + torch.arange(LENGTH)]


config = transformers.LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=6, num_attention_heads=4
)
layers = zbv.from_transformers(config)
example = batch(training, 0)[: ROWS // MICROBATCHES]  # one microbatch, to measure and plan the layers
with zbv.Pipeline(None, layers, microbatches=MICROBATCHES, example=(example, example)) as pipe:
    optimizer = torch.optim.AdamW(pipe.named_parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=20)
    steps = iter(range(options.steps))
    if options.checkpoints is not None:
        checkpoints = pipe.checkpoints(options.checkpoints, optimizer, schedule)
        steps = checkpoints.steps(options.steps, every=50)
        if checkpoints.step:
            print(f"resumed after step {checkpoints.step}", flush=True)
    for step in steps:
        tokens = batch(training, step)
        loss = pipe.step(tokens, tokens)
        norm = pipe.clip_grad_norm_(1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if loss is not None and (step + 1) % 10 == 0:  # None on ranks without the last layer
            print(f"step {step + 1}: loss {loss:.3f}, gradient norm {norm:.2f}", flush=True)
    tokens = batch(held_out, 0)
    loss = pipe.evaluate(tokens, tokens)
    if loss is not None:
        print(f"loss of held-out text: {loss:.3f}", flush=True)
