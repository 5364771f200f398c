"""A cascade behind one router's doors: the small model answers, or the large one where the small one is unsure.

The workers' tokens have lower log-probabilities the later they come, so a long prompt makes a model unsure.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import openai
import pytest

from baton.client import AsyncClient
from baton.config import CascadeConfig, FurtherModel, ModelConfig
from baton.errors import DeadlineExpired, ModelError, UnsupportedField
from baton.messages import Decode
from tests.router import test_chat_api, test_frontend_two_models, tokenizers
from tests.router.served import Served, model_folder, served, settings_for
from tests.router.test_api import PROMPT, SEED, Door, completion, text_of
from tests.router.test_chat_api import MESSAGES, OUTPUT, TOOLS, WEATHER, Client
from tests.router.test_frontend_two_models import two_models
from tests.support.eventually import becomes, eventually_async

pytestmark = pytest.mark.slow

SURE, UNSURE = PROMPT[:3], PROMPT  # mean log-probabilities of the first four tokens: -0.5625 and -2.6875
CASCADE = CascadeConfig(small="small", large="large", min_logprob=-1.0, tokens=4, classes=[-5])


@contextlib.asynccontextmanager
async def doors(
    folder: Path, cascade: CascadeConfig = CASCADE, *, chats: bool = False
) -> AsyncIterator[tuple[Door, Served, AsyncClient]]:
    """A client of a router with a cascade "both", whose small model has a worker; what starts workers of the large one;
    and the operator's client. `chats`: the models have the tokens and the template of `test_chat_api`."""
    config = msgspec.structs.replace(two_models(folder), cascades={"both": cascade})
    for path in [pool.model.path for pool in config.pools()] if chats else ():
        test_chat_api.tokenizer().save(f"{path}/tokenizer.json")
        Path(path, "tokenizer_config.json").write_text(json.dumps({"chat_template": test_chat_api.TEMPLATE}))
    async with contextlib.AsyncExitStack() as stack:
        client, further = await stack.enter_async_context(test_frontend_two_models.doors(config))
        addresses = client.router.addresses
        yield client, further, await stack.enter_async_context(AsyncClient(addresses.grpc, addresses.operator))


async def counted(client: Door) -> dict[tuple[str, str], float]:
    """The requests of the cascade, by the model that answered and why."""
    prefix, counts = 'baton_cascade_requests_total{chosen="', dict[tuple[str, str], float]()
    async with client.http.get(f"{client.url}/metrics") as page:
        for line in (await page.text()).splitlines():
            if line.startswith(prefix):
                labels = dict(part.split("=") for part in line.partition("{")[2].partition("}")[0].split(","))
                key = labels["chosen"].strip('"'), labels["reason"].strip('"')
                counts[key] = float(line.rpartition(" ")[2])
    return {key: count for key, count in counts.items() if count}


@pytest.mark.technique("Cascades of models")
async def test_a_sure_answer_is_the_small_models_and_an_unsure_one_is_repeated(tmp_path: Path) -> None:
    async with doors(tmp_path) as (client, further, operator):
        sure = await client.complete(model="both", prompt=SURE)
        waiting = asyncio.create_task(client.complete(model="both", prompt=UNSURE))
        first = asyncio.create_task(client.complete(model="both", prompt=SURE, priority=-5))
        await eventually_async(lambda: _is_queued(operator, 2), "two requests to the large model")
        processes = client.router.cluster.processes.values()
        await eventually_async(lambda: not any(each.sequences for each in processes), "the end of the small model's")
        further.start("decode", "decode-m1-0")
        for answer, prompt in ((sure, SURE), (await waiting, UNSURE), (await first, SURE)):
            assert answer["model"] == "both"
            assert answer["choices"][0]["text"] == text_of(prompt=len(prompt))
            assert answer["choices"][0]["logprobs"] is None
            assert answer["usage"]["prompt_tokens"] == len(prompt)
            assert answer["usage"]["completion_tokens"] == 12
        explanations = [await operator.explain(answer["id"]) for answer in (sure, waiting.result(), first.result())]
        choices = [one.request.cascade for one in explanations]
        assert [(one.chosen, one.reason, one.mean_logprob, one.tokens) for one in choices if one] == [
            ("small", "confident", -0.5625, 4), ("large", "unsure", -2.6875, 4), ("large", "class", None, 0),
        ]  # fmt: skip
        assert [one.request.decode_worker for one in explanations] == ["decode-0", "decode-m1-0", "decode-m1-0"]
        assert choices[1] is not None
        before = await operator.explain(choices[1].first)
        assert (before.request.decode_worker, before.request.state) == ("decode-0", "cancelled")
        assert before.request.cascade == choices[1]
        assert "'large' answers" in before.request.outcome
        once = {("small", "confident"): 1, ("large", "unsure"): 1, ("large", "class"): 1}
        await becomes(lambda: counted(client), once, "each counted once")


async def _is_queued(operator: AsyncClient, count: int) -> bool:
    return (await operator.status()).counts.queued == count


async def test_a_cascade_has_a_card_and_tokens_of_its_own(tmp_path: Path) -> None:
    async with doors(tmp_path) as (client, _, _):
        _, models = await client.get("/v1/models")
        assert [card["id"] for card in models["data"]] == ["small", "large", "big", "both"]
        status, tokens, _ = await client.post("/tokenize", {"model": "both", "prompt": "text"})
        assert (status, tokens["count"] > 0) == (200, True)


@pytest.mark.parametrize("prompt", [SURE, UNSURE])
async def test_a_stream_begins_with_the_choice(tmp_path: Path, prompt: list[int]) -> None:
    async with doors(tmp_path) as (client, further, _):
        body = completion(model="both", prompt=prompt, stream=True, n=2, logprobs=1)
        async with client.http.post(f"{client.url}/v1/completions", json=body) as answer:
            if prompt is UNSURE:
                assert await _seen(answer, 1.0) == []  # but headers
                further.start("decode", "decode-m1-0")
            text = (await answer.read()).decode()
        events = [msgspec.json.decode(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        for number in range(2):
            parts = [part for event in events for part in event["choices"] if part["index"] == number]
            assert "".join(part["text"] for part in parts) == text_of(SEED + number, len(prompt))
            scores = [value for part in parts if part["logprobs"] for value in part["logprobs"]["token_logprobs"]]
            assert scores[:4] == [-at / 8 for at in range(len(prompt), len(prompt) + 4)]


async def _seen(answer: aiohttp.ClientResponse, seconds: float) -> list[bytes]:
    """What of a stream's body comes in this time."""
    lines: list[bytes] = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            async for line in answer.content:
                lines.append(line)
    return lines


@pytest.mark.parametrize("prompt", [SURE, UNSURE])
async def test_a_client_that_goes_away_ends_whichever_runs(tmp_path: Path, prompt: list[int]) -> None:
    async with doors(tmp_path) as (client, further, _):
        worker = further.start("decode", "decode-m1-0")
        (small,) = (one for one in client.router.cluster.processes.values())
        runs = worker if prompt is UNSURE else small
        client.router.step_seconds = further.step_seconds = 0.02
        body = completion(model="both", prompt=prompt, max_tokens=200, ignore_eos=True)
        asking = asyncio.create_task(client.post("/v1/completions", body))
        await eventually_async(lambda: _has(runs, 40), "a long output")
        asking.cancel()
        await eventually_async(lambda: not (worker.sequences or small.sequences), "the end of both")


async def test_a_client_that_goes_away_before_the_choice_costs_the_large_model_nothing(tmp_path: Path) -> None:
    async with doors(tmp_path) as (client, _, operator):
        client.router.step_seconds = 0.3
        asking = asyncio.create_task(client.post("/v1/completions", completion(model="both", prompt=UNSURE)))
        (small,) = client.router.cluster.processes.values()
        await eventually_async(lambda: _has(small, len(UNSURE)), "a first token")
        asking.cancel()
        await eventually_async(lambda: not small.sequences, "its end")
        client.router.step_seconds = 0.002
        assert not (await operator.generate(SURE, model="both").result()).logprobs
        assert {one.decode_worker for one in await operator.requests(10)} == {"decode-0"}  # none was sent to the other


def _has(process: Any, tokens: int) -> bool:
    return any(len(each.tokens) > tokens for each in process.sequences.values())


async def test_what_needs_whole_outputs_is_refused(tmp_path: Path) -> None:
    async with doors(tmp_path) as (client, _, operator):
        for more in ({"best_of": 2}, {"use_beam_search": True, "n": 2}):
            status, answer, headers = await client.post("/v1/completions", completion(model="both", **more))
            assert (status, headers["baton-reason"]) == (400, UnsupportedField.reason)
            assert "name the model 'large'" in answer["error"]["message"]
        with pytest.raises(UnsupportedField, match="the cascade 'both' chooses"):
            await operator.generate(PROMPT, model="both", best_of=2).result()


async def test_the_large_models_error_reaches_the_client(tmp_path: Path) -> None:
    async with doors(tmp_path) as (client, _, operator):
        with pytest.raises(DeadlineExpired):
            await operator.generate(UNSURE, model="both", max_tokens=8, timeout=1).result()
        assert (await client.complete(model="both", prompt=SURE))["choices"][0]["text"] == text_of(prompt=3)


async def test_models_that_read_texts_differently_make_no_cascade(tmp_path: Path) -> None:
    large = model_folder(tmp_path / "large")
    tokenizers.byte_fallback().save(str(large / "tokenizer.json"))
    further = FurtherModel(model=ModelConfig(path=str(large), served_model_name="large"), prefill=0)
    config = msgspec.structs.replace(settings_for(tmp_path), models=(further,), cascades={"both": CASCADE})
    with pytest.raises(ModelError, match="'small' and 'large' have different tokenizers"):
        async with served(config):
            pass


@pytest.fixture(params=["small", "large"])
def chosen(request: pytest.FixtureRequest) -> str:
    return request.param


@contextlib.asynccontextmanager
async def chats(
    folder: Path, monkeypatch: pytest.MonkeyPatch, chosen: str
) -> AsyncIterator[tuple[Client, dict[str, list[Decode]]]]:
    """A client of a cascade that always chooses the same model, and the orders of each model's worker."""
    cascade = msgspec.structs.replace(CASCADE, min_logprob=-100.0 if chosen == "small" else 0.0)
    async with doors(folder, cascade, chats=True) as (client, further, _):
        (small,) = client.router.cluster.processes.values()
        workers = {"small": small, "large": further.start("decode", "decode-m1-0")}
        orders: dict[str, list[Decode]] = {name: [] for name in workers}
        for name, worker in workers.items():

            def noted(envelope: Any, take: Any = worker.take, heard: list[Decode] = orders[name]) -> None:
                heard.extend([envelope.message] if isinstance(envelope.message, Decode) else [])
                take(envelope)

            worker.take = noted
        yield Client(client.router, monkeypatch), orders


async def test_a_chat_calls_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str) -> None:
    fields: Any = {"model": "both", "messages": MESSAGES, "tools": TOOLS}
    async with chats(tmp_path, monkeypatch, chosen) as (client, orders), client.openai() as door:
        client.say(OUTPUT)
        whole = (await door.chat.completions.create(**fields)).choices[0]
        assert (whole.finish_reason, whole.message.content) == ("tool_calls", "I'll look.")
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in whole.message.tool_calls or ()]
        assert calls == [("get_weather", WEATHER), ("get_time", {})]
        pieces = [part async for part in await door.chat.completions.create(**fields, stream=True)]
        deltas = [part.choices[0].delta for part in pieces]
        assert "".join(delta.content or "" for delta in deltas) == "I'll look."
        parts = [call.function for delta in deltas for call in delta.tool_calls or () if call.function]
        assert [part.name for part in parts if part.name] == ["get_weather", "get_time"]
        client.say(json.dumps(WEATHER))
        forced: Any = {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
        message = (await door.chat.completions.create(**fields, **forced)).choices[0].message
        assert [json.loads(call.function.arguments) for call in message.tool_calls or ()] == [WEATHER]
        assert [order.sampling.grammar is not None for order in orders[chosen]] == [False, False, True]


async def test_structured_output_binds_both_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str
) -> None:
    async with chats(tmp_path, monkeypatch, chosen) as (client, orders), client.openai() as door:
        client.say(json.dumps(WEATHER))
        form: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": {"type": "object"}}}
        fields: Any = {"model": "both", "messages": MESSAGES}
        answer = await door.chat.completions.create(**fields, response_format=form)
        assert json.loads(answer.choices[0].message.content or "") == WEATHER
        (first,) = orders["small"]
        (last,) = orders[chosen]
        assert first.sampling.grammar == last.sampling.grammar is not None
        form["json_schema"]["schema"]["type"] = "no such"
        with pytest.raises(openai.BadRequestError, match="no such"):
            await door.chat.completions.create(**fields, response_format=form)


async def test_a_stop_string_ends_an_answer_before_the_choice_and_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str
) -> None:
    async with chats(tmp_path, monkeypatch, chosen) as (client, _), client.openai() as door:
        client.say("abcdefghij")
        for stop, text in (("bc", "a"), ("de", "abc"), ("hi", "abcdefg")):
            fields: Any = {"model": "both", "messages": MESSAGES, "max_tokens": 10, "stop": [stop]}
            (choice,) = (await door.chat.completions.create(**fields)).choices
            assert (choice.message.content, choice.finish_reason) == (text, "stop")
            pieces = [part.choices[0] async for part in await door.chat.completions.create(**fields, stream=True)]
            assert "".join(part.delta.content or "" for part in pieces) == text
            assert pieces[-1].finish_reason == "stop"
        async with client.anthropic() as other:
            for stop in ("bc", "hi"):
                answer = await other.messages.create(
                    model="both", max_tokens=10, messages=MESSAGES, stop_sequences=[stop]
                )
                assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
