"""Inboxes and outboxes: order, look-ahead, and agreement on shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.thread_transport import ThreadHub, ThreadTransport
from torch import Tensor
from zbv_solver.plans.channels import Channel, Transfer
from zbv_worker.errors import ModelError
from zbv_worker.transport.channels import ChannelKey, Pending, Receive, Send
from zbv_worker.transport.endpoints import Crossings, Inbox, Outbox
from zbv_worker.values.packing import HEADER, decode_header, encode_header
from zbv_worker.values.structure import Structure, TensorSpec, tensors_of


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


def channel(*transfers: str) -> Channel:
    return Channel(0, 1, tuple(map(Transfer.parse, transfers)))


MICROBATCHES = 10


def crossings(**known: tuple[int, ...]) -> Crossings:
    """Of equal microbatches; ``b4=(5,)`` if what crosses boundary 4 is known."""
    made = Crossings(MICROBATCHES)
    for boundary, shape in known.items():
        made.add(int(boundary[1:]), 0, Structure.of_tensor(TensorSpec(shape, torch.float32)))
    return made


def take(inbox: Inbox, text: str) -> Any:
    return inbox.take(inbox.index(Transfer.parse(text)))


def send_all(wire: Wire, carried: Channel, shapes: dict[int, tuple[int, ...]]) -> dict[Transfer, Tensor]:
    outbox = Outbox(wire, carried, crossings())
    sent = {}
    for transfer in carried.transfers:
        sent[transfer] = torch.randn(shapes[transfer.boundary])
        outbox.sender(transfer, str(transfer))(sent[transfer])
    return sent


@pytest.mark.parametrize("look_ahead", [0, 1, 2, 5])
def test_tensors_are_taken_in_any_order_with_boundaries_of_different_shapes(look_ahead: int) -> None:
    carried = channel("A0:1", "A0:0", "A2:1", "G4:1", "A0:2", "A2:0", "A2:2", "G4:0")
    wire = Wire()
    sent = send_all(wire, carried, {0: (2, 3), 2: (4,), 4: (5,)})
    known = crossings(b4=(5,))
    inbox = Inbox(wire, carried, known, look_ahead)
    inbox.begin(1.0)
    for text in ("A0:0", "A0:1", "A2:0", "G4:1", "A2:1", "A2:2", "G4:0", "A0:2"):
        assert take(inbox, text) is sent[Transfer.parse(text)]
    shapes = {boundary: each.specs[0].shape for boundary, each in known.largest().items()}
    assert shapes == {0: (2, 3), 2: (4,), 4: (5,)}
    # One header per boundary of activations, once; none for gradients.
    assert len(wire.sent) == len(wire.posted_specs) == 8 + 2


@pytest.fixture
def wire() -> Wire:
    return Wire()


def test_receives_are_posted_ahead_of_the_furthest_needed_tensor(wire: Wire) -> None:
    carried = channel(*(f"A0:{j}" for j in range(10)))
    send_all(wire, carried, {0: (1,)})
    inbox = Inbox(wire, carried, crossings(), look_ahead=2)
    inbox.begin(1.0)
    assert len(wire.posted_specs) == 0  # the shape is not known yet, and beginning a step must not wait
    take(inbox, "A0:0")
    assert len(wire.posted_specs) == 1 + 1 + 2
    take(inbox, "A0:5")
    assert len(wire.posted_specs) == 1 + 6 + 2
    for j in (1, 2, 3, 4):  # tensors that wait for their use do not stop the ones behind them
        take(inbox, f"A0:{j}")
    assert len(wire.posted_specs) == 1 + 6 + 2
    take(inbox, "A0:9")
    assert len(wire.posted_specs) == 1 + 10


def test_receives_are_posted_ahead_up_to_the_first_unknown_shape(wire: Wire) -> None:
    carried, known = channel("A0:0", "G2:0", "A0:1"), crossings()
    sent = send_all(wire, carried, {0: (1,), 2: (3,)})
    inbox = Inbox(wire, carried, known, look_ahead=2)
    inbox.begin(1.0)
    take(inbox, "A0:0")
    assert len(wire.posted_specs) == 1 + 1
    known.add(2, 0, Structure.of_tensor(TensorSpec((3,), torch.float32)))  # as sending its activation does
    assert take(inbox, "A0:1") is sent[Transfer.parse("A0:1")]
    assert take(inbox, "G2:0") is sent[Transfer.parse("G2:0")]


def test_a_gradient_that_precedes_its_activation_is_refused(wire: Wire) -> None:
    carried = channel("A0:0", "G2:0", "A0:1")
    send_all(wire, carried, {0: (1,), 2: (3,)})
    inbox = Inbox(wire, carried, crossings(), look_ahead=1)
    inbox.begin(1.0)
    said = "gradient of boundary 2 for microbatch 0 is sent before this rank made"
    with pytest.raises(ModelError, match=said):
        take(inbox, "A0:1")


def test_the_next_step_posts_at_once_and_sends_no_header_again(wire: Wire) -> None:
    carried = channel("A0:0", "A0:1")
    inbox, outbox = Inbox(wire, carried, crossings(), look_ahead=2), Outbox(wire, carried, crossings())
    for step in range(3):
        for transfer in carried.transfers:
            outbox.sender(transfer, "")(torch.full((1,), float(step)))
        inbox.begin(1.0)
        assert len(wire.posted_specs) == (1 + 2 * step + 2 if step else 0)
        assert [float(take(inbox, text)) for text in ("A0:0", "A0:1")] == [step, step]
    assert len(wire.sent) == 1 + 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4, 5)])
def test_headers_round_trip(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    structure = Structure.of_tensor(TensorSpec(shape, dtype))
    (header,) = encode_header(structure)
    assert decode_header(header) == structure


def nested(mask: bool = True) -> dict[str, Any]:
    return {
        "h": torch.rand(2, 3, requires_grad=True),
        "rest": (torch.tensor([mask]), None, torch.rand(4, requires_grad=True)),
    }


def require_equal(found: Any, sent: Any) -> None:
    assert Structure.of(found) == Structure.of(sent)
    assert all(map(torch.equal, tensors_of(found), tensors_of(sent)))


def test_nested_values_travel_as_one_tensor_with_one_header(wire: Wire) -> None:
    carried = channel("A0:0", "A0:1", "G2:0")
    outbox, inbox, both = pair(wire, carried)
    for known in both:
        known.add(2, 0, Structure.of(nested()))
    sent = [nested(), nested(), (torch.rand(2, 3), torch.rand(4))]
    found = pass_all(outbox, inbox, carried, sent)
    assert len(wire.sent) == 2 + 3  # the header has two parts
    for mine, theirs in zip(found, sent, strict=True):
        require_equal(mine, theirs)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 2), r"\[2, 2\] float32, but it was \[2, 3\] float32"),
        (nested(), {**nested(), "n": 3}, r"\{h: .*, n: 3\}, but it was \{h: "),
    ],
)
def test_a_stage_whose_output_changes_is_refused(first: Any, second: Any, message: str) -> None:
    outbox = Outbox(Wire(), channel("A0:0", "A0:1"), crossings())
    outbox.sender(Transfer.parse("A0:0"), "0F0")(first)
    with pytest.raises(ModelError, match="0F1: the output is " + message):
        outbox.sender(Transfer.parse("A0:1"), "0F1")(second)


def test_a_tensor_on_another_device_is_refused() -> None:
    outbox = Outbox(Wire(), channel("A0:0"), crossings())
    with pytest.raises(ModelError, match="0F0: the output has a tensor on meta; must be on cpu"):
        outbox.sender(Transfer.parse("A0:0"), "0F0")((torch.zeros(2), torch.zeros(1, device="meta")))


def test_a_value_that_is_too_large_to_describe_is_refused() -> None:
    with pytest.raises(ModelError, match="too many to describe in 1048576 bytes"):
        encode_header(Structure.of([torch.zeros(1)] * 30_000))


@pytest.mark.parametrize("numbers", [[7, 1], [0, 31], [0, -1], [0, 1, -1], [-1, 0], [-1, 1 << 30], [-2, 1]])
def test_an_invalid_header_is_refused(numbers: list[int]) -> None:
    with pytest.raises(ModelError, match="header of an activation is invalid"):
        decode_header(torch.tensor([*numbers, *[0] * (HEADER.shape[0] - len(numbers))]))


def pair(wire: Wire, carried: Channel, **options: Any) -> tuple[Outbox, Inbox, tuple[Crossings, Crossings]]:
    """Both ends of a channel, as on two ranks."""
    both = Crossings(MICROBATCHES, **options), Crossings(MICROBATCHES, **options)
    return Outbox(wire, carried, both[0]), Inbox(wire, carried, both[1], look_ahead=2), both


def pass_all(outbox: Outbox, inbox: Inbox, carried: Channel, values: list[Any]) -> list[Any]:
    """What arrives in one step."""
    for transfer, value in zip(carried.transfers, values, strict=True):
        outbox.sender(transfer, str(transfer))(value)
    inbox.begin(1.0)
    return [inbox.take(at) for at in range(len(values))]


SIZES = (3, 5, 3, 5, 1)


@pytest.mark.parametrize(
    ("shapes", "headers"),
    [((7, 8, 7, 8, 9), [3, 0, 0]), ((1, 2, 3, 4, 5), [5, 0, 0]), (None, [5, 5, 5])],
    ids=["by shapes", "all different", "unknown"],
)
def test_an_activation_of_new_shape_has_a_header(shapes: tuple[int, ...] | None, headers: list[int]) -> None:
    carried = channel(*(f"A0:{j}" for j in range(5)))
    outbox, inbox, both = pair(wire := Wire(), carried)
    for expected in headers:
        before = len(wire.sent)
        for crossings in both:
            crossings.expect(shapes)
            crossings.begin()
        values = [torch.rand(size) for size in SIZES]
        assert all(map(torch.equal, pass_all(outbox, inbox, carried, values), values))
        assert len(wire.sent) - before == expected + len(values)


def test_shapes_that_the_model_states_need_no_header() -> None:
    stated = [Structure.of_tensor(TensorSpec((size,), torch.float32)) for size in SIZES]
    carried = channel("A0:4", "A0:1", "G2:3", "A0:0")
    outbox, inbox, both = pair(wire := Wire(), carried, stated=stated)
    values = [torch.rand(SIZES[transfer.microbatch]) for transfer in carried.transfers]
    assert all(map(torch.equal, pass_all(outbox, inbox, carried, values), values))
    assert len(wire.sent) == 4
    assert both[0].largest([0, 2]) == {0: stated[1], 2: stated[1]}
    with pytest.raises(ModelError, match=r"0F4: the output is \[2\] float32, but shape_of returns \[1\]"):
        outbox.sender(carried.transfers[0], "0F4")(torch.rand(2))


def test_an_output_that_does_not_follow_from_the_shapes_of_the_data_is_refused() -> None:
    outbox, _, (crossings, _) = pair(Wire(), channel("A0:0", "A0:1"))
    crossings.expect((5, 5))
    outbox.sender(Transfer.parse("A0:0"), "0F0")(torch.zeros(2))
    with pytest.raises(ModelError, match="must depend only on the shapes of the data"):
        outbox.sender(Transfer.parse("A0:1"), "0F1")(torch.zeros(3))


def test_structure_and_dtypes_of_nested_values_are_sent_once() -> None:
    """Later headers have only the shapes, unless something else differs."""

    def value(size: int, constant: object = None) -> tuple[Any, ...]:
        return torch.rand(size, 2, requires_grad=True), torch.arange(size), constant

    values = [value(4), value(2), value(5), value(5, constant=3)]
    carried = channel(*(f"A0:{j}" for j in range(len(values))))
    outbox, inbox, both = pair(wire := Wire(), carried)
    for crossings in both:
        crossings.expect(None)
    for found, sent in zip(pass_all(outbox, inbox, carried, values), values, strict=True):
        require_equal(found, sent)
    assert len(wire.sent) == len(values) + 2 + 1 + 1 + 2


def test_shapes_of_long_ago_are_forgotten_at_both_ends() -> None:
    carried = channel("A0:0")
    outbox, inbox, both = pair(wire := Wire(), carried)
    for step in range(3000):
        for crossings in both:
            crossings.expect((step,))
        (found,) = pass_all(outbox, inbox, carried, [torch.rand(step % 7)])
        assert len(found) == step % 7
        wire.sent.clear()
        wire.posted_specs.clear()
    assert len(both[0]._known) < 2000
