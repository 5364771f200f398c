"""vLLM's gRPC door, with the stubs that smg publishes, at a router whose workers' output is known beforehand."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from baton import api_keys
from baton.api_keys import Identity
from baton.errors import ContextTooLong, InvalidRequest, UnsupportedField
from baton.messages import PromptTokenLogprob, SamplingParams, TokenLogprob
from router.events import Finished, Summary
from router.frontend.api.parameters import affinity_of
from router.frontend.detokenizer import Tokenizer
from router.frontend.generation import Generation
from router.frontend.grpc_api.vllm_messages import EngineRendering, generate_request
from router.frontend.output_stream import Output
from router.frontend.request_parsing import parse_generate_request
from router.frontend.served_model import ServedModel
from router.queueing.admission import ModelLimits
from tests.router import tokenizers
from tests.router.model import CONTEXT, EOS, VOCAB, expected
from tests.router.served import Served, served, settings_for
from tests.support.eventually import eventually_async

PROMPT, SEED, COUNT = list(range(20, 40)), 4, 12
TOKENIZER = Tokenizer(tokenizers.byte_level())
MODEL = ServedModel("small", TOKENIZER, ModelLimits(VOCAB, 64), (EOS,), SamplingParams(temperature=0.5, top_k=3))


def asked(prompt: list[int] | str = PROMPT, *, stream: bool = True, name: str = "", **params: Any) -> Any:
    request = vllm.GenerateRequest(request_id=name, stream=stream, sampling_params=vllm.SamplingParams(**params))
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.tokenized.input_ids.extend(prompt)
    return request


# --- requests ---------------------------------------------------------------------------------------------------------


def test_the_stubs_load_beside_everything_else_in_a_routers_process():
    code = "import ray, torch, opentelemetry.proto.common.v1.common_pb2, router.service, baton.v1.cluster_pb2"
    code += ", smg_grpc_proto.generated.vllm_engine_pb2_grpc, router.frontend.grpc_api.vllm_engine; print('loaded')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "loaded\n", done.stderr


def test_a_zero_is_a_field_that_is_left_out():
    made = generate_request(asked(skip_special_tokens=True), MODEL, {})
    assert (made.temperature, made.top_p, made.top_k, made.min_p, made.repetition_penalty) == (1.0, 1.0, 0, 0.0, 1.0)
    assert not made.HasField("max_tokens")
    assert not made.HasField("seed")
    assert not made.HasField("logprobs")
    assert not made.HasField("structured_output")
    assert not made.special_tokens
    assert generate_request(asked(), MODEL, {}).special_tokens
    assert generate_request(asked(temperature=0.0), MODEL, {}).temperature == 0.0


def test_every_sampling_parameter_arrives():
    given = {
        "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "frequency_penalty": 0.5,
        "presence_penalty": -0.5, "repetition_penalty": 1.5, "max_tokens": 9, "min_tokens": 2, "stop": ["a"],
        "stop_token_ids": [5], "ignore_eos": True, "logprobs": 2, "prompt_logprobs": 1, "seed": 11,
        "include_stop_str_in_output": True, "logit_bias": {3: 1.5}, "n": 3, "truncate_prompt_tokens": -1,
    }  # fmt: skip
    made = generate_request(asked(**given), MODEL, {"x-smg-routing-key": "session"})
    named = {"include_stop_str_in_output": "include_stop"}
    for name, value in given.items():
        told = getattr(made, named.get(name, name))
        assert (dict(told) if isinstance(value, dict) else list(told) if isinstance(value, list) else told) == value
    assert made.affinity == affinity_of("session", {})
    served_here = {*given, "skip_special_tokens", "grammar_from_first_token", "spaces_between_special_tokens"}
    served_here |= {"json_schema", "regex", "grammar", "structural_tag", "json_object", "choice"}
    assert served_here == set(vllm.SamplingParams.DESCRIPTOR.fields_by_name), "neither served nor refused"


@pytest.mark.parametrize(
    ("params", "field", "value"),
    [
        ({"json_schema": "{}"}, "json_schema", "{}"),
        ({"regex": "a+"}, "regex", "a+"),
        ({"grammar": 'start: "a"'}, "grammar", 'start: "a"'),
        ({"json_object": True}, "json_object", True),
    ],
)
def test_a_grammar_arrives(params: dict[str, Any], field: str, value: object):
    made = generate_request(asked(**params), MODEL, {}).structured_output
    assert made.WhichOneof("kind") == field
    assert getattr(made, field) == value


def test_a_choice_arrives():
    made = generate_request(asked(choice=vllm.ChoiceConstraint(choices=["a", "b"])), MODEL, {})
    assert list(made.structured_output.choice.texts) == ["a", "b"]


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"structural_tag": "{}"}, "structural_tag"),
    ],
)
def test_a_parameter_that_is_not_served_is_refused_by_its_name(params: dict[str, Any], field: str):
    with pytest.raises(UnsupportedField, match=field) as caught:
        generate_request(asked(**params), MODEL, {})
    assert caught.value.field == field


@pytest.mark.parametrize(
    "change",
    [
        {"mm_inputs": vllm.MultimodalInputs()},
        {"media_refs": vllm.MediaRefs()},
        {"extra_mm_inputs": [vllm.MultimodalInputs()]},
        {"kv_transfer_params": vllm.KvTransferParams(remote_host="a", remote_port=1)},
        {"kv_transfer_params_json": "{}"},
        {"data_parallel_rank": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_field_that_is_not_served_is_refused_by_its_name(change: dict[str, Any]):
    (field,) = change
    request = asked()
    request.MergeFrom(vllm.GenerateRequest(**change))
    with pytest.raises(UnsupportedField, match=field):
        generate_request(request, MODEL, {})


def test_prompts():
    assert list(generate_request(asked([1, 2]), MODEL, {}).token_ids.ids) == [1, 2]
    assert generate_request(asked("hello"), MODEL, {}).text == "hello"
    long = generate_request(asked([1] * 90 + [2, 3], truncate_prompt_tokens=2), MODEL, {})
    assert list(parse_generate_request(long, "r", MODEL, lambda: 1).prompt) == [2, 3]
    with pytest.raises(ContextTooLong):
        generate_request(asked([1] * 65), MODEL, {})
    assert generate_request(asked("hello", truncate_prompt_tokens=2), MODEL, {}).truncate_prompt_tokens == 2
    with pytest.raises(InvalidRequest, match="no prompt"):
        generate_request(vllm.GenerateRequest(), MODEL, {})
    with pytest.raises(InvalidRequest, match="token -1"):
        generate_request(asked(logit_bias={-1: 1.0}), MODEL, {})


# --- answers ----------------------------------------------------------------------------------------------------------


def rendered(request: Any, *pieces: Output) -> list[Any]:
    rendering = EngineRendering(request, MODEL, {})

    class Stream:
        stop_string = None

    class Validated:
        prompt = PROMPT[:3]

    validated: Any = Validated()
    stream: Any = Stream()
    rendering.started([Generation(validated, stream, lambda: None)])
    made = [message for piece in pieces for message in rendering.piece(piece, 0)]
    line: Any = None
    return [*made, *rendering.finished(Finished("stop"), Summary(line, 0.0), 0)]


LOGPROBS = [TokenLogprob(7, -0.5, ((7, -0.5), (8, -1.5)))]
OF_PROMPT = [PromptTokenLogprob(21, -0.25, ((21, -0.25),)), PromptTokenLogprob(22, -2.0, ((5, -1.0),), 3)]


def test_log_probabilities_of_prompt_and_output_in_a_stream():
    request = asked(logprobs=2, prompt_logprobs=1)
    first, second, complete = rendered(
        request,
        Output(prompt_logprobs=OF_PROMPT[:1]),
        Output(prompt_logprobs=OF_PROMPT[1:], tokens=[7], logprobs=LOGPROBS),
        Output(tokens=[8]),
    )
    scores = first.chunk.output_logprobs
    assert (list(scores.token_logprobs), list(scores.token_ids)) == ([-0.5], [7])
    assert (list(scores.top_logprobs[0].token_ids), list(scores.top_logprobs[0].values)) == ([7, 8], [-0.5, -1.5])
    told = first.chunk.input_logprobs
    assert list(told.token_ids) == PROMPT[:3]
    assert [one.value if one.HasField("value") else None for one in told.token_logprobs] == [None, -0.25, -2.0]
    assert list(told.top_logprobs[2].token_ids) == [5]
    assert not second.chunk.HasField("input_logprobs")
    assert not complete.complete.HasField("input_logprobs")


def test_an_answer_in_one_piece_has_everything():
    request = asked(stream=False, logprobs=2, prompt_logprobs=1, stop_token_ids=[8])
    pieces = (Output(prompt_logprobs=OF_PROMPT, tokens=[7], logprobs=LOGPROBS), Output(tokens=[8]))
    (answer,) = rendered(request, *pieces)
    complete = answer.complete
    assert list(complete.output_ids) == [7, 8]
    assert list(complete.output_logprobs.token_ids) == [7]
    assert list(complete.input_logprobs.token_ids) == PROMPT[:3]
    assert (complete.finish_reason, complete.matched_token_id, complete.completion_tokens) == ("stop", 8, 2)


# --- a router ---------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def door(folder: Path, workers: int = 1) -> AsyncIterator[tuple[Served, Any]]:
    async with (
        served(settings_for(folder)) as router,
        grpc.aio.insecure_channel(router.addresses.grpc) as channel,
    ):
        stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        for number in range(workers):
            router.start("decode", f"decode-{number}")

        async def healthy() -> bool:
            return (await stub.HealthCheck(vllm.HealthCheckRequest())).healthy

        if workers:
            await eventually_async(healthy, what="the cluster serves")
        yield router, stub


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 120))


@pytest.mark.slow
def test_a_stream_and_an_answer_in_one_piece(tmp_path: Path) -> None:
    async def test() -> None:
        async with door(tmp_path) as (_, stub):
            tokens, reason = expected(SEED, len(PROMPT), COUNT)
            *chunks, last = [one async for one in stub.Generate(asked(seed=SEED, max_tokens=COUNT), timeout=30)]
            assert [token for one in chunks for token in one.chunk.token_ids] == tokens
            assert sum(one.chunk.completion_tokens for one in chunks) == len(tokens)
            assert all(one.chunk.prompt_tokens == len(PROMPT) for one in chunks)
            request = asked(stream=False, seed=SEED, max_tokens=COUNT)
            (whole,) = [one async for one in stub.Generate(request, timeout=30)]
            for complete in (last.complete, whole.complete):
                assert list(complete.output_ids) == tokens
                assert (complete.finish_reason, complete.completion_tokens) == (reason, len(tokens))
                assert complete.prompt_tokens == len(PROMPT)
            text = [one async for one in stub.Generate(asked("Hello", stream=False, max_tokens=3), timeout=30)]
            assert text[0].complete.prompt_tokens == len(TOKENIZER.encode("Hello"))

    run(test)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
def test_several_samples(tmp_path: Path, stream: bool) -> None:
    async def test() -> None:
        async with door(tmp_path) as (_, stub):
            request = asked(stream=stream, seed=SEED, max_tokens=COUNT, n=3)
            messages = [one async for one in stub.Generate(request, timeout=30)]
            ends = {one.complete.index: one.complete for one in messages if one.HasField("complete")}
            for index in range(3):
                tokens, reason = expected(SEED + index, len(PROMPT), COUNT)
                assert list(ends[index].output_ids) == tokens
                assert ends[index].finish_reason == reason
                chunks = [one.chunk for one in messages if one.HasField("chunk") and one.chunk.index == index]
                assert [token for chunk in chunks for token in chunk.token_ids] == (tokens if stream else [])

    run(test)


@pytest.mark.slow
def test_a_stop_string_is_told(tmp_path: Path) -> None:
    async def test() -> None:
        async with door(tmp_path) as (_, stub):
            tokens, _ = expected(SEED, len(PROMPT), COUNT)
            stop = TOKENIZER.decode(tokens[3:4])
            request = asked(stream=False, seed=SEED, max_tokens=COUNT, stop=[stop], skip_special_tokens=True)
            (whole,) = [one async for one in stub.Generate(request, timeout=30)]
            assert whole.complete.matched_stop_str == stop
            assert list(whole.complete.output_ids) == tokens[: len(whole.complete.output_ids)]

    run(test)


@pytest.mark.slow
def test_abort_ends_a_request_which_is_no_error(tmp_path: Path) -> None:
    async def test() -> None:
        async with door(tmp_path) as (router, stub):
            router.step_seconds = 0.02
            call = stub.Generate(asked(name="mine", ignore_eos=True))
            other = stub.Generate(asked(name="other", ignore_eos=True, max_tokens=4))
            assert (await call.read()).HasField("chunk")
            await stub.Abort(vllm.AbortRequest(request_ids=["mine", "unknown"]))
            last = [one async for one in _rest(call)][-1].complete
            assert last.finish_reason == "abort"
            assert last.completion_tokens == len(last.output_ids) > 0
            assert [one async for one in _rest(other)][-1].complete.finish_reason in ("length", "stop")

            async def idle() -> bool:
                return not (await stub.GetServerInfo(vllm.GetServerInfoRequest())).active_requests

            await eventually_async(idle, what="nothing runs")

    run(test)


@pytest.mark.slow
def test_abort_reaches_requests_of_the_same_client_only(tmp_path: Path) -> None:
    file = tmp_path / "api-keys.json"
    keys = [api_keys.add(file, Identity(name=name, tenant="acme"), "") for name in ("one", "two")]
    one, two = ([("authorization", f"Bearer {key}")] for key in keys)

    async def test() -> None:
        async with door(tmp_path, workers=0) as (router, stub):
            router.start("decode", "decode-0")
            router.step_seconds = 0.02

            async def healthy() -> bool:
                return (await stub.HealthCheck(vllm.HealthCheckRequest(), metadata=one)).healthy

            await eventually_async(healthy, what="the cluster serves")
            call = stub.Generate(asked(name="mine", ignore_eos=True, max_tokens=20), metadata=one)
            assert (await call.read()).HasField("chunk")
            await stub.Abort(vllm.AbortRequest(request_ids=["mine"]), metadata=two)
            assert [one async for one in _rest(call)][-1].complete.finish_reason == "length"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Abort(vllm.AbortRequest(request_ids=["mine"]))
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED

    run(test)


@pytest.mark.slow
def test_the_text_beside_a_tokenized_prompt_may_be_long(tmp_path: Path) -> None:
    async def test() -> None:
        async with door(tmp_path) as (_, stub):
            request = asked(max_tokens=2, ignore_eos=True)
            request.tokenized.original_text = "x" * 140_000  # beyond what all other fields may have together
            assert [one async for one in stub.Generate(request)][-1].complete.completion_tokens == 2
            request.tokenized.original_text = ""
            request.sampling_params.stop.append("x" * 140_000)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(request).read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    run(test)


async def _rest(call: Any) -> AsyncIterator[Any]:
    while (message := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
        yield message


@pytest.mark.slow
def test_errors_are_statuses(tmp_path: Path) -> None:
    async def test() -> None:
        async with door(tmp_path) as (_, stub):
            code = grpc.StatusCode
            for call, status, reason in (
                (stub.Generate(asked(temperature=-1.0)).read(), code.INVALID_ARGUMENT, "invalid_request"),
                (stub.Generate(asked(logprobs=-1)).read(), code.INVALID_ARGUMENT, "unsupported_field"),
                (stub.Generate(asked(name="a b")).read(), code.INVALID_ARGUMENT, "invalid_request"),
                (stub.Generate(asked([1] * CONTEXT * 2)).read(), code.INVALID_ARGUMENT, "context_too_long"),
                (stub.Embed(vllm.EmbedRequest()), code.UNIMPLEMENTED, "unsupported_call"),
                (stub.FlushCache(common_pb2.FlushCacheRequest()), code.UNIMPLEMENTED, "unsupported_call"),
                (stub.StartProfile(common_pb2.StartProfileRequest()), code.UNIMPLEMENTED, "unsupported_call"),
                (stub.StopProfile(common_pb2.StopProfileRequest()), code.UNIMPLEMENTED, "unsupported_call"),
                (
                    stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()).read(),
                    code.UNIMPLEMENTED,
                    "unsupported_call",
                ),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert caught.value.code() == status
                assert dict(caught.value.trailing_metadata() or ())["baton-reason"] == reason

    run(test)


@pytest.mark.slow
def test_what_a_gateway_asks_first(tmp_path: Path) -> None:
    async def test() -> None:
        async with door(tmp_path) as (_, stub):
            info = await stub.GetModelInfo(vllm.GetModelInfoRequest())
            assert (info.is_generation, info.max_context_length, info.vocab_size) == (True, CONTEXT, VOCAB)
            assert (info.served_model_name, list(info.eos_token_ids)) == ("small", [EOS])
            assert info.tokenizer_path == str(tmp_path / "small")
            server = await stub.GetServerInfo(vllm.GetServerInfoRequest())
            assert (server.data_parallel_size, server.constrained_decoding_start) == (1, "first_token")
            loads = await stub.GetLoads(vllm.GetLoadsRequest())
            assert loads.dp_rank_count == len(loads.loads) == 1
            chunks = [one async for one in stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
            data = b"".join(one.data for one in chunks)
            assert [one.sha256 for one in chunks] == [""] * (len(chunks) - 1) + [hashlib.sha256(data).hexdigest()]
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                assert {"config.json", "tokenizer.json"} <= set(archive.namelist())
                assert json.loads(archive.read("config.json"))["vocab_size"] == VOCAB

    run(test)


@pytest.mark.slow
def test_a_cluster_without_workers_is_not_healthy(tmp_path: Path) -> None:
    async def test() -> None:
        async with door(tmp_path, workers=0) as (_, stub):
            health = await stub.HealthCheck(vllm.HealthCheckRequest())
            assert not health.healthy
            assert "worker" in health.message

    run(test)
