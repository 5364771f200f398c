"""The front doors, with a real gRPC server, real ZMQ sockets, and workers whose output is known beforehand."""

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton import api_keys, errors
from baton import config as settings
from baton.api_keys import Identity
from baton.client import AsyncClient
from baton.operator_api import Status
from baton.v1 import generation_pb2, generation_pb2_grpc
from router.frontend.grpc_api import grpc_calls
from router.frontend.router_driver import RouterDriver
from tests.router import tokenizers
from tests.router.model import expected
from tests.router.served import Served, collect, served, settings_for
from tests.support.eventually import becomes, eventually_async

pytestmark = pytest.mark.slow

PROMPT = list(range(20, 40))
SEED = 4  # with which the model has no end of sequence in the first tokens after PROMPT


def request(**fields: Any) -> generation_pb2.GenerateRequest:
    if "text" not in fields:
        fields["token_ids"] = generation_pb2.TokenIds(ids=fields.pop("tokens", PROMPT))
    return generation_pb2.GenerateRequest(**{"seed": SEED, "max_tokens": 12, **fields})


class Client:
    def __init__(self, router: Served, channel: grpc.aio.Channel) -> None:
        self.router = router
        self.generation: Any = generation_pb2_grpc.GenerationStub(channel)
        self.operator = AsyncClient(operator=router.addresses.operator)
        self.health: Any = health_pb2_grpc.HealthStub(channel)
        self.reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)

    async def status(self) -> Status:
        return await self.operator.status(timeout=5)

    async def serving(self, service: str = "") -> bool:
        answer = await self.health.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    async def joined(self, count: int) -> None:
        async def all_here() -> bool:
            return len((await self.status()).processes) > count

        await eventually_async(all_here)

    async def refused(self, request: generation_pb2.GenerateRequest, **options: Any) -> tuple[Any, str, dict[str, str]]:
        """Status, details and trailing metadata of a request that must fail."""
        call = self.generation.Generate(request, **options)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(call)
        error = caught.value
        return error.code(), error.details() or "", dict(error.trailing_metadata() or ())


@contextlib.asynccontextmanager
async def cluster(config: settings.Config, *processes: str) -> AsyncIterator[Client]:
    """A router with these workers, each named after its role."""
    async with served(config) as router, grpc.aio.insecure_channel(router.addresses.grpc) as channel:
        for name in processes:
            router.start(name.partition("-")[0], name)
        client = Client(router, channel)
        await client.joined(len(processes))
        yield client


async def test_a_stream_of_tokens(tmp_path: Path) -> None:
    async with cluster(settings_for(tmp_path), "decode-0", "prefill-0", "store-0") as client:
        call = client.generation.Generate(request(request_id="mine"))
        assert dict(await call.initial_metadata())[grpc_calls.REQUEST_ID] == "mine"
        text, tokens, finished = await collect(call)
        assert tokens == expected(SEED, len(PROMPT), 12)[0]
        assert text == tokenizers.byte_level().decode(tokens)
        assert finished.finish_reason == generation_pb2.FINISH_REASON_LENGTH
        assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (20, 12)
        assert (finished.request_id, finished.seed) == ("mine", SEED)
        work, timing = finished.work, finished.timing
        assert (work.attempts, work.prefill_worker, list(work.decode_workers)) == (1, "prefill-0", ["decode-0"])
        order = [timing.submitted, timing.placed, timing.accepted, timing.prefilled, timing.started]
        order += [timing.first_token, timing.finished]
        assert order == sorted(order)
        assert all(timing.HasField(name) for name in ("prefilled", "started", "prefill_queue"))
        await eventually_async(lambda: not any(p.sequences or p.jobs for p in client.router.cluster.processes.values()))


async def test_a_drained_worker_is_shown_so(tmp_path: Path) -> None:
    async with cluster(settings_for(tmp_path), "decode-0") as client:
        assert (await client.operator.drain("decode-0")).state == "draining"
        await becomes(client.serving, False)
        await client.operator.drain("decode-0", undo=True)
        await becomes(client.serving, True)
        with pytest.raises(errors.InvalidRequest):
            await client.operator.drain("decode-0", now=True)


async def test_text_stop_strings_and_drawn_seeds(tmp_path: Path) -> None:
    async with cluster(settings_for(tmp_path), "decode-0") as client:
        prompt = tokenizers.byte_level().encode("The quick brown fox").ids
        whole, tokens, finished = await collect(
            client.generation.Generate(request(text="The quick brown fox", max_tokens=40, ignore_eos=True))
        )
        assert finished.usage.prompt_tokens == len(prompt)
        assert tokens[:3] == expected(SEED, len(prompt), 3)[0]
        stop = whole[len(whole) // 2 :][:3]
        text, cut, finished = await collect(
            client.generation.Generate(request(text="The quick brown fox", max_tokens=40, ignore_eos=True, stop=[stop]))
        )
        assert text == whole[: whole.index(stop)]
        assert cut == tokens[: len(cut)]
        assert finished.finish_reason == generation_pb2.FINISH_REASON_STOP
        assert finished.usage.completion_tokens == len(cut)
        drawn = generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[5]), max_tokens=1)
        seeds = {(await collect(client.generation.Generate(drawn)))[2].seed for _ in range(3)}
        assert len(seeds) == 3


async def test_errors_are_statuses_with_a_reason(tmp_path: Path) -> None:
    async with cluster(settings_for(tmp_path, max_queued=0)) as client:
        code, details, metadata = await client.refused(request(model="gpt-17"))
        assert (code, metadata[grpc_calls.REASON]) == (grpc.StatusCode.NOT_FOUND, "model_mismatch")
        assert "gpt-17" in details
        code, details, _ = await client.refused(request(temperature=-1.0))
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert "temperature is -1.0" in details
        code, _, metadata = await client.refused(request(max_tokens=4_096))
        assert (code, metadata[grpc_calls.REASON]) == (grpc.StatusCode.INVALID_ARGUMENT, "context_too_long")
        code, _, metadata = await client.refused(request())
        assert (code, metadata[grpc_calls.REASON]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "overloaded")
        assert int(metadata[grpc_calls.RETRY_AFTER]) > 0
        code, _, _ = await client.refused(request(text="x" * 17 * 2**20))
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED  # larger than any message may be


async def test_our_own_mistakes_are_logged_and_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a secret of the router")

    monkeypatch.setattr(RouterDriver, "submit", broken)
    async with cluster(settings_for(tmp_path), "decode-0") as client:
        code, details, _ = await client.refused(request())
        assert code == grpc.StatusCode.INTERNAL
        assert "secret" not in details
        assert "Traceback" not in details


async def test_a_router_that_stops_says_so(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        router = await stack.enter_async_context(served(settings_for(tmp_path)))
        async with grpc.aio.insecure_channel(router.addresses.grpc) as channel:
            worker = router.start("decode", "decode-0")
            stub: Any = generation_pb2_grpc.GenerationStub(channel)
            call = stub.Generate(request(max_tokens=900, ignore_eos=True))
            reading = asyncio.create_task(collect(call))
            await eventually_async(lambda: worker.sequences)
            await stack.pop_all().aclose()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await reading
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            assert "stopping" in (caught.value.details() or "")


async def test_status_health_and_reflection(tmp_path: Path) -> None:
    async with cluster(settings_for(tmp_path)) as client:
        assert not await client.serving()
        assert (await client.status()).model is None
        decode = client.router.start("decode", "decode-0")
        client.router.start("store", "store-0")
        await client.joined(2)
        await eventually_async(lambda: client.serving("baton.v1.Generation"))
        await collect(client.generation.Generate(request()))
        status = await client.status()
        by_name = {process.name: process for process in status.processes}
        assert list(by_name) == ["router", "decode-0", "store-0"]
        assert by_name["router"].role == "router"
        assert by_name["router"].metrics_address == client.router.addresses.http
        assert by_name["decode-0"].incarnation == decode.peer.incarnation
        assert by_name["decode-0"].state == "live"
        assert (by_name["decode-0"].heartbeat_age_ms or 0) < 1_000
        assert (status.model.namespace.page_size, status.model_name, status.cluster) == (4, "small", "baton")
        assert status.log_dir.endswith("logs")
        assert (status.counts.finished, status.counts.placed_local) == (1, 1)
        client.router.kill(decode)
        await becomes(client.serving, False)
        states = {process.name: process.state for process in (await client.status()).processes}
        assert states["decode-0"] == "silent"
        call = client.reflection.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        services = {service.name for service in (await call.read()).list_services_response.service}
        assert {"baton.v1.Generation", "grpc.health.v1.Health"} <= services
        await call.done_writing()


async def test_the_http_port(tmp_path: Path) -> None:
    async with cluster(settings_for(tmp_path)) as client, aiohttp.ClientSession() as http:
        base = f"http://{client.router.addresses.http}"
        async with http.get(f"{base}/healthz") as answer:
            assert answer.status == 503
        client.router.start("decode", "decode-0")
        await client.joined(1)
        await collect(client.generation.Generate(request()))
        async with http.get(f"{base}/healthz") as answer:
            assert answer.status == 200
        async with http.get(f"{base}/discovery") as answer:
            assert answer.content_type == "application/json"
            assert await answer.json() == [
                {"targets": [client.router.addresses.http], "labels": {"role": "router", "node": "a", "name": "router"}}
            ]
        await asyncio.sleep(0.1)
        async with http.get(f"{base}/metrics") as answer:
            page = await answer.text()
        assert 'baton_request_success_total{finished_reason="length"} 1.0' in page
        assert "baton_generation_tokens_total 12.0" in page
        assert "baton_time_to_first_token_seconds_count 1.0" in page


async def test_off_loopback_the_http_port_asks_for_an_operators_key(tmp_path: Path) -> None:
    config = settings_for(tmp_path, host="0.0.0.0")
    async with cluster(config) as client, aiohttp.ClientSession() as http:
        port = client.router.addresses.http.rpartition(":")[2]

        async def status(path: str, key: str = "", address: str = f"127.0.0.1:{port}") -> int:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            async with http.get(f"http://{address}{path}", headers=headers) as answer:
                return answer.status

        assert await status("/metrics") == 200  # there are no keys yet
        path = tmp_path / "api-keys.json"
        plain = api_keys.add_key(path, Identity(name="one", tenant="acme"), "")
        operator = api_keys.add_key(path, Identity(name="ops", operator=True), "")
        await becomes(lambda: status("/metrics"), 401)
        for page in ("/metrics", "/discovery"):
            assert await status(page) == 401
            assert await status(page, plain) == 403
            assert await status(page, operator) == 200
        assert await status("/healthz") in (200, 503)
        await becomes(lambda: status("/metrics", operator, client.router.addresses.api), 200)


@pytest.mark.parametrize("port", ["grpc_port", "internal_port", "http_port"])
async def test_a_port_in_use_is_named(tmp_path: Path, port: str) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        number = holder.getsockname()[1]
        with pytest.raises(errors.PortInUse, match=str(number)):
            async with served(settings_for(tmp_path, **{port: number})):
                pass


def test_the_command_says_where_it_listens_and_ends_when_told(tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    config = settings_for(tmp_path)
    file.write_text(settings.dump(config))
    command = [sys.executable, "-m", "router", "--config", str(file), "--name", "router"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "--node", "a"], **pipes) as process:
        try:
            addresses = json.loads(process.stdout.readline())
            assert set(addresses) == {"grpc", "internal", "http", "operator", "api", "further"}
            port = addresses["grpc"].rpartition(":")[2]
            busy = settings_for(tmp_path, grpc_port=int(port), operator=str(tmp_path / "other.sock"))
            file.write_text(settings.dump(busy))
            second = subprocess.run(command, **pipes, timeout=30, check=False)
            assert second.returncode == 1
            assert port in second.stderr
            assert "Traceback" not in second.stderr
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0
            assert "Traceback" not in process.stderr.read()
        finally:
            process.kill()


async def test_an_unknown_model_is_named(tmp_path: Path) -> None:
    config = settings.Config(model=settings.ModelConfig(path=str(tmp_path)))
    with pytest.raises(errors.ModelNotFound, match=str(tmp_path)):
        async with served(config):
            pass


# --- the seam ---


@pytest.mark.parametrize("error", list(errors.all_errors()), ids=lambda error: error.__name__)
def test_every_error_has_a_status_and_a_reason(error: type[errors.BatonError]) -> None:
    code, metadata = grpc_calls.status_of(error("what was wrong"))
    assert code.name == error.status
    assert code is not grpc.StatusCode.OK
    assert dict(metadata)[grpc_calls.REASON] == error.reason
    assert error.reason.isascii()


def test_an_overload_says_when_to_come_again() -> None:
    _, metadata = grpc_calls.status_of(errors.Overloaded("full", retry_after_ms=1_234))
    assert dict(metadata)[grpc_calls.RETRY_AFTER] == "1234"
