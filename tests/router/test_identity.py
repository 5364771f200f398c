"""API keys at both doors of a real router: which client a request comes from, and what it may do."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton import api_keys
from baton.api_keys import Identity
from baton.client import AsyncClient
from baton.config import TenantConfig
from baton.errors import PermissionDenied, Unauthenticated
from baton.logs import RateLimitedLog
from baton.v1 import generation_pb2, generation_pb2_grpc
from router.frontend import identity
from tests.router.model import expected
from tests.router.served import Served, collect, served, settings_for, until_ready
from tests.support.eventually import becomes, eventually_async

pytestmark = pytest.mark.slow

OPEN = ("/health", "/ready", "/health/ready", "/live", "/version", "/openapi.json")
PROMPT = list(range(20, 40))
SEED = 4
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "seed": SEED}


def request(**more: Any) -> generation_pb2.GenerateRequest:
    tokens = generation_pb2.TokenIds(ids=more.pop("tokens", PROMPT))
    return generation_pb2.GenerateRequest(token_ids=tokens, max_tokens=12, seed=SEED, **more)


class Doors:
    """A client of both doors."""

    def __init__(self, router: Served, http: aiohttp.ClientSession, channel: grpc.aio.Channel) -> None:
        self.router = router
        self.http = http
        self.generation: Any = generation_pb2_grpc.GenerationStub(channel)
        self.health: Any = health_pb2_grpc.HealthStub(channel)
        self.url = f"http://{router.addresses.api}"

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, dict[str, str]]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.http.request(method, self.url + path, json=body, headers=named) as answer:
            content = await (answer.json() if answer.content_type == "application/json" else answer.text())
            return answer.status, content, {name.lower(): value for name, value in answer.headers.items()}

    async def status(self, **headers: str) -> int:
        """What a completion over HTTP is answered with."""
        return (await self.ask("POST", "/v1/completions", BODY, **headers))[0]

    async def refusal(self, key: str = "", message: Message | None = None) -> tuple[str, str, str]:
        """The status, reason and text with which gRPC refuses a request."""
        call = self.generation.Generate(message or request(), metadata=bearer(key))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(call)
        error = caught.value
        return error.code().name, str(dict(error.trailing_metadata() or ())["baton-reason"]), error.details() or ""


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),) if key else ()


@contextlib.asynccontextmanager
async def doors(folder: Path, **more: Any) -> AsyncIterator[Doors]:
    async with (
        served(settings_for(folder, **more)) as router,
        aiohttp.ClientSession() as http,
        grpc.aio.insecure_channel(router.addresses.grpc) as channel,
    ):
        router.start("decode", "decode-0")
        await until_ready(http, router.addresses.api)
        yield Doors(router, http, channel)


def key_in(folder: Path, name: str = "one", tenant: str = "acme", **more: Any) -> str:
    return api_keys.add_key(folder / "api-keys.json", Identity(name=name, tenant=tenant, **more), "")


async def opens_both(client: Doors, key: str) -> None:
    assert await client.status(authorization=f"Bearer {key}") == 200
    assert await client.status(authorization=f"bearer   {key} ") == 200
    assert await client.status(x_api_key=key) == 200
    assert await client.status(authorization="Bearer EMPTY", x_api_key=key) == 200
    _, tokens, _ = await collect(client.generation.Generate(request(), metadata=bearer(key)))
    assert tokens == expected(SEED, len(PROMPT), 12)[0]
    await collect(client.generation.Generate(request(), metadata=(("x-api-key", key),)))


async def test_a_key_opens_both_doors_and_nothing_else_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Another test may have used up what the log takes of such lines.
    monkeypatch.setattr(identity, "log", RateLimitedLog(logging.getLogger(identity.__name__)))
    key = key_in(tmp_path)
    wrong = key[:-1] + ("A" if key[-1] != "A" else "B")
    async with doors(tmp_path) as client:
        await opens_both(client, key)
        for headers in ({}, {"authorization": f"Bearer {wrong}"}, {"authorization": f"Basic {key}"}):
            status, body, reply_headers = await client.ask("POST", "/v1/completions", BODY, **headers)
            assert status == 401
            assert body["error"].pop("message")
            assert body["error"] == {"type": "invalid_request_error", "param": None, "code": "invalid_api_key"}
            assert reply_headers["www-authenticate"] == "Bearer"
            assert reply_headers["baton-reason"] == "invalid_api_key"
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
        status, body, _ = await client.ask("POST", "/v1/messages", chat, x_api_key=wrong)
        assert status == 401
        assert (body["type"], body["error"]["type"]) == ("error", "authentication_error")
        status, body, _ = await client.ask("GET", "/v1/models", anthropic_version="2023-06-01")
        assert (status, body["error"]["type"]) == (401, "authentication_error")
        for path in ("/v1/models", "/v1/models/small", "/no/such/path", "/metrics"):
            assert (await client.ask("GET", path))[0] == 401
        for credential in ("", wrong):
            status, reason, _ = await client.refusal(credential)
            assert (status, reason) == ("UNAUTHENTICATED", "invalid_api_key")
    log = "\n".join(record.getMessage() for record in caplog.records)
    assert "refused POST /v1/completions of 127.0.0.1" in log
    assert key not in log
    assert wrong not in log


async def test_health_needs_no_key(tmp_path: Path) -> None:
    key_in(tmp_path)
    async with doors(tmp_path) as client:
        for path in OPEN:
            assert (await client.ask("GET", path))[0] == 200
        answer = await client.health.Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_no_other_path_or_call_is_open(tmp_path: Path) -> None:
    """A path or service that is added later needs a key, too."""
    key_in(tmp_path)
    calls = [
        f"/{service.full_name}/{method.name}"
        for service in generation_pb2.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]
    assert calls
    async with doors(tmp_path) as client, grpc.aio.insecure_channel(client.router.addresses.grpc) as channel:
        _, document, _ = await client.ask("GET", "/openapi.json")
        paths = {path: [*methods] for path, methods in document["paths"].items()}
        shut = {path: methods for path, methods in paths.items() if path not in OPEN}
        assert set(paths) - set(shut) == set(OPEN) - {"/openapi.json"}
        for path, methods in shut.items():
            for method in methods:
                status, _, _ = await client.ask(method.upper(), path, {} if method == "post" else None)
                assert status == 401, (method, path)
        for call in [*calls, "/no.such.Service/Call"]:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(call)(b"", timeout=5)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED, call


async def test_metrics_need_an_operators_key(tmp_path: Path) -> None:
    key, operator = key_in(tmp_path), key_in(tmp_path, "ops", "", operator=True)
    async with doors(tmp_path) as client:
        status, body, _ = await client.ask("GET", "/metrics", x_api_key=key)
        assert status == 403
        assert "is no operator's" in body["error"]["message"]
        status, page, _ = await client.ask("GET", "/metrics", x_api_key=operator)
        assert status == 200
        assert "baton_num_requests_running" in page
        assert await client.status(x_api_key=operator) == 200


async def test_keys_come_and_go_while_the_router_serves(tmp_path: Path) -> None:
    async with doors(tmp_path) as client:
        assert await client.status() == 200, "without a file no client needs a key"
        key = key_in(tmp_path)
        await becomes(client.status, 401)
        assert await client.status(x_api_key=key) == 200
        api_keys.remove(tmp_path / "api-keys.json", "one")
        await becomes(lambda: client.status(x_api_key=key), 401)
        assert await client.status() == 401, "removing the last key opens nothing"


async def test_limits_of_a_key(tmp_path: Path) -> None:
    key = key_in(tmp_path, max_body_bytes=500, max_prompt_tokens=30, max_streams=1)
    async with doors(tmp_path) as client:
        client.router.step_seconds = 0.02
        status, body, _ = await client.ask("POST", "/v1/completions", {**BODY, "user": "x" * 500}, x_api_key=key)
        assert status == 413
        assert "more than the 500 bytes that the API key 'one' may send" in body["error"]["message"]
        status, body, _ = await client.ask(
            "POST", "/v1/completions", {**BODY, "prompt": [7] * 31}, authorization=f"Bearer {key}"
        )
        assert status == 400
        assert "maximum context length is 30 tokens for the API key 'one'" in body["error"]["message"]
        status, reason, details = await client.refusal(key, request(stop=["x" * 400, "y" * 400]))
        assert (status, reason) == ("INVALID_ARGUMENT", "payload_too_large")
        assert "500" in details
        status, reason, details = await client.refusal(key, request(tokens=[7] * 31))
        assert (status, reason) == ("INVALID_ARGUMENT", "context_too_long")
        # A stream that runs takes the only place, at both doors, and gives it back.
        first = asyncio.create_task(client.ask("POST", "/v1/completions", BODY, x_api_key=key))
        sequences = client.router.cluster.processes.values()
        await eventually_async(lambda: any(process.sequences for process in sequences))
        status, body, headers = await client.ask("POST", "/v1/completions", BODY, x_api_key=key)
        assert status == 429
        assert "'one' run, and it may have 1" in body["error"]["message"]
        assert int(headers["retry-after"]) >= 1
        status, reason, _ = await client.refusal(key)
        assert (status, reason) == ("RESOURCE_EXHAUSTED", "too_many_streams")
        assert (await first)[0] == 200
        await becomes(lambda: client.status(x_api_key=key), 200)
        await collect(client.generation.Generate(request(), metadata=bearer(key)))


async def test_the_tenant_of_a_key_is_that_of_its_requests(tmp_path: Path) -> None:
    one, other = key_in(tmp_path), key_in(tmp_path, "two", "umbrella")
    async with (
        doors(tmp_path, tenants={"acme": TenantConfig(requests_per_minute=1)}) as client,
        AsyncClient(operator=client.router.addresses.operator) as operator,
    ):
        assert await client.status(x_api_key=one) == 200
        status, body, _ = await client.ask("POST", "/v1/completions", BODY, x_api_key=one)
        assert status == 429
        assert "the tenant's requests of this minute are used up" in body["error"]["message"]
        await collect(client.generation.Generate(request(), metadata=bearer(other)))
        assert [entry.tenant for entry in await operator.requests()] == ["umbrella", "acme", "acme"]


async def test_an_operators_port_on_loopback_needs_an_operators_key(tmp_path: Path) -> None:
    key, operator = key_in(tmp_path), key_in(tmp_path, "ops", "", operator=True)
    async with doors(tmp_path, operator="127.0.0.1:0") as client:
        target = client.router.addresses.operator
        for refused, error in (("", Unauthenticated), (key, PermissionDenied)):
            async with AsyncClient(operator=target, api_key=refused) as caller:
                with pytest.raises(error):
                    await caller.status()
        async with AsyncClient(operator=target, api_key=operator) as caller:
            assert (await caller.status()).cluster == "baton"
