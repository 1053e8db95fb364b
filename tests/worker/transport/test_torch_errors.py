"""Torch's communication errors become errors of the worker, in words that a user understands."""

from __future__ import annotations

import pytest
from zbv_worker.transport.torch_api import classified


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[/build/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]",
            "receive: Connection closed by peer [::1]",
        ),
        (
            "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 100ms",
            "receive: Timed out waiting 100ms",
        ),
        (
            "Read error [::1]: Connection reset. This is typically caused by a remote worker. GLHF!",
            "receive: Read error [::1]: Connection reset",
        ),
        ("Connection reset\nException raised from x", "receive: Connection reset"),
    ],
)
def test_an_error_has_no_path_of_a_source_and_no_trace(text: str, said: str) -> None:
    assert str(classified(RuntimeError(text), "receive")) == said


@pytest.mark.parametrize(("text", "kind"), [("Timed out", TimeoutError), ("closed", ConnectionError)])
def test_only_the_text_tells_a_timeout_from_a_lost_connection(text: str, kind: type[Exception]) -> None:
    assert isinstance(classified(RuntimeError(text), "receive"), kind)
