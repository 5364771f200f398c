"""The wire: every message survives it, it is plain MessagePack, and its bytes don't change unnoticed."""

import random
import typing
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton import messages, peer_protocol, store_protocol
from tests.fuzz import wire_messages

LINKS = {
    messages: "ToDecode ToPrefill ToStore FromDecode FromPrefill FromStore ToRouter ToPublisher FromPublisher",
    store_protocol: "StoreCall StoreReply",
    peer_protocol: "PageRequest PageReply NixlRequest NixlReply",
}
UNIONS = {name: getattr(module, name) for module, names in LINKS.items() for name in names.split()}


def members(union: Any) -> tuple[type[messages.Message], ...]:
    return typing.get_args(union) or (union,)


MESSAGES = sorted({kind for union in UNIONS.values() for kind in members(union)}, key=lambda kind: kind.__name__)


def test_every_message_belongs_to_a_link() -> None:
    def leaves(kind: type) -> set[type]:
        return {inner for child in kind.__subclasses__() for inner in leaves(child)} or {kind}

    assert leaves(messages.Message) == set(MESSAGES)


def test_every_message_is_frozen() -> None:
    assert all(kind.__struct_config__.frozen for kind in MESSAGES)


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@settings(max_examples=25)
@given(rng=st.randoms())
def test_survives_the_wire_as_plain_messagepack(kind: type[messages.Message], rng: random.Random) -> None:
    message = wire_messages.valid(rng, kind, {})
    union = next(union for union in UNIONS.values() if kind in members(union))
    wire = msgspec.msgpack.encode(messages.Envelope("a", "b", 1, message))
    assert msgspec.msgpack.decode(wire, type=messages.Envelope[union]) == messages.Envelope("a", "b", 1, message)
    sender, addressee, sequence, body = msgpack.unpackb(wire)
    assert (sender, addressee, sequence, body["type"]) == ("a", "b", 1, kind.__name__)


LOAD = messages.LoadReport(running=1, pages_total=4, context=33, steps=(messages.StepSample(5, 15, 1, 33, 0.25),))
GOLDEN = [
    (
        messages.Heartbeat(
            7, LOAD, step=9, loop_age_ms=12, attempts=(messages.AttemptHeld("r", 2, 33, incomplete=True),)
        ),
        "86a474797065a9486561727462656174a5686561726407a46c6f616489a772756e6e696e6701a777616974696e6700aa7061"
        "6765735f6672656500ab70616765735f746f74616c04ad746f6b656e735f71756575656400ac70726566696c6c5f72617465"
        "cb0000000000000000a5746965727390a7636f6e7465787421a573746570739195050f0121cb3fd0000000000000a4737465"
        "7009ab6c6f6f705f6167655f6d730ca8617474656d7074739186a772657175657374a172a7617474656d707402a8706f7369"
        "74696f6e21a5656e646564c2a8636f6d707574656400aa696e636f6d706c657465c3",
    ),
    (
        messages.Tokens(
            3, (messages.Delta("r", 1, 5, (42,), (messages.TokenLogprob(42, -0.5, ((42, -0.5),)),), "stop"),)
        ),
        "83a474797065a6546f6b656e73a47374657003a664656c7461739186a772657175657374a172a7617474656d707401a8706f"
        "736974696f6e05a6746f6b656e73912aa86c6f6770726f627391932acbbfe000000000000091922acbbfe0000000000000a6"
        "66696e697368a473746f70",
    ),
]


@pytest.mark.parametrize(("message", "golden"), GOLDEN, ids=["Heartbeat", "Tokens"])
def test_golden_bytes(message: messages.Message, golden: str) -> None:
    assert msgspec.msgpack.encode(message).hex() == golden


@given(st.binary(max_size=200))
def test_garbage_is_a_decode_error_and_nothing_else(junk: bytes) -> None:
    for union in UNIONS.values():
        try:
            msgspec.msgpack.decode(junk, type=messages.Envelope[union])
        except (msgspec.MsgspecError, ValueError):
            continue


@pytest.mark.parametrize(
    "body",
    [
        {"type": "Cancel", "request": "r", "attempt": 0},
        {"type": "Cancel", "request": "", "attempt": 1},
        {"type": "Cancel", "request": "r", "attempt": 1, "extra": 1},
        {"type": "Resend", "request": "r", "attempt": 1, "position": -1},
        {"type": "Nonsense"},
    ],
)
def test_what_the_protocol_does_not_allow_is_refused(body: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgpack.packb(["a", "b", 1, body]), type=messages.Envelope[messages.ToDecode])
