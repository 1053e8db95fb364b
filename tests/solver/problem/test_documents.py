"""Documents of problems and jitter: equal spellings, reading back what was written, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zbv_solver as zbv
from hypothesis import example, given
from hypothesis import strategies as st
from support import cuts
from support.changed import ABSENT, changed
from support.cuts import BLOCK, HEAD, RECOMPUTE, document, layered
from support.paths import ROOT
from support.problems import DIFFERING, differing_problems, problems, rough_problems, uniform_document
from zbv_solver.documents.files import canonical_json, decode_json
from zbv_solver.problem.jitter import Jitter, Spread, jitter_json, parse_jitter
from zbv_solver.problem.layered_problem import AnyProblem, LayeredProblem
from zbv_solver.problem.problem import Units
from zbv_solver.problem.writing import any_problem_json

STAGES = uniform_document(2, 3)
LAYERS = document()
NAMES = ["embedding", *(f"block.{copy}" for copy in range(8)), "head"]
PARTITION = [NAMES[:2], NAMES[2:3], NAMES[3:4], NAMES[4:]]
FUSED, AGAIN = changed(LAYERS, {"layers.1.backward": 2.5}), {"backward_input": 4}
LOOP = {**STAGES, "placement": "loop", "chunks": 3}
VALID = {"stages": STAGES, "differing": DIFFERING, "layers": LAYERS, "devices": document(**cuts.MIXED)}
VALID["jitter"] = {"action": 0.05}
VALID["copies"] = changed(STAGES, {"costs.offload": 12})
VALID["pairs"] = changed(STAGES, {"costs.communication": {"forward": 0.5}})
VALID["copied layers"] = document(costs={"host_link": {"latency": 1, "bandwidth": 1}})
VALID["paired layers"] = changed(LAYERS, {"layers.1.communication": {"forward": 1}})


@pytest.mark.parametrize(
    ("base", "one", "other"),
    [
        (LOOP, {"costs.forward": 1}, {"costs.forward": [1] * 3}),
        (LOOP, {"costs.forward": [5, 7, 9]}, {"costs.forward": [5, 5, 7, 7, 9, 9]}),
        (STAGES, {"memory": ABSENT}, {"memory": {"forward": 0, "backward_input": 0, "backward_weight": 0}}),
        (STAGES, {"costs.backward": None}, {}),
        (STAGES, {"costs.p2p": ABSENT}, {"costs.p2p": [0, 0, 0]}),
        (STAGES, {"costs.forward": -0.0}, {"costs.forward": 0}),
        (STAGES, {"chunks": 2}, {}),
        (STAGES, {"placement": "single", "chunks": 1}, {"placement": "single"}),
        (STAGES, {"measured": {"a": "b", "c": "d"}}, {"measured": {"c": "d", "a": "b"}}),
        (STAGES, {"costs.forward": {"fixed": 2}}, {"costs.forward": 2}),
        (LAYERS, {"cut": {"first": 2, "last": 1}}, {"cut": {"first": 2, "last": 1, "together": []}}),
        (DIFFERING, {"features": None, "sequences": [[3, 1], [2], []]},
         {"features": {"tokens": [4, 2, 0], "tokens_squared": [10, 4, 0]}}),
        # The fused backward grows by as much as I and W together.
        (FUSED, {"layers.1.recompute": AGAIN}, {"layers.1.recompute": {**AGAIN, "backward": 4.5}}),
        (LAYERS, {"layers.0.parameters_bytes": 7, "cut": {}},
         {"layers.0.parameters_bytes": 7, "layers.0.memory.static": 7}),
    ],
)  # fmt: skip
def test_two_spellings_of_a_problem(base: dict[str, Any], one: dict[str, Any], other: dict[str, Any]) -> None:
    first, second = (zbv.parse(changed(base, changes)) for changes in (one, other))
    assert first == second
    assert canonical_json(any_problem_json(first)) == canonical_json(any_problem_json(second))


@st.composite
def any_problems(draw: st.DrawFn) -> AnyProblem:
    """Every kind of problem, with units and a measured program; of layers also a cut."""
    kinds = ("v", "loop", "single", "auto")
    of_layers = cuts.layered_problems(4, kinds) | cuts.layered_problems(4, kinds, mixed=True)
    by_stages = problems(kinds=("v", "loop", "single")) | rough_problems() | differing_problems()
    problem: AnyProblem = draw(by_stages | of_layers)
    if isinstance(problem, LayeredProblem):
        p2p = draw(st.sampled_from((0.0, 0.5))) if problem.link is None and not problem.links else 0.0
        static = tuple(draw(st.sampled_from((0.0, 3.5))) for _ in range(problem.pp_degree))
        problem = replace(problem, blocking=draw(st.booleans()), p2p=p2p, static=static)
        choices: list[AnyProblem] = [problem, *cuts.every_cut(problem, problem.placements[0])]
        problem = draw(st.sampled_from(choices))
    units = draw(st.sampled_from((Units(), Units(memory="GB"), Units("us", "bytes"))))
    measured = draw(st.sampled_from(((), (("device", "H200"), ("torch", "2.13.0")))))
    return replace(problem, units=units, measured=measured)


@example(layered(layers=[cuts.EMBEDDING, {**BLOCK, "recompute": RECOMPUTE}, HEAD], recompute_modules=["mlp"]))
@given(any_problems())
def test_a_problem_is_read_as_it_was_written(problem: AnyProblem) -> None:
    written = json.loads(json.dumps(any_problem_json(problem)))
    assert zbv.parse(written) == problem
    assert any_problem_json(zbv.parse(written)) == written


@pytest.mark.parametrize("given_as", [list, np.array, lambda values: np.array(values, dtype=np.float32)])
def test_sequences_and_numbers_of_any_type_have_the_same_document(given_as: Callable[[Any], Any]) -> None:
    """The document's text is part of a plan's identity."""
    problem: Any = zbv.parse(changed(STAGES, {"memory.limit": 4}))
    costs = {name: given_as(values) for name, values in vars(problem.costs).items() if values is not None}
    memory = replace(problem.memory, limit=given_as(problem.memory.limit))
    other = replace(problem, costs=replace(problem.costs, **costs), memory=memory)
    assert canonical_json(any_problem_json(other)) == canonical_json(any_problem_json(problem))


def test_absent_keys_of_a_device_and_of_recomputation_there_keep_the_nearest_values() -> None:
    slow = {"forward": 6, "memory": {"static": 9}, "recompute": {"backward_input": 8}}
    layer = changed(BLOCK, {"recompute": RECOMPUTE, "on": {"slow": slow}})
    problem = layered(layers=[cuts.EMBEDDING, layer, HEAD], devices=["fast", "slow"])
    block = problem.model.layers[1]
    plain, again = block.costs_when(False, "slow"), block.costs_when(True, "slow")
    assert (plain.forward, plain.backward_input, plain.memory.static, plain.memory.forward) == (6, 2, 9, 0)
    assert (again.forward, again.backward_input, again.memory) == (6, 8, plain.memory)
    assert block.costs_when(True, "fast").memory.static == 1


def test_the_example_in_the_documentation_is_valid() -> None:
    text = (ROOT / "docs/formats.md").read_text(encoding="utf-8")
    example = text.partition("## Layers")[2].partition("```json")[2].partition("```")[0]
    problem = zbv.parse(json.loads(example))
    assert {placement.kind for placement in problem.placements} == {"v", "loop", "single"}  # type: ignore[union-attr]


WRONG: dict[str, list[tuple[dict[str, Any], str, str]]] = {
    "stages": [
        ({"costs.forward": -1}, "/costs/forward", "must not be negative"),
        ({"costs.forward": [1, 1, 1, -2]}, "/costs/forward/3", "must not be negative"),
        ({"costs.forward": 1.1e15}, "/costs/forward", "larger unit"),
        ({"costs.forward": 1e-101}, "/costs/forward", "smaller unit"),
        ({"costs.forward": 9e14}, "/costs/forward", "together"),
        ({"costs.forward": [1, True, 1, 1]}, "/costs/forward/1", "valid number"),
        ({"costs.forward": [1, 2, 3]}, "/costs/forward", "3 values; must be a number, 2 values"),
        ({"costs.p2p": [1, 2]}, "/costs/p2p", "2 values; must be a number or 3 values"),
        ({"costs.forwards": 1}, "/costs/forwards", "unknown key"),
        ({"costs.backward": [1]}, "/costs/backward", "found 1 values"),
        ({"memory.backward_input": -1}, "/memory", "sum to"),
        ({"memory.forward": -1}, "/memory/forward /memory", "must not be negative"),
        ({"memory.backward_input": -2, "memory.backward_weight": 1}, "/memory/backward_weight", "W releases"),
        ({"memory.backward_input": -5e-324}, "/memory/backward_input /memory", "at least 1e-120"),
        ({"memory.limit": [1, 2, 3]}, "/memory/limit", "2 values (one per rank)"),
        ({"memory.static": {"tokens": 1}}, "/memory/static", "not an object"),
        ({"pp_degree": 1025}, "/pp_degree", "less than or equal to 1024"),
        ({"pp_degree": "2"}, "/pp_degree", "valid integer"),
        ({"microbatches": 10**5000}, "/microbatches", "found a number too long to print"),
        ({"pp_degree": 1024, "microbatches": 2049}, "/microbatches", "product must be at most"),
        ({"chunks": 3}, "/chunks", "placement v has 2 per rank"),
        ({"measured": {str(at): "" for at in range(33)}}, "/measured", "at most 32"),
        ({"pp_degree": ABSENT, "microbatches": 0, "costs": {"forward": "x"}},
         "/pp_degree /microbatches /costs/forward /costs/backward_input /costs/backward_weight", "required"),
        ({"costs.forward": {"tokens": 1}}, "/costs/forward/tokens", "no features"),
    ],
    "differing": [
        ({"features.tokens": [1, 2]}, "/features/tokens", "must be 3"),
        ({"features.tokens": [1, 2, -1]}, "/features/tokens/2", "negative"),
        ({"features.tokens": [1, 1e300, -1]}, "/features/tokens/1", "larger unit"),
        ({"features.tokens": [0, 1e-300, 3]}, "/features/tokens/1", "smaller unit"),
        ({"features.fixed": [1, 2, 3]}, "/features/fixed", "the part without features"),
        ({"features": {f"f{k}": [1, 2, 3] for k in range(17)}}, "/features", "16"),
        ({"features": {"tokens": [1, 2, 3]}}, "/costs/forward/tokens_squared", "one of"),
        ({"sequences": [[1], [2], [3]]}, "/features/tokens", "together with sequences"),
        ({"features": None, "sequences": [[1], [2]]}, "/sequences", "must be 3"),
        ({"features": None, "sequences": [[1], [2], [3, -1]]}, "/sequences/2/1", "negative"),
        ({"costs.forward": {"fixed": -5, "tokens": 2}}, "/costs/forward", "microbatch 2 on stage 0"),
        ({"costs.forward": {"tokens": 1e15}}, "/costs/forward", "from 0 to 1e+15"),
        ({"costs.forward": {"tokens": 1e16}}, "/costs/forward/tokens", "larger unit"),
        ({"costs.forward": {"tokens": [1, 2, 3]}}, "/costs/forward/tokens", "one per chunk"),
        ({"costs.p2p": {"fixed": -3, "tokens": 1}}, "/costs/p2p", "microbatch 2 on boundary 0"),
        ({"memory.backward_input": {"tokens": -0.5}}, "/memory", "sum to"),
        ({"memory.forward": {"fixed": -4, "tokens": 2}}, "/memory/forward /memory", "microbatch 2"),
        ({"memory.backward_input.tokens": -3, "memory.backward_weight.tokens": 1}, "/memory/backward_weight",
         "W releases"),
    ],
    "layers": [
        ({"layers": [{}] * 513}, "/layers", "found 513 entries; must be at most 512"),
        ({"layers": []}, "/layers", "at least one"),
        ({"layers": [BLOCK, {**BLOCK, "repeat": 2}]}, "/layers/1/name", "found 'block.0' twice"),
        ({"layers.1.repeat": 1000}, "/layers", "at most 512"),
        ({"layers.1.forward": 2e14}, "/layers", "as the sum over all layers"),
        ({"layers.1.output_bytes": -1}, "/layers/1/output_bytes", "must not be negative"),
        ({"layers.1.backward_weight": ABSENT}, "/layers/1/backward_weight", "required"),
        ({"layers.1.memory": {"forward": 1}}, "/layers/1/memory", "of memory sum to 1"),
        ({"layers.1.recompute.memory.forward": 2}, "/layers/1/recompute/memory", "must be 0"),
        ({"layers.1.on": {"/": {}}, "layers.1.recompute": {}, "devices": ["/"] * 2},
         "/layers/1/on/~1/recompute", "on every device"),
        ({"layers": [HEAD]}, "/layers", "found 1 separable layers for 4 stages"),
        ({"cut.together": [["embedding", "nose"]]}, "/cut/together/0", "'nose', which is not a layer"),
        ({"cut.first": 11}, "/cut/first", "at most the model's 8 transformer layers"),
        ({"cut.first": 0, "cut.together": [PARTITION[0]]}, "/cut/first", "separates"),
        ({"cut.first": 8}, "/layers", "every stage needs at least one"),
        ({"cut": {"first": 5, "last": 5}}, "/cut", "2 more than the model has"),
        ({"cut": {"first": 3, "last": 3}, "placement": "single"}, "/cut", "2 of the model's layers"),
        ({"costs.p2p": [1, 2, 3]}, "/costs/p2p", "found a list"),
        ({"costs.forward": 3}, "/costs/forward", "found together with layers"),
        ({"costs.link": {"bandwidth": 3}}, "/costs", "found both p2p and link"),
        ({"costs": {"link": {"bandwidth": 0}}}, "/costs/link/bandwidth", "must be positive"),
        ({"costs": {"link": {"bandwidth": 1e-300}}}, "/costs/link", "longest transfer"),
        ({"memory.limit": [1, 2, 3]}, "/memory/limit", "found 3 values"),
        ({"recompute": [True]}, "/recompute", "without a partition"),
        ({"placement": "auto", "chunks": 2}, "/chunks", "placement auto chooses"),
        ({"features": {}}, "/features", "plan the layers without this key"),
        ({"partition": [["embedding"], ["block.1"], [], []]}, "/partition/1/0", "expected 'block.0'"),
        ({"partition": [["embedding"], ["block.0"], [], []]}, "/partition", "'block.1' and later"),
        ({"partition": [NAMES]}, "/partition", "found 1 stages"),
        ({"partition": PARTITION, "placement": "auto"}, "/placement", "name the placement"),
        ({"partition": PARTITION, "recompute": [True]}, "/recompute", "must be 4, one per stage"),
        ({"partition": PARTITION, "costs.forward": [3, 2, 2, 16]}, "/costs/forward", "[3, 2, 2, 15]"),
        ({"layers": [None]}, "/layers/0", "must be a JSON object"),
    ],
    "devices": [
        ({"devices": ["fast", "slow"]}, "/devices", "must be 3, one per rank"),
        ({"devices": ["fast", "fast", "fast"]}, "/layers/1/on", "which no rank has"),
        ({"pp_degree": 9, "devices": list("abcdefghi")}, "/devices /layers/1/on", "at most 8"),
        ({"costs.link": cuts.LINKS[:2]}, "/costs/link", "found 2 links"),
        ({"costs.link.2.bandwidth": 0}, "/costs/link/2/bandwidth", "positive"),
        ({"costs.link.2.bandwidth": ABSENT}, "/costs/link/2/bandwidth", "required"),
        ({"layers": [{**BLOCK, "on": {"slow": {"forward": -1}}}]}, "/layers/0/on/slow/forward", "negative"),
        ({"layers": [{**BLOCK, "on": {"slow": {"recompute": {}}}}]}, "/layers/0/recompute", "absent"),
        ({"layers.1.recompute": {"backward_input": 4}}, "/layers/1/on/slow/recompute", "absent"),
        ({"features": {"tokens": [1] * 4}}, "/features", "layers are the same for every microbatch"),
        ({"sequences": [[1]] * 4}, "/sequences", "layers are the same for every microbatch"),
    ],
    "copies": [
        ({"costs.offload": -1}, "/costs/offload", "must not be negative"),
        ({"costs.offload": [1, 2, 3]}, "/costs/offload", "found 3 values"),
        ({"costs.offload": {"fixed": 1}}, "/costs/offload", "found"),
        ({"costs.reload": [1, 2, 3]}, "/costs/reload", "found 3 values"),
        ({"costs.offload": None, "costs.reload": 3}, "/costs/reload", "found"),
        ({"memory.offloadable": 3}, "/memory/offloadable", "found"),
        ({"memory.host_limit": [1, 2, 3]}, "/memory/host_limit", "found 3 values"),
        ({"costs.offload": None, "memory.host_limit": 3}, "/memory/host_limit", "found"),
    ],
    "pairs": [
        ({"costs.communication.forward": 19}, "/costs/communication/forward", "microbatch 0 on stage 0"),
        ({"costs.communication.backward": 31}, "/costs/communication/backward", "takes 2"),
        ({"costs.communication.forward": -1}, "/costs/communication/forward", "must not be negative"),
        ({"costs.communication.forward": [1, 2, 3]}, "/costs/communication/forward", "found 3 values"),
        ({"costs.communication.weights": 1}, "/costs/communication/weights", "unknown key"),
        *(({"costs.pair_factor": factor}, "/costs/pair_factor", "a number from 1") for factor in (0.5, 0)),
    ],
    "copied layers": [
        ({"costs.host_link": None, "memory.host_limit": 1}, "/memory/host_limit", "found"),
        ({"costs.host_link.bandwidth": 0}, "/costs/host_link/bandwidth", "must be positive"),
        ({"costs.host_link.latency": -1}, "/costs/host_link/latency", "must not be negative"),
        ({"costs.host_link.bandwidth": 1e-300}, "/costs/host_link", "found"),
        ({"memory.host_limit": [1, 1, 1]}, "/memory/host_limit", "found 3 values"),
        *((changes | cut, pointer, "found")
          for changes, pointer in (({"costs.offload": 1}, "/costs/offload"),
                                   ({"memory.offloadable": 1}, "/memory/offloadable"))
          for cut in ({}, {"costs.host_link": ABSENT, "partition": PARTITION})),
    ],
    "paired layers": [
        ({"layers.1.communication.forward": 15}, "/layers/1/communication/forward", "found 15"),
        ({"layers.1.communication.backward_input": -1}, "/layers/1/communication/backward_input", "found -1"),
        ({"layers.1.recompute.forward": 0.5}, "/layers/1/recompute/communication/forward", "found"),
        ({"costs.pair_factor": 0.9}, "/costs/pair_factor", "found 0.9"),
        ({"costs.communication.forward": [1]}, "/costs/communication", "found"),
    ],
    "jitter": [
        ({"action": {"F": 11}}, "/action/F", "must be from 0 to 10"),
        ({"rank": [0, -1]}, "/rank/1", "must be from 0 to 10"),
        ({"rank": []}, "/rank", "at least 1"),
        ({"transfer": {"samples": [-1]}}, "/transfer/samples/0", "must be a factor"),
        ({"noise": 1}, "/noise", "unknown key"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "changes", "pointers", "words"), [(kind, *row) for kind, rows in WRONG.items() for row in rows]
)
def test_wrong_documents_are_refused_by_key(kind: str, changes: Any, pointers: str, words: str) -> None:
    with pytest.raises(zbv.InvalidInput) as caught:
        (parse_jitter if kind == "jitter" else zbv.parse)(changed(VALID[kind], changes))
    assert {issue.pointer for issue in caught.value.issues} == set(pointers.split())
    assert words in str(caught.value)


@pytest.mark.parametrize("number", ["9" * 5000, "1e999", "NaN", "-Infinity", "4e-320"], ids=str.__len__)
@pytest.mark.parametrize("key", ["costs.forward", "microbatches", "layers.1.repeat"])
def test_a_number_out_of_range_is_refused_by_its_key(key: str, number: str) -> None:
    base = LAYERS if "layers" in key else STAGES
    text = json.dumps(changed(base, {key: "N"})).replace('"N"', number)
    with pytest.raises(zbv.InvalidInput, match=f"/{key.replace('.', '/')}: found"):
        zbv.parse(decode_json(text))


spreads = st.one_of(
    st.floats(0, 10).map(Spread),
    st.lists(st.floats(0, 3), min_size=1, max_size=3).map(lambda samples: Spread(samples=tuple(samples))),
)
actions = st.tuples(*[spreads] * 4) | spreads.map(lambda spread: (spread,) * 4)


@given(st.builds(Jitter, actions, st.lists(spreads, min_size=1, max_size=3).map(tuple), spreads))
def test_jitter_is_read_as_it_was_written(jitter: Jitter) -> None:
    assert parse_jitter(json.loads(json.dumps(jitter_json(jitter)))) == jitter


@pytest.mark.parametrize(("text", "same"), [
    ("5%", {"action": 0.05, "transfer": 0.05}),
    ("action=5%,transfer=20%", {"action": 0.05, "transfer": 0.2}),
    ("rank=0.5, W=10%", {"action": {"W": 0.1}, "rank": 0.5}),
    ("action=1,B=0", {"action": {"F": 1, "I": 1, "W": 1}}),
    ("", "jitter is written as 5%"),
    ("colour=5%", "jitter is written as 5%"),
    ("action=five", "jitter is written as 5%"),
    ("action=5%,action=6%", "found action twice"),
    ("-5%", "must be from 0 to 10"),
    ("nan", "must be from 0 to 10"),
])  # fmt: skip
def test_the_short_form_of_jitter(text: str, same: dict[str, Any] | str) -> None:
    with pytest.raises(zbv.InvalidInput, match=same) if isinstance(same, str) else nullcontext():
        assert parse_jitter(text) == parse_jitter(same)
