"""How an executor divides a model by itself, if nobody gives it a cut.

Megatron-LM: ``get_num_layers_to_build`` in ``megatron/core/transformer/transformer_block.py``. torchtitan:
``_generate_llm_fqn_per_model_part`` in ``torchtitan/distributed/pipeline_parallel.py``, with the default
weights of 1. PyTorch has no rule; here its layers are dealt evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from zbv_solver.problem.layer_letters import DECODER, LOSS, MTP

from zbv_models.fixed_orders.schedules import Schedule


@dataclass(frozen=True)
class EvenCut:
    """An even division of the transformer layers; embedding, MTP layers and loss are at the ends.

    Attributes
    ----------
    bounds
        (S+1,) boundaries as layer indices.
    remark
        Which cut this is if the executor has none by itself; empty if it is the executor's own.
    """

    bounds: tuple[int, ...]
    remark: str = ""


def even_cut(executor: str, letters: Sequence[str], schedule: Schedule) -> EvenCut:
    """The cut of layers with these letters that an executor chooses by itself for a schedule."""
    blocks, stages = letters.count(DECODER), schedule.placement.n_stages
    if executor == "torchtitan" and stages <= blocks + 2:
        return EvenCut(_bounds(letters, _weighted(blocks, stages)))
    counts = dealt(blocks, stages)
    if blocks % stages and executor != "torch":
        fewer = "one less at both ends" if counts[0] < counts[1] else "fewer on the last stages"
        name = {"megatron": "Megatron-LM", "torchtitan": "torchtitan"}[executor]
        remark = (
            f"{name} by itself does not divide {blocks} transformer layers into {stages} stages; the even "
            f"cut here has {max(counts)} per stage and {fewer}."
        )
        return EvenCut(_bounds(letters, counts), remark)
    return EvenCut(_bounds(letters, counts))


def dealt(blocks: int, stages: int) -> list[int]:
    """Transformer layers of every stage: as many on each, if they divide.

    Otherwise, if two more would divide, embedding and loss count as one each, as with
    ``--account-for-embedding-in-pipeline-split`` and ``--account-for-loss-in-pipeline-split`` of Megatron-LM;
    if not, the last stages have fewer, as with its ``--decoder-last-pipeline-num-layers``.
    """
    if blocks % stages and not (blocks + 2) % stages and stages > 1:
        each = (blocks + 2) // stages
        return [each - 1, *(each,) * (stages - 2), each - 1]
    each = -(-blocks // stages)
    return [max(0, min(each, blocks - stage * each)) for stage in range(stages)]


def _weighted(blocks: int, stages: int) -> list[int]:
    """torchtitan's rule: embedding and output count as one layer each, and the first stages have one more."""
    if stages == 1:
        return [blocks]
    each, more = divmod(blocks + 2, stages)
    counts = [each + (stage < more) for stage in range(stages)]
    counts[0] -= 1
    counts[-1] -= 1
    return counts


def _bounds(letters: Sequence[str], counts: Sequence[int]) -> tuple[int, ...]:
    begins = [at for at, letter in enumerate(letters) if letter == DECODER]
    behind = (
        at for at, letter in enumerate(letters) if letter in (MTP, LOSS) and at >= max(begins, default=0)
    )
    begins.append(next(behind, len(letters)))
    return (0, *(begins[done] for done in list(accumulate(counts))[:-1]), len(letters))
