"""The Python client without a router: what it imports, sends and makes of answers."""

import asyncio
import dataclasses
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, get_type_hints

import grpc
import pytest

from baton import errors
from baton.client import (
    AsyncClient,
    Client,
    ClientTls,
    Generated,
    OutputDelta,
    PinOptions,
    SamplingOptions,
    Timing,
    TokenUsage,
    Work,
)
from baton.client.chat_results import ChatCollector, EventDecoder, http_error
from baton.client.connection import ClientConnection
from baton.client.loop_thread import LoopThread
from baton.client.options import generate_request
from baton.client.results import OutputCollector
from baton.operator_api import PinPrefix
from baton.v1 import generation_pb2 as pb
from baton.v1 import generation_pb2_grpc
from tests.support.eventually import eventually, eventually_async

HEAVY = ("torch", "ray", "zmq", "grpc", "aiohttp", "google.protobuf", "numpy")


def test_importing_it_imports_nothing_heavy():
    code = f"import sys, baton.client; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


# --- requests and results ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        (SamplingOptions, pb.GenerateRequest.DESCRIPTOR.fields_by_name),
        (PinOptions, set(PinPrefix.__struct_fields__) - {"timeout_ms"}),
    ],
)
def test_every_field_of_a_request_is_a_keyword(options: Any, fields: Any):
    missing = (set(fields) - {"text", "token_ids"}) ^ set(get_type_hints(options))
    assert not missing, f"baton/client/options.py: {options.__name__} differs from its message in {missing}"


@pytest.mark.parametrize(
    ("kind", "message"), [(TokenUsage, pb.Usage), (Timing, pb.Timing), (Work, pb.Work)], ids=lambda k: k.__name__
)
def test_results_have_every_field_of_their_messages(kind: Any, message: Any):
    assert {field.name for field in dataclasses.fields(kind)} == set(message.DESCRIPTOR.fields_by_name)


def test_a_request_holds_what_was_given_and_leaves_the_rest_open():
    request = generate_request([1, 2], {"temperature": 0.0, "top_p": None, "logit_bias": {3: -1.0}, "stop": ["a"]})
    assert request == pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[1, 2]), temperature=0.0, logit_bias={3: -1.0}, stop=["a"]
    )
    choice = generate_request([1], {"structured_output": {"choice": {"texts": ["a", "b"]}}}).structured_output
    assert choice.choice.texts == ["a", "b"]
    assert generate_request("a", {"stop": "end"}).stop == ["end"]  # type: ignore[typeddict-item]


@pytest.mark.parametrize(
    ("options", "match"),
    [({"max_tokens": -1}, "can't be sent"), ({"stop": 5}, "can't be sent"), ({"beams": 4}, "beams is no field")],
)
def test_a_value_that_no_field_holds_is_an_error_before_anything_is_sent(options: Any, match: str):
    with pytest.raises(errors.InvalidRequest, match=match):
        generate_request("a", options)


def test_a_stream_becomes_its_result():
    collector = OutputCollector()
    scored = pb.TokenLogprob(token_id=4, logprob=-0.5, top=[pb.Alternative(token_id=4, logprob=-0.5)])
    one = collector.add_message(pb.GenerateResponse(delta=pb.Delta(text="a", token_ids=[4], logprobs=[scored])))
    assert one.logprobs[0].top == ((4, -0.5),)
    collector.add_message(pb.GenerateResponse(delta=pb.Delta(text="b", token_ids=[5, 6])))
    end = pb.Finished(finish_reason=pb.FINISH_REASON_STOP, seed=7, request_id="x", usage=pb.Usage(prompt_tokens=3))
    end.timing.first_token = 1.5
    end.work.decode_workers.append("decode-0")
    assert collector.add_message(pb.GenerateResponse(finished=end)) is None
    (result,) = collector.finished
    work = Work(decode_workers=("decode-0",))
    timing = Timing(first_token=1.5)
    assert result == Generated("ab", [4, 5, 6], [*one.logprobs], "stop", TokenUsage(3), timing, work, "x", 7)


def test_events_are_found_however_they_are_cut():
    data = b': hello\n\ndata: {"id": "a"}\n\nevent: x\r\ndata: {"id": "\xc3\xa4"}\r\n\ndata: [DONE]\n\n'
    for size in range(1, len(data) + 1):
        decoder = EventDecoder()
        events = [event for at in range(0, len(data), size) for event in decoder.feed(data[at : at + size])]
        assert events == [{"id": "a"}, {"id": "ä"}]
        assert decoder.done
    for wrong in (b"data: {\n", b"data: 5\n"):
        with pytest.raises(errors.Unavailable, match="the server sent"):
            list(EventDecoder().feed(wrong))


def test_a_chat_becomes_its_answers():
    collector = ChatCollector()

    def chunk(index: int, reason: str | None = None, **delta: Any) -> dict[str, Any]:
        return {"id": "chatcmpl-q", "choices": [{"index": index, "delta": delta, "finish_reason": reason}]}

    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": '{"a"'}}
    assert collector.add_chunk(chunk(0, role="assistant", content="")) == []
    assert collector.add_chunk(chunk(1, content="two"))[0].index == 1
    assert collector.add_chunk(chunk(0, reasoning="hm"))[0].reasoning == "hm"
    assert collector.add_chunk(chunk(0, tool_calls=[call]))[0].tool_calls == (call,)
    with pytest.raises(errors.Unavailable, match="without saying why"):
        collector.answers()
    collector.add_chunk(chunk(0, "tool_calls", tool_calls=[{"index": 0, "function": {"arguments": ": 1}"}}]))
    collector.add_chunk(chunk(1, "length"))
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    collector.add_chunk({"choices": [], "usage": usage, "metrics": {"hops_ms": {"placed": 1}}})
    first, second = collector.answers()
    assert (second.content, second.finish_reason) == ("two", "length")
    assert (first.content, first.reasoning, first.finish_reason) == ("", "hm", "tool_calls")
    assert (first.tool_calls[0].name, first.tool_calls[0].arguments) == ("f", '{"a": 1}')
    assert (first.usage, first.request_id) == (TokenUsage(5, 4, 2), "q")
    assert first.metrics["hops_ms"] == {"placed": 1}
    with pytest.raises(errors.ModelMismatch, match="gone"):
        collector.add_chunk({"error": {"message": "gone", "code": 404}})


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, errors.InvalidRequest),
        (413, errors.InvalidRequest),
        (429, errors.Overloaded),
        (503, errors.Unavailable),
        (500, errors.BatonError),
    ],
)
def test_a_status_of_http_is_an_error_of_ours(status: int, kind: type[errors.BatonError]):
    assert type(http_error(status, "why")) is kind


def test_a_reason_and_the_time_to_come_again_survive():
    error = http_error(429, "slow down", "rate_limited", "2500")
    assert type(error) is errors.RateLimited
    assert error.retry_after_ms == 2_500


# --- addresses and keys -----------------------------------------------------------------------------------------------


def test_a_client_of_nothing_is_one_of_the_local_cluster(monkeypatch: pytest.MonkeyPatch):
    client = AsyncClient()
    assert client.address == "127.0.0.1:50051"
    assert client.operator.startswith("unix:")
    assert AsyncClient("here:1").operator == ""
    monkeypatch.setenv("BATON_API_KEY", "secret")
    assert ClientConnection("a:1", "", "", None, False).metadata == [("authorization", "Bearer secret")]
    assert ClientConnection("a:1", "", "", "", False).metadata == []
    assert "secret" not in repr(AsyncClient("a:1", api_key="secret"))


def test_a_call_without_its_address_says_which_one_is_missing():
    with Client("127.0.0.1:1") as client:
        with pytest.raises(errors.ConfigError, match=r"operator port.*Client\(address, operator\)"):
            client.status()
        with pytest.raises(errors.ConfigError, match="HTTP address"):
            client.chat("hello")
    with Client(operator="127.0.0.1:1") as client, pytest.raises(errors.ConfigError, match="public port"):
        client.generate("hello")


def test_certificates_that_are_none_are_named(tmp_path: Any):
    (tmp_path / "ca.pem").write_text("none")
    for path, match in ((tmp_path / "missing.pem", "can't be read"), (tmp_path / "ca.pem", "holds no certificates")):
        with Client("127.0.0.1:1", http="127.0.0.1:1", tls=path) as client:
            for door in (client.chat, client.generate):
                with pytest.raises(errors.ConfigError, match=match):
                    door("hello")
    shown = ClientTls(certificate=tmp_path / "ca.pem", key=tmp_path / "ca.pem")
    with Client("127.0.0.1:1", tls=shown) as client, pytest.raises(errors.ConfigError, match="can't be used"):
        client.generate("hello")


# --- a server that does as it is told ---------------------------------------------------------------------------------


class Script(generation_pb2_grpc.GenerationServicer):
    """Answers with what a test has set."""

    def __init__(self) -> None:
        self.metadata: dict[str, str] = {}
        self.error: tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]] | None = None
        self.finish = True
        self.stand = False
        self.ended = 0  # calls

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[pb.GenerateResponse]:  # noqa: N802
        self.metadata = dict(context.invocation_metadata())
        context.add_done_callback(self._count)
        if self.error is not None:
            await context.abort(*self.error)
        yield pb.GenerateResponse(delta=pb.Delta(text="a", token_ids=[1]))
        if self.stand:
            await asyncio.sleep(60)
        if self.finish:
            yield pb.GenerateResponse(finished=pb.Finished(finish_reason=pb.FINISH_REASON_STOP, request_id="x"))

    def _count(self, context: Any) -> None:
        self.ended += 1


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[Script, str]]:
    script, server = Script(), grpc.aio.server()
    generation_pb2_grpc.add_GenerationServicer_to_server(script, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield script, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@contextmanager
def scripted(**settings: Any) -> Iterator[tuple[Script, Client]]:
    """A blocking client of a server that runs on the clients' own loop."""
    loop = LoopThread.acquire()
    server = listening()
    script, address = loop.run(server.__aenter__())
    for name, value in settings.items():
        setattr(script, name, value)
    try:
        with Client(address, api_key="k") as client:
            yield script, client
    finally:
        loop.run(server.__aexit__(None, None, None))
        loop.release()


def test_deltas_come_and_the_result_is_whole():
    with scripted() as (script, client):
        stream = client.generate("hello")
        assert list(stream) == [OutputDelta("a", (1,))]
        assert stream.result().text == "a"
        assert client.generate([5]).result().finish_reason == "stop"
        assert script.metadata["authorization"] == "Bearer k"


def test_an_error_is_the_one_that_the_router_raised():
    trailers = (("baton-reason", "objective"), ("retry-after-ms", "750"))
    error = (grpc.StatusCode.RESOURCE_EXHAUSTED, "too late", trailers)
    with scripted(error=error) as (_, client), pytest.raises(errors.Overloaded, match="too late") as caught:
        client.generate("hello").result()
    assert (caught.value.reason, caught.value.retry_after_ms) == ("objective", 750)


def test_a_stream_without_an_end_is_an_error():
    with scripted(finish=False) as (_, client), pytest.raises(errors.Unavailable, match="without saying why"):
        client.generate("hello").result()


def test_a_deadline_is_one():
    with scripted(stand=True) as (_, client), pytest.raises(errors.DeadlineExpired, match="in time"):
        client.generate("hello", timeout=0.2).result()


@pytest.mark.parametrize("how", ["cancel", "leave", "drop", "close the client"])
def test_a_request_ends_when_its_client_wants_no_more(how: str):
    with scripted(stand=True) as (script, client):
        stream = client.generate("hello")
        assert next(stream).text == "a"
        match how:
            case "cancel":
                stream.cancel()
                with pytest.raises(errors.RequestCancelled):
                    next(stream)
            case "leave":
                with stream:
                    pass
            case "drop":
                del stream
            case _:
                client.close()
                with pytest.raises((errors.RequestCancelled, errors.ConfigError)):
                    next(stream)
        eventually(lambda: script.ended == 1, what="the call has ended at the server")


def test_a_closed_client_says_so():
    with scripted() as (_, client):
        client.close()
        client.close()
        with pytest.raises(errors.ConfigError, match="closed"):
            client.generate("hello")


def test_no_server_is_an_error_that_names_the_address():
    with Client("127.0.0.1:1", "127.0.0.1:1") as client:
        with pytest.raises(errors.Unavailable, match=r"127\.0\.0\.1:1"):
            client.generate("hello", timeout=5).result()
        with pytest.raises(errors.Unavailable, match=r"127\.0\.0\.1:1"):
            client.status()
        assert not client.answers()


async def test_async_programs_cancel_their_own_tasks():
    """A task that is cancelled while it reads gets CancelledError, and the request ends."""
    async with listening() as (script, address), AsyncClient(address) as client:
        script.stand = True
        stream = client.generate("hello")
        assert (await stream.read()) == OutputDelta("a", (1,))
        reading = asyncio.create_task(stream.read())
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await eventually_async(lambda: script.ended == 1, what="the call has ended at the server")
        script.stand = False
        assert [delta.text async for delta in client.generate("hello")] == ["a"]


def test_the_loop_ends_with_its_last_client():
    first, second = Client("127.0.0.1:1"), Client("127.0.0.1:1")
    loop = LoopThread._shared
    assert loop is not None
    first.close()
    assert loop._thread.is_alive()
    second.close()
    assert not loop._thread.is_alive()
    assert LoopThread._shared is None


def test_a_forked_process_makes_clients_of_its_own():
    """The loop's thread stays with the parent: what waited for it in a child would wait for ever."""
    code = """
import os, sys
from baton.client import Client
from baton.errors import ConfigError
before = Client("127.0.0.1:1")
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
try:
    before.answers()
except ConfigError as error:
    assert "forked" in str(error)
with Client("127.0.0.1:1") as after:
    assert not after.answers()
os._exit(7)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], timeout=60)
    assert done.returncode == 7
