"""The files of Hetu-Galvatron's profiler are layers.

The numbers are an excerpt of ``computation_profiling_bf16_llama2-7b_all.json`` and
``memory_profiling_bf16_llama2-7b_all.json`` in ``galvatron/models/gpt/configs`` of PKU-DAIR/Hetu-Galvatron at
cea12ffb (Apache License 2.0).
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from zbv_solver.errors import InvalidInput
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.reading import load_problem

TIMES = {
    "layernum[2]_bsz1_seq2048": 15.0786208152771,
    "layertype_0_bsz1_seq2048": 4.396252679824831,
    "layertype_other_bsz1_seq2048": 6.286115455627439,
    "layertype_0_bsz8_seq2048": 3.9369729995727534,
    "layertype_other_bsz8_seq2048": 2.958646392822267,
}
ACTIVATIONS = {"1": 514.5634765625, "2": 273.28173828125, "checkpoint": 32.0}
MEMORY: dict[str, Any] = {
    "1_1_8_sp": {"layernum[1]_bsz8_seq2048_rank0_ms": 904.3330078125},
    "layertype_0_sp": {"2048": {"parameter_size": 778.2236328125, "tp_activation_per_bsz_dict": ACTIVATIONS}},
    "other_memory_pp_on_first_sp": {
        "2048": {"model_states": {"1": 2021.0048828125}, "activation": {"1": 198.7357177734375}}
    },
    "other_memory_pp_on_last_sp": {
        "2048": {"model_states": {"1": 2021.0673828125}, "activation": {"1": 717.560302734375}}
    },
}
LAYERS = {"repeat": [32], "microbatch_size": 8, "sequence_length": 2048}
MIB = 2**20


def loaded(folder: Path, times: Any = TIMES, memory: Any = MEMORY, **changed: Any) -> LayeredProblem:
    for name, document in (("times.json", times), ("memory.json", memory)):
        (folder / name).write_text(json.dumps(document))
    layers = {"files": ["memory.json", "times.json"], **LAYERS, **changed.pop("layers", {})}
    path = folder / "problem.json"
    path.write_text(json.dumps({"pp_degree": 2, "microbatches": 8, "layers": layers, **changed}))
    problem = load_problem(path)
    assert isinstance(problem, LayeredProblem)
    return problem


def test_layers_have_the_times_and_the_memory_of_their_microbatches(tmp_path: Path) -> None:
    problem = loaded(tmp_path)
    embedding, block, head = problem.model.layers
    assert [embedding.name, block.name, head.name] == ["embedding", "layer_0", "head"]
    assert block.repeat == 32
    costs = block.costs
    assert costs.forward == costs.backward_input == costs.backward_weight == pytest.approx(8 * 3936.9729996)
    assert head.costs.forward == pytest.approx(8 * 2958.6463928)
    assert embedding.costs.forward == 0
    assert costs.memory.forward == pytest.approx(8 * 514.5634765625 * MIB)
    assert costs.memory.backward_input == 0
    # 16 bytes for each of the 4 h² + 3 h f + 2 h parameters of a block; the profiler's sum is 1 % larger.
    assert costs.memory.static == pytest.approx(16 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096), rel=0.01)
    assert head.costs.memory.static == pytest.approx(2021.0673828125 * MIB)
    assert head.costs.memory.workspace == pytest.approx(8 * 717.560302734375 * MIB)


def test_a_recomputed_layer_runs_its_forward_again_and_then_holds_all_of_it(tmp_path: Path) -> None:
    again = loaded(tmp_path).model.layers[1].recompute
    assert again is not None
    assert again.forward == pytest.approx(8 * 3936.9729996)
    assert again.backward_input == 2 * again.forward
    assert again.memory.forward == 8 * 32 * MIB
    assert again.memory.forward + again.memory.backward_input == pytest.approx(8 * 514.5634765625 * MIB)


@pytest.mark.parametrize(
    ("layers", "found"),
    [
        ({"microbatch_size": 3}, "found 1 types and 3 x 2048 tokens; the file must have every type"),
        ({"microbatch_size": 3}, "It has 0 of 1 x 2048, 0 of 8 x 2048, other of 1 x 2048"),
        ({"repeat": [12, 12]}, "/layers/repeat: found 2 types"),
        ({"files": ["times.json", "problem.json"]}, "/layers/files/1: found problem.json, which is neither"),
        ({"files": ["times.json", "times.json"]}, "found no layertype_0 for 2048 tokens"),
        ({"files": ["times.json"]}, "/layers/files"),
        ({"layer_count": 32}, "/layers/layer_count: unknown key"),
    ],
)
def test_what_the_files_do_not_have_is_refused(layers: dict[str, Any], found: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as refused:
        loaded(tmp_path, layers=layers)
    assert found in str(refused.value)


@pytest.mark.parametrize("wrong", [None, "3.9", -1])
@pytest.mark.parametrize("is_time", [True, False])
def test_values_that_are_no_amounts_are_refused(wrong: Any, is_time: bool, tmp_path: Path) -> None:
    times, memory = copy.deepcopy(TIMES), copy.deepcopy(MEMORY)
    if is_time:
        times["layertype_0_bsz8_seq2048"] = wrong
    else:
        memory["layertype_0_sp"]["2048"]["parameter_size"] = wrong
    with pytest.raises(InvalidInput, match="must be a number from 0"):
        loaded(tmp_path, times, memory)


def test_other_units_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="Leave this key out"):
        loaded(tmp_path, units={"time": "ms"})
