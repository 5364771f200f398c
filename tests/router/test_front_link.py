"""What a router takes from a front process about a call: its client and its arrival, or nothing at all."""

from __future__ import annotations

from contextvars import copy_context
from pathlib import Path

import pytest

from baton.api_keys import Identity, KeyRing
from baton.errors import Unauthenticated
from router.frontend.grpc_api.grpc_server import _admit_front
from router.frontend.identity import IDENTITY, Gatekeeper, caller
from router.tracing.origin import ORIGIN, origin

GENERATE = "/baton.v1.Generation/Generate"
CLIENT = '{"name":"alice","tenant":"blue"}'


@pytest.fixture
def gate(tmp_path: Path) -> Gatekeeper:
    return Gatekeeper(KeyRing(tmp_path / "keys", required=False))


def test_the_client_and_its_arrival_are_those_that_the_front_tells(gate: Gatekeeper) -> None:
    def call() -> None:
        leave = _admit_front(gate, GENERATE, {IDENTITY: CLIENT, ORIGIN: '{"operation":"chat","received":12.5}'})
        assert caller.get() == Identity(name="alice", tenant="blue")
        assert (origin.get().operation, origin.get().received) == ("chat", 12.5)
        leave()

    copy_context().run(call)  # as a call has one of its own


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {IDENTITY: ""},
        {IDENTITY: '{"name":1}'},
        {IDENTITY: '{"name":"x","max_streams":-1}'},
        {IDENTITY: "[" * 5_000},
        {IDENTITY: '{"name":"x","y":' + "[" * 5_000},
        {IDENTITY: CLIENT, ORIGIN: "now"},
        {IDENTITY: CLIENT, ORIGIN: '{"operation":"chat","received":-1e308}'},
        {IDENTITY: CLIENT, ORIGIN: '{"x":' + "[" * 5_000},
    ],
)
def test_a_call_that_no_front_of_ours_makes_is_refused(gate: Gatekeeper, metadata: dict[str, str]) -> None:
    with pytest.raises(Unauthenticated):
        _admit_front(gate, GENERATE, metadata)
