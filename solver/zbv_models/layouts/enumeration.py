"""All layouts of a model on a cluster, in families."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import chain, combinations, permutations, product
from math import factorial, isqrt, prod

from zbv_solver.problem.limits import MAX_PP_DEGREE

from zbv_models.estimate.fit import fits
from zbv_models.estimate.shapes import Degrees
from zbv_models.estimate.transformer import Transformer
from zbv_models.layouts.cluster import AnyCluster
from zbv_models.layouts.layout import ORDERS, Fixed, Layout, Order, Recompute

ZERO_STAGES = (0, 1, 2, 3)
MOST_LAYOUTS = 2_000_000
"""Most layouts of a search."""
MOST_LISTED = 400_000
"""Most layouts of a search that holds every single one: for executors, and for points of all layouts."""
MOST_ARRANGEMENTS = 24
"""Most orders of the groups along the pipeline for which all orders are enumerated."""


@dataclass(frozen=True, slots=True)
class LayoutFamily:
    """Layouts that differ only in parts that no microbatch's work depends on.

    A large cluster has a million layouts, and a search looks at few of them one by one.

    Attributes
    ----------
    first
        The first of them, which has all the parts that they share.
    zero_stages, orders, groups, kinds
        The parts that differ: any combination is a layout. ``kinds`` are of recomputation.
    modules
        What those with selective recomputation repeat.
    """

    first: Layout
    zero_stages: tuple[int, ...]
    orders: tuple[Order, ...]
    groups: tuple[tuple[int, ...], ...]
    kinds: tuple[Recompute, ...]
    modules: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.zero_stages) * len(self.orders) * len(self.groups) * len(self.kinds)

    def __iter__(self) -> Iterator[Layout]:
        for stage, order, groups, kind in product(self.zero_stages, self.orders, self.groups, self.kinds):
            yield replace(
                self.first,
                zero_stage=stage,
                placement=order,
                groups=groups,
                recompute=kind,
                recompute_modules=self.modules if kind == "selective" else (),
            )


def enumerate_layouts(
    model: Transformer,
    cluster: AnyCluster,
    global_batch: int,
    fixed: Fixed,
    modules: tuple[str, ...] = (),
) -> Iterator[LayoutFamily]:
    """Every layout whose degrees divide the cluster, the model and the global batch, in families.

    Two layouts that cost the same are one: without replicas there is nothing for ZeRO to share, and the
    order of groups matters only with several replicas and several pipeline ranks in a group of nodes.

    A cluster of several groups of nodes has the layouts of every set of its groups that use all of their
    devices. A pipeline rank has the same number of devices everywhere, and all of them are in one group.

    ``none`` and ``full`` are plans of ``per-stage``. Selective recomputation of ``modules`` is another
    choice, if there are any.
    """
    kinds: tuple[Recompute, ...] = ("per-stage", "selective") if modules else ("per-stage",)
    if fixed.recompute_layers is not None:
        kinds = ("per-stage",)
    elif fixed.recompute is not None:
        kinds = (fixed.recompute,)
    for used in _sets(len(cluster.groups)):
        sizes = [cluster.groups[group].devices for group in used]
        for degrees, pipeline in _degrees(model, sum(sizes), global_batch, fixed):
            if any(size * pipeline % sum(sizes) for size in sizes):
                continue
            ranks = [size * pipeline // sum(sizes) for size in sizes]
            arranged = arrangements(used, tuple(ranks)) if len(cluster.groups) > 1 else ((),)
            stages = _zero_stages(degrees.replicas, fixed)
            orders = _orders(degrees.data, max(ranks), fixed)
            for size in _divisors(global_batch // degrees.data, fixed.microbatch_size):
                first = Layout(
                    degrees.tensor,
                    degrees.context,
                    degrees.expert,
                    degrees.data,
                    pipeline,
                    size,
                    global_batch // degrees.data // size,
                    stages[0],
                    kinds[0],
                    orders[0],
                    arranged[0],
                    fixed.recompute_layers,
                    modules if kinds[0] == "selective" else (),
                )
                yield LayoutFamily(first, stages, orders, arranged, kinds, modules)


def _sets(groups: int) -> Iterator[tuple[int, ...]]:
    """All sets of groups, the largest first."""
    for size in range(groups, 0, -1):
        yield from combinations(range(groups), size)


@cache
def arrangements(groups: tuple[int, ...], ranks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The group of every pipeline rank, in every order, for the number of ranks of each group.

    If there are more than `MOST_ARRANGEMENTS`, the ranks of a group are neighbours, and the groups have every
    order.
    """
    each = [factorial(count) for count in ranks]
    if factorial(sum(ranks)) // prod(each) <= MOST_ARRANGEMENTS:
        return tuple(_orders_of(dict(zip(groups, ranks, strict=True))))
    blocks = [(group,) * count for group, count in zip(groups, ranks, strict=True)]
    return tuple(tuple(chain(*order)) for order in permutations(blocks))


def _orders_of(left: dict[int, int]) -> Iterator[tuple[int, ...]]:
    """The different orders of items, given by the number of each kind."""
    if not any(left.values()):
        yield ()
    for kind, count in left.items():
        if count:
            for rest in _orders_of({**left, kind: count - 1}):
                yield (kind, *rest)


def _degrees(
    model: Transformer, devices: int, global_batch: int, fixed: Fixed
) -> Iterator[tuple[Degrees, int]]:
    """Degrees that fit the model, and pipeline ranks."""
    ranks = min(MAX_PP_DEGREE, model.n_layers)
    experts = model.experts
    for tensor in _divisors(devices, fixed.tensor_parallel):
        if not fits(model, Degrees(tensor, tensor > 1)):
            continue
        for context in _divisors(devices // tensor, fixed.context_parallel):
            if not fits(model, Degrees(tensor, tensor > 1, context)):
                continue
            for pipeline in _divisors(devices // tensor // context, fixed.pipeline_parallel):
                data = devices // tensor // context // pipeline
                if pipeline > ranks or fixed.data_parallel not in (None, data) or global_batch % data:
                    continue
                for expert in _divisors(experts, fixed.expert_parallel):
                    if tensor * context * data % expert == 0:
                        yield Degrees(tensor, tensor > 1, context, expert=expert, data=data), pipeline


def _zero_stages(replicas: int, fixed: Fixed) -> tuple[int, ...]:
    if fixed.zero_stage is not None:
        return (fixed.zero_stage,)
    return ZERO_STAGES if replicas > 1 else ZERO_STAGES[:1]


def _orders(data: int, pipeline: int, fixed: Fixed) -> tuple[Order, ...]:
    if fixed.placement is not None:
        return (fixed.placement,)
    return ORDERS if data > 1 and pipeline > 1 else ORDERS[:1]


def _divisors(number: int, fixed: int | None = None) -> tuple[int, ...]:
    """The divisors in ascending order, or the fixed one if it divides."""
    if fixed is not None:
        return (fixed,) if number % fixed == 0 else ()
    return _all_divisors(number)


@lru_cache(maxsize=4096)
def _all_divisors(number: int) -> tuple[int, ...]:
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return tuple(sorted({*small, *(number // divisor for divisor in small)}))
