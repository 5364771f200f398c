"""Pinned prefixes at the operator's door: fields checked one by one, and calls to a real router."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from baton.client import AsyncClient
from baton.errors import BatonError, InvalidRequest, ModelMismatch, PinNotFound
from baton.operator_api import PinPrefix
from kvstore.keys import unpack_tokens
from router import events
from router.frontend.api.operator_server import checked
from tests.router import tokenizers
from tests.router.model import PAGE_BYTES
from tests.router.served import Served, served, settings_for
from tests.router.test_generation import BARE, MODEL
from tests.support.eventually import eventually_async

pytestmark = pytest.mark.slow

PREFIX = list(range(20, 41))  # five pages of four, and a token


def wish(**fields: Any) -> PinPrefix:
    if "text" not in fields and "model" not in fields:
        fields["token_ids"] = fields.pop("tokens", PREFIX)
    return PinPrefix(**fields)


def order(call: PinPrefix) -> events.PinPrefix:
    result = checked(call, MODEL, 100.0)
    assert isinstance(result, events.PinPrefix)
    return result


# --- fields ---


@pytest.mark.parametrize(
    ("fields", "kind", "says"),
    [
        ({"model": "large"}, ModelMismatch, "'large'"),
        ({"model": "small"}, InvalidRequest, "no prompt"),
        ({"text": "x", "token_ids": [1]}, InvalidRequest, "or two"),
        ({"tokens": [-1]}, InvalidRequest, "whole numbers"),
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
    with pytest.raises(kind, match=says):
        order(wish(**fields))


def test_text_needs_a_tokenizer() -> None:
    with pytest.raises(InvalidRequest, match=r"tokenizer\.json"):
        checked(wish(text="x"), BARE, 0.0)


def test_what_is_not_said() -> None:
    first = order(wish())
    assert (unpack_tokens(first.tokens), first.ttl, first.deadline) == (PREFIX, 3_600.0, 3_700.0)
    assert order(wish()).pin != first.pin
    assert order(wish(id="mine")).pin == "mine"
    text = order(wish(text="The quick brown fox", ttl_ms=1_500))
    assert (unpack_tokens(text.tokens), text.ttl) == (tokenizers.byte_level().encode("The quick brown fox").ids, 1.5)


# --- calls ---


def pins(router: Served) -> int:
    return sum(len(store.pins) for store in router.cluster.stores)


@contextlib.asynccontextmanager
async def cluster(folder: Path, *processes: str) -> AsyncIterator[tuple[Served, AsyncClient]]:
    async with served(settings_for(folder)) as router, AsyncClient(operator=router.addresses.operator) as client:
        for name in processes:
            router.start(name.partition("-")[0], name)
        joined = router.cluster.processes.values()
        await eventually_async(lambda: all(process.membership.router for process in joined))
        yield router, client


async def test_a_prefix_is_warmed_listed_and_let_go(tmp_path: Path) -> None:
    async with cluster(tmp_path, "decode-0", "prefill-0", "store-0") as (router, client):
        result = await client.pin_prefix(PREFIX, id="mine", ttl_ms=60_000, timeout=10)
        assert (result.pin.id, result.pin.node, result.pin.pages, result.pin.tokens) == ("mine", "a", 5, 20)
        assert result.pin.bytes == 5 * PAGE_BYTES
        assert 50_000 < result.pin.expires_in_ms <= 60_000
        assert result.tokens_computed is not None
        assert result.tokens_cached == 20 - result.tokens_computed
        assert pins(router) == 1
        (listed,) = await client.pins()
        assert (listed.id, listed.node) == ("mine", "a")
        await client.unpin("mine")
        assert not await client.pins()
        await eventually_async(lambda: not pins(router))
        with pytest.raises(PinNotFound, match="'mine'"):
            await client.unpin("mine")


async def test_a_call_that_is_cancelled_leaves_no_pin(tmp_path: Path) -> None:
    async with cluster(tmp_path, "decode-0", "prefill-0", "store-0") as (router, client):
        (prefill,) = router.cluster.named("prefill-0")
        prefill.full = True
        call = asyncio.create_task(client.pin_prefix(PREFIX))
        await asyncio.sleep(0.2)
        call.cancel()
        prefill.full = False
        await asyncio.sleep(0.3)
        assert not pins(router)
        assert not prefill.jobs
