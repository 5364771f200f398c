"""Requests out of bytes: any request that a model can serve passes, and nothing else costs much."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from baton.errors import ContextTooLong, InvalidRequest
from baton.v1 import cache_pb2
from baton.v1 import generation_pb2 as pb
from router.request_bytes import Limits

LIMITS = Limits(max_context=100, text=1_000, token_ids=616)


def check(request: pb.GenerateRequest | cache_pb2.WarmRequest) -> None:
    LIMITS.check(request.SerializeToString(), with_prompt=True)


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=100),
    st.lists(st.text(max_size=1_000), max_size=16),
    st.lists(st.integers(0, 2**32 - 1), max_size=1_000),
    st.floats(width=32),
    st.integers(0, 2**64 - 1),
    st.integers(-(2**31), 2**31 - 1),
)
def test_every_request_within_the_limits_passes(
    ids: list[int], stops: list[str], stop_ids: list[int], temperature: float, seed: int, priority: int
) -> None:
    check(
        pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=ids),
            stop=stops,
            stop_token_ids=stop_ids,
            temperature=temperature,
            seed=seed,
            priority=priority,
            request_id="x" * 80,
        )
    )
    check(cache_pb2.WarmRequest(text="x" * 990, ttl_ms=seed))


@given(st.binary(max_size=200))
def test_any_bytes_pass_or_are_refused(data: bytes) -> None:
    for with_prompt in (True, False):
        try:
            LIMITS.check(data, with_prompt)
        except InvalidRequest:
            pass
        else:
            assert data == b"" or data[0] & 7 in (0, 1, 2, 5)


def test_prompts_that_no_context_can_hold() -> None:
    with pytest.raises(ContextTooLong, match="bytes of text exceeds the model's context of 100 tokens, which hold"):
        check(pb.GenerateRequest(text="x" * 1_001))
    with pytest.raises(ContextTooLong, match="bytes of token ids exceeds the model's context of 100 tokens"):
        check(cache_pb2.WarmRequest(token_ids=pb.TokenIds(ids=[2**32 - 1] * 130)))
    text = pb.GenerateRequest(text="x" * 600).SerializeToString()
    with pytest.raises(ContextTooLong):
        LIMITS.check(text + text, with_prompt=True)  # a field that stands twice counts twice


def test_fields_that_no_request_needs() -> None:
    with pytest.raises(InvalidRequest, match="besides its prompt; at most 131072 may"):
        check(pb.GenerateRequest(model="m" * 200_000))
    with pytest.raises(InvalidRequest, match="more than 2048 fields"):
        LIMITS.check(b"\x60\x01" * 3_000, with_prompt=True)
    with pytest.raises(InvalidRequest, match="besides its prompt"):  # a method without a prompt
        LIMITS.check(pb.GenerateRequest(text="x" * 200_000).SerializeToString(), with_prompt=False)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\xff" * 20, id="a tag without an end"),
        pytest.param(b"\x0a\xff", id="a length without an end"),
        pytest.param(b"\x0a\x7fx", id="fewer bytes than it says"),
        pytest.param(b"\x0b", id="a group"),
        pytest.param(b"\x02\x00", id="field 0"),
        pytest.param(b"\x09abc", id="half a number"),
    ],
)
def test_bytes_that_are_no_message(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match=f"{len(data)} bytes are no message"):
        LIMITS.check(data, with_prompt=True)
