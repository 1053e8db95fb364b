"""What selective recomputation may repeat of a model: sets of modules, from cheap to expensive ones.

``core_attn``, Megatron-LM's default, is in all of them for plain attention, and in none for flash attention.
That keeps statistics of the scores alone, and would be computed twice for these.
"""

from __future__ import annotations

from zbv_solver.problem.layer_letters import Recomputed

from zbv_models.estimate.operations import is_known
from zbv_models.estimate.shapes import Degrees
from zbv_models.estimate.transformer import Transformer

Modules = tuple[Recomputed, ...]
CHEAP: Modules = ("mla_up_proj", "moe_act")
SETS: tuple[Modules, ...] = (
    (*CHEAP, "layernorm"),
    (*CHEAP, "layernorm", "mlp", "shared_experts"),
    ("mla_up_proj", "layernorm", "mlp", "moe"),
)
"""``moe`` repeats ``moe_act`` and ``shared_experts``, too, and the exchanges between experts."""
OP: Modules = ("op",)
"""What torchtitan recomputes instead of modules."""


def droppable(model: Transformer) -> frozenset[str]:
    """The modules whose recomputation drops a tensor of any layer."""
    return frozenset(
        module
        for kind in model.layers()
        if kind.can_recompute
        for _, half in kind.halves
        for tensor in half.part(model.shapes(kind, Degrees())).tensors
        for module in tensor.modules
    )


def has_operations(model: Transformer) -> bool:
    """Whether it is known what torchtitan's selective recomputation saves of every block."""
    return all(
        is_known(half.part(model.shapes(kind, Degrees())) for _, half in kind.halves) for kind in model.blocks
    )


def cheap_modules(model: Transformer) -> Modules:
    """The modules of a model that take little time to repeat; empty without any."""
    able = droppable(model)
    return (*_scores(model), *(module for module in CHEAP if module in able))


def module_sets(model: Transformer) -> tuple[Modules, ...]:
    """The different sets of a model, without modules that it does not have."""
    able, scores = droppable(model), _scores(model)
    found = ((*scores, *(module for module in each if module in able)) for each in ((), *SETS))
    return tuple(dict.fromkeys(filter(None, found)))


def keeps_scores(model: Transformer) -> bool:
    """Whether any attention is plain, which keeps its scores."""
    halves = (half for kind in model.layers() for _, half in kind.halves)
    return not all(getattr(half, "flash", True) for half in halves)


def _scores(model: Transformer) -> Modules:
    return ("core_attn",) if keeps_scores(model) else ()
