"""Pinned prefixes at the front door: fields checked one by one, and calls over a real gRPC server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.errors import BatonError, InvalidRequest, ModelMismatch
from baton.v1 import cache_pb2, cache_pb2_grpc, generation_pb2
from kvstore.keys import unpack_tokens
from router.frontend.request_parsing import parse_pin_request, pin_of
from router.service import RouterAddresses
from tests.router import tokenizers
from tests.router.pin_model import PAGE_BYTES, PinCluster
from tests.router.served import Served, served, settings_for
from tests.router.test_request_parsing import BARE, MODEL
from tests.support.eventually import eventually_async

pytestmark = pytest.mark.slow

PREFIX = list(range(20, 41))  # five pages of four, and a token


def wish(**fields: Any) -> cache_pb2.PinPrefixRequest:
    if "text" not in fields and "model" not in fields:
        fields["token_ids"] = generation_pb2.TokenIds(ids=fields.pop("tokens", PREFIX))
    return cache_pb2.PinPrefixRequest(**fields)


# --- fields ---


@pytest.mark.parametrize(
    ("fields", "kind", "says"),
    [
        ({"model": "large"}, ModelMismatch, "'large'"),
        ({"model": "small"}, InvalidRequest, "no prompt"),
        ({"text": ""}, InvalidRequest, "empty"),
        ({"ttl_ms": 0}, InvalidRequest, "ttl_ms is 0"),
        ({"ttl_ms": 999}, InvalidRequest, "1 second"),
        ({"ttl_ms": 7 * 86_400_000 + 1}, InvalidRequest, "7 days"),
        ({"id": "x" * 81}, InvalidRequest, "id is"),
        ({"id": "two words"}, InvalidRequest, "without spaces"),
        ({"id": "a\n"}, InvalidRequest, "printable"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, Any], kind: type[BatonError], says: str) -> None:
    request = wish(**fields)
    with pytest.raises(kind, match=says):
        parse_pin_request(request, pin_of(request), MODEL)


def test_text_needs_a_tokenizer() -> None:
    with pytest.raises(InvalidRequest, match=r"tokenizer\.json"):
        parse_pin_request(wish(text="x"), "p", BARE)


def test_what_is_not_said() -> None:
    taken = parse_pin_request(wish(), pin_of(wish()), MODEL)
    assert (unpack_tokens(taken.tokens), taken.ttl) == (PREFIX, 3_600.0)
    assert pin_of(wish()) != pin_of(wish())
    assert pin_of(wish(id="mine")) == "mine"
    text = parse_pin_request(wish(text="The quick brown fox", ttl_ms=1_500), "p", MODEL)
    assert (unpack_tokens(text.tokens), text.ttl) == (tokenizers.byte_level().encode("The quick brown fox").ids, 1.5)


# --- calls ---


class PinFront(Served):
    """A router whose stores keep pages."""

    def __init__(self, addresses: RouterAddresses) -> None:
        super().__init__(addresses)
        self.cluster: PinCluster = PinCluster()

    @property
    def pinned(self) -> int:
        return sum(len(pages.pins) for pages in self.cluster.pages.values())


@contextlib.asynccontextmanager
async def cluster(folder: Path, *processes: str) -> AsyncIterator[tuple[PinFront, Any]]:
    async with served(settings_for(folder)) as router, grpc.aio.insecure_channel(router.addresses.operator) as channel:
        pinned = PinFront(router.addresses)
        workers = asyncio.create_task(pinned.work())
        for name in processes:
            pinned.start(name.partition("-")[0], name)  # type: ignore[arg-type]
        joined = pinned.cluster.processes.values()
        await eventually_async(lambda: all(process.membership.router for process in joined))
        try:
            yield pinned, cache_pb2_grpc.CacheStub(channel)
        finally:
            workers.cancel()
            pinned.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))


async def refused(call: Any) -> tuple[grpc.StatusCode, str, str]:
    """Status, details and reason of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    metadata = dict(caught.value.trailing_metadata() or ())
    return caught.value.code(), caught.value.details() or "", str(metadata["baton-reason"])


def test_a_prefix_is_warmed_listed_and_let_go(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "decode-0", "prefill-0", "store-0") as (router, stub):
            made = await stub.PinPrefix(wish(id="mine", ttl_ms=60_000), timeout=10)
            assert (made.pin.id, made.pin.node, made.pin.pages, made.pin.tokens) == ("mine", "a", 5, 20)
            assert made.pin.bytes == 5 * PAGE_BYTES
            assert 50_000 < made.pin.expires_in_ms <= 60_000
            assert made.tokens_computed + made.tokens_cached == 20
            assert router.pinned == 1
            (listed,) = (await stub.ListPins(cache_pb2.ListPinsRequest())).pins
            assert (listed.id, listed.node) == ("mine", "a")
            await stub.UnpinPrefix(cache_pb2.UnpinPrefixRequest(id="mine"))
            assert not (await stub.ListPins(cache_pb2.ListPinsRequest())).pins
            await eventually_async(lambda: not router.pinned)
            status, details, reason = await refused(stub.UnpinPrefix(cache_pb2.UnpinPrefixRequest(id="mine")))
            assert (status, reason) == (grpc.StatusCode.NOT_FOUND, "pin_not_found")
            assert "'mine'" in details

    run(test)


def test_what_is_wrong_comes_as_a_status(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "decode-0", "prefill-0", "store-0") as (_, stub):
            status, details, _ = await refused(stub.PinPrefix(wish(tokens=[1, 2, 3])))
            assert status is grpc.StatusCode.INVALID_ARGUMENT
            assert "no full page" in details
            status, details, _ = await refused(stub.PinPrefix(wish(ttl_ms=1)))
            assert status is grpc.StatusCode.INVALID_ARGUMENT
            assert "ttl_ms" in details

    run(test)


def test_a_call_that_is_cancelled_leaves_no_pin(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "decode-0", "prefill-0", "store-0") as (router, stub):
            (prefill,) = router.cluster.named("prefill-0")
            prefill.full = True
            call = stub.PinPrefix(wish())
            await asyncio.sleep(0.2)
            call.cancel()
            prefill.full = False
            await asyncio.sleep(0.3)
            assert not router.pinned
            assert not prefill.jobs

    run(test)
