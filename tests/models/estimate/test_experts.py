"""Blocks with experts: what they compute, keep and exchange."""

from __future__ import annotations

from typing import Any

import pytest
from support.estimates import but, estimate_config, llama, parts
from zbv_models.estimate.config import estimate_layers
from zbv_models.estimate.model import Transformer
from zbv_models.estimate.model_layers import Kind, blocks
from zbv_models.estimate.part import Part

H, F, E, K = 1024, 512, 16, 4


def sparse(**changes: Any) -> Transformer:
    """Sixteen experts of width 512, of which a token uses four; 4096 tokens."""
    given = {"hidden": H, "layers": 4, "heads": 8, "experts": E, "experts_per_token": K, "expert_ffn": F}
    return llama(**{**given, **changes})


def experts(model: Transformer, **degrees: Any) -> Part:
    return parts(model, **degrees)["experts"]


def sent(part: Part, group: str) -> float:
    return sum(each.sent.forward for each in part.exchanges if each.group == group)


def test_expert_parallelism_divides_experts_and_keeps_the_work() -> None:
    """Each device receives as many tokens as it sends, for a quarter of the experts."""
    alone, shared = experts(sparse()), experts(sparse(), expert=4, data=4)
    assert shared.flops == alone.flops
    assert [product.rows for product in shared.products[1:]] == [4 * p.rows for p in alone.products[1:]]
    layers = estimate_layers(estimate_config(sparse(), data_parallel=4, expert_parallel=4))
    assert layers[1].parameters < estimate_layers(estimate_config(sparse()))[1].parameters


def test_all_to_all_sends_k_copies_of_every_token_to_other_devices_twice() -> None:
    """Dispatch and combination; 3 of 4 experts are elsewhere."""
    part = experts(sparse(), expert=4, data=4)
    (exchange,) = (each for each in part.exchanges if each.group == "expert")
    tokens = sparse().tokens
    assert exchange.sent.forward == exchange.sent.backward_input == 2 * (2 * tokens * K * H) * 3 / 4
    assert exchange.sent.backward_weight == 0
    assert exchange.calls.forward == 2
    assert sent(experts(sparse()), "expert") == 0
    assert (
        sent(experts(sparse(expert_hidden=H // 4), expert=4, data=4), "expert") == exchange.sent.forward / 4
    )


def test_tensor_parallel_devices_send_their_own_tokens() -> None:
    part = experts(sparse(), tensor=2, sequence_parallel=True, expert=4, data=2)
    assert sent(part, "expert") == sent(experts(sparse(), expert=4, data=4), "expert") / 2
    assert part.flops.forward == experts(sparse()).flops.forward / 2


def test_a_node_receives_a_token_once_and_copies_it() -> None:
    """Four nodes of two devices: a token with four experts is on 4 (1 - (3/4)⁴) of them."""
    part = experts(sparse(), expert=8, expert_in_node=2, data=8)
    tokens, nodes = sparse().tokens, 4 * (1 - 0.75**4)
    assert sent(part, "expert") == pytest.approx(2 * (2 * tokens * H) * nodes * 3 / 4)
    assert sent(part, "expert_in_node") == pytest.approx(2 * (2 * tokens * K * H) / 2)
    limited = experts(sparse(expert_nodes=1), expert=8, expert_in_node=2, data=8)
    assert sent(limited, "expert") == pytest.approx(2 * (2 * tokens * H) * 3 / 4)
    inside = experts(sparse(), expert=8, expert_in_node=8, data=8)
    assert sent(inside, "expert") == 0
    assert sent(inside, "expert_in_node") == 2 * (2 * tokens * K * H) * 7 / 8


def test_what_a_block_of_experts_keeps() -> None:
    """Bytes per token: norm and statistic, the router's input, probabilities and map, routed tensors."""
    tokens, part = sparse().tokens, experts(sparse())
    routed = K * (2 * H + 2 * 2 * F + 2 * F)
    assert part.after_forward == tokens * (2 * H + 4 + 2 * H + 4 * E + E + routed)
    waiting = K * (2 * H + 2 * F + 2 * 2 * F + 2 * H)
    assert part.after_input == tokens * (2 * H + 4 * E + waiting)


def halves(model: Transformer) -> list[tuple[str, Kind]]:

    return [half for kind in blocks(model) for _ in range(kind.count) for half in kind.halves[1:]]


def test_some_blocks_may_have_an_mlp() -> None:
    def kinds(**changes: Any) -> str:
        return "".join(name[0] for name, _ in halves(sparse(ffn=2048, **changes)))

    assert kinds() == "eeee"
    assert kinds(dense_layers=1) == "meee"
    assert kinds(expert_every=2) == "meme"
    names = [layer.name for layer in estimate_layers(estimate_config(sparse(dense_layers=1)))]
    assert names == ["embedding", "dense", "moe", "head"]
    names = [layer.name for layer in estimate_layers(estimate_config(sparse(expert_every=2)))]
    assert names == ["embedding", "dense.0", "moe.1", "dense.2", "moe.3", "head"]
    apart = estimate_layers(estimate_config(sparse(expert_every=2), granularity="half"))
    assert [layer.name for layer in apart[1:5]] == ["dense.0.attention", "dense.0.mlp", "moe.1.attention",
                                                    "moe.1.experts"]  # fmt: skip


def test_replicas_of_experts_share_their_optimizer() -> None:
    """Eight replicas with eight-way expert parallelism have no copies of experts, so ZeRO saves nothing."""

    def optimizer(**parallel: Any) -> float:
        return estimate_layers(estimate_config(sparse(), **parallel))[1].static.optimizer

    alone = optimizer(data_parallel=8, expert_parallel=8)
    shared = optimizer(data_parallel=8, expert_parallel=8, zero_stage=1)
    dense = parts(sparse())["attention"].parameters.total + experts(sparse()).parameters.replicated
    of_experts = 12 * (E // 8) * 3 * H * F
    assert alone == 12 * dense + of_experts
    assert shared == pytest.approx(12 * dense / 8 + of_experts, abs=2)
    more = optimizer(data_parallel=16, expert_parallel=8, zero_stage=1)
    assert more == pytest.approx(12 * dense / 16 + of_experts / 2, abs=2)


def test_exchanges_take_the_time_of_their_links() -> None:
    config = estimate_config(sparse(), data_parallel=4, expert_parallel=4)

    def forward(**device: Any) -> float:
        changed = but(config, device=but(config.device, **device))
        return estimate_layers(changed)[1].plain.times.forward

    free = forward(expert_parallel_overlap=1.0)
    volume = 2 * (2 * sparse().tokens * K * H) * 3 / 4
    assert forward() - free == pytest.approx(volume / 50e9 * 1e6 + 2 * 7)
    slower = forward(expert_parallel_bandwidth=10.0, expert_parallel_latency=1.0)
    assert slower - free == pytest.approx(volume / 10e9 * 1e6 + 2)
    apart = estimate_config(sparse(), data_parallel=8, expert_parallel=8, expert_parallel_in_node=2)
    between = 2 * (2 * sparse().tokens * H) * 4 * (1 - 0.75**4) * 3 / 4
    # Exchanges inside a node, half as long here, take place at the same time.
    assert estimate_layers(apart)[1].exchanged.forward == pytest.approx(between / 50e9 * 1e6 + 2 * 7)
