"""A rank that runs the example with a Llama, and then compares a step with the unsplit model."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

import torch
import transformers
from zbv_worker.adapters.transformers import from_transformers

from support.paths import ROOT


def main(folder: Path) -> None:
    found = runpy.run_path(str(ROOT / "examples" / "llama.py"))
    pipe, config = found["pipe"], found["config"]
    layers = from_transformers(config)
    tokens = torch.randint(config.vocab_size, (8, 64), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[3, 20:] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    loss = pipe.step(tokens, labels, attention_mask=mask)
    whole = pipe.full_state_dict()
    gradients = {name: p.grad.tolist() for name, p in pipe.named_parameters()}
    rank = int(os.environ["RANK"])
    (folder / f"gradients-{rank}.json").write_text(json.dumps(gradients))
    if whole is not None:
        model = transformers.AutoModelForCausalLM.from_config(config).train()
        names = {name: layers.layer_parameter(name) for name in model.state_dict()}
        model.load_state_dict({name: whole[at] for name, at in names.items()})
        expected = model(input_ids=tokens, attention_mask=mask, labels=labels).loss
        expected.backward()
        reference = {names[n]: p.grad.tolist() for n, p in model.named_parameters()}
        (folder / "reference.json").write_text(
            json.dumps({"loss": [float(loss), float(expected)], "gradients": reference})
        )
    pipe.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
