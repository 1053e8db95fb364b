"""Inboxes and outboxes: order, look-ahead, and agreement on shapes."""

from __future__ import annotations

import pytest
import torch
from support.thread_transport import ThreadHub, ThreadTransport
from torch import Tensor
from zbv_solver.plans.channels import Channel, ChannelKind, Transfer
from zbv_worker.errors import ModelError
from zbv_worker.transport.channels import ChannelKey, Pending, Receive, Send, TensorSpec
from zbv_worker.transport.endpoints import Inbox, Outbox, decode_header, encode_header


class Arrived:
    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    def wait(self, timeout: float) -> Tensor:
        return self.tensor

    on_stream = wait


class Wire(ThreadTransport):
    """Every sent tensor arrives at once; records the posted receives."""

    def __init__(self) -> None:
        super().__init__(ThreadHub(2), 0)
        self.sent: list[Tensor] = []
        self.posted_specs: list[TensorSpec] = []

    def sender(self, key: ChannelKey) -> Send:
        return lambda tensor, label: self.sent.append(tensor)

    def receiver(self, key: ChannelKey) -> Receive:
        return self.receive

    def receive(self, spec: TensorSpec) -> Pending:
        self.posted_specs.append(spec)
        tensor = self.sent[len(self.posted_specs) - 1]
        assert TensorSpec.of(tensor) == spec
        return Arrived(tensor)


def channel(*transfers: str, kind: ChannelKind = "activation") -> Channel:
    return Channel(0, 1, kind, tuple(map(Transfer.parse, transfers)))


def send_all(wire: Wire, carried: Channel, shapes: dict[int, tuple[int, ...]]) -> dict[Transfer, Tensor]:
    outbox = Outbox(wire, carried)
    sent = {}
    for transfer in carried.transfers:
        sent[transfer] = torch.randn(shapes[transfer.boundary])
        outbox.send(transfer, sent[transfer], str(transfer))
    return sent


@pytest.mark.parametrize("look_ahead", [1, 2, 5])
def test_tensors_are_taken_in_any_order_with_boundaries_of_different_shapes(look_ahead: int) -> None:
    carried = channel("0:1", "0:0", "2:1", "0:2", "2:0", "2:2")
    wire = Wire()
    sent = send_all(wire, carried, {0: (2, 3), 2: (4,)})
    specs: dict[int, TensorSpec] = {}
    inbox = Inbox(wire, carried, specs, look_ahead)
    inbox.begin()
    for text in ("0:0", "0:1", "2:0", "2:1", "2:2", "0:2"):
        transfer = Transfer.parse(text)
        assert inbox.take(inbox.index(transfer), 1.0) is sent[transfer]
    assert specs == {0: TensorSpec((2, 3), torch.float32), 2: TensorSpec((4,), torch.float32)}
    assert len(wire.sent) == len(wire.posted_specs) == 6 + 2  # one header per boundary, once


def test_receives_are_posted_ahead_by_the_window_and_up_to_the_next_needed_tensor() -> None:
    carried = channel(*(f"0:{j}" for j in range(8)))
    wire = Wire()
    send_all(wire, carried, {0: (1,)})
    inbox = Inbox(wire, carried, {}, look_ahead=2)
    inbox.begin()
    assert len(wire.posted_specs) == 0  # the shape is not known yet, and beginning a step must not wait
    inbox.take(inbox.index(Transfer(0, 0)), 1.0)
    assert len(wire.posted_specs) == 1 + 1 + 2
    inbox.take(inbox.index(Transfer(0, 6)), 1.0)
    assert len(wire.posted_specs) == 1 + 7  # five wait unused: no further ones are posted
    for j in range(1, 6):
        inbox.take(inbox.index(Transfer(0, j)), 1.0)
    assert len(wire.posted_specs) == 1 + 8


def test_the_next_step_posts_at_once_and_sends_no_header_again() -> None:
    carried = channel("0:0", "0:1")
    wire = Wire()
    inbox, outbox = Inbox(wire, carried, {}, look_ahead=2), Outbox(wire, carried)
    for step in range(3):
        for transfer in carried.transfers:
            outbox.send(transfer, torch.full((1,), float(step)), "")
        inbox.begin()
        assert [float(inbox.take(inbox.index(transfer), 1.0)) for transfer in carried.transfers] == [
            step,
            step,
        ]
    assert len(wire.sent) == 1 + 6


def test_gradients_have_the_shape_of_the_activation_and_no_header() -> None:
    carried = channel("0:0", "0:1", kind="gradient")
    wire = Wire()
    specs = {0: TensorSpec((3,), torch.float32)}
    sent = send_all(wire, carried, {0: (3,)})
    inbox = Inbox(wire, carried, specs, look_ahead=1)
    inbox.begin()
    assert inbox.take(inbox.index(Transfer(0, 1)), 1.0) is sent[Transfer(0, 1)]
    assert len(wire.sent) == 2


def test_a_stage_whose_output_changes_its_shape_is_refused() -> None:
    outbox = Outbox(Wire(), channel("0:0", "0:1"))
    outbox.send(Transfer(0, 0), torch.zeros(2, 3), "0F0")
    with pytest.raises(ModelError, match=r"0F1: the output is \[2, 2\] float32, but it was \[2, 3\] float32"):
        outbox.send(Transfer(0, 1), torch.zeros(2, 2), "0F1")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4, 5)])
def test_headers_round_trip(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    spec = TensorSpec(shape, dtype)
    assert decode_header(encode_header(spec)) == spec


def test_dtypes_that_cannot_be_sent_are_refused() -> None:
    with pytest.raises(ModelError, match="int64 tensor of 1 dimensions"):
        encode_header(TensorSpec((3,), torch.int64))
