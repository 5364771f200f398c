"""The HTTP APIs, with a real router, real sockets, and workers whose output is known beforehand."""

import asyncio
import contextlib
import gzip
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.client import AsyncClient
from baton.messages import MIXED, Namespace
from baton.ports import FixedPort
from kvstore.keys import system_fingerprint
from router.frontend.api.openai_chat import ChatToolCall
from router.frontend.api.openai_responses import OutputMessage
from router.frontend.api.streaming import json_pieces
from router.frontend.api.token_logprobs import ChatLogprobs, ChatTokenLogprob
from router.frontend.detokenizer import Tokenizer
from tests.router import tokenizers
from tests.router.model import EMPTY, EOS, NAMESPACE, expected
from tests.router.served import Served, served, settings_for
from tests.support.eventually import becomes, eventually_async

pytestmark = pytest.mark.slow

PROMPT = list(range(20, 40))
SEED = 4
USER: dict[str, Any] = {"role": "user", "content": "x"}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if tools %}tools:{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
TOKENIZER = Tokenizer(tokenizers.byte_level())


class Door:
    """A client of the HTTP API."""

    def __init__(self, router: Served, http: aiohttp.ClientSession) -> None:
        self.router = router
        self.http = http
        self.url = f"http://{router.addresses.api}"

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(self.url + path) as answer:
            return answer.status, await answer.json()

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any, dict[str, str]]:
        async with self.http.post(self.url + path, json=body, headers=headers) as answer:
            return answer.status, await answer.json(), {name.lower(): value for name, value in answer.headers.items()}

    async def complete(self, **fields: Any) -> Any:
        status, answer, _ = await self.post("/v1/completions", completion(**fields))
        assert status == 200, answer
        return answer

    async def events(self, path: str, body: Any) -> list[Any]:
        """The data of every event; the last one is the end of the stream."""
        async with self.http.post(self.url + path, json=body) as answer:
            assert answer.status == 200, await answer.text()
            assert answer.content_type == "text/event-stream"
            raw = (await answer.read()).decode()
        events = raw.split("\n\n")
        assert events.pop() == ""
        assert events.pop() == "data: [DONE]"
        assert all(event.startswith("data: ") for event in events)
        return [json.loads(event.removeprefix("data: ")) for event in events]


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 12, "seed": SEED, **fields}


def text_of(seed: int = SEED, prompt: int = len(PROMPT), count: int = 12) -> str:
    """What the model says, as text."""
    return TOKENIZER.decode([token for token in expected(seed, prompt, count)[0] if token != EOS])


@contextlib.asynccontextmanager
async def door(
    folder: Path, *, template: str | None = TEMPLATE, workers: int = 1, names: tuple[str, ...] = (),
    adapters: Mapping[str, str] = EMPTY, namespace: Namespace = NAMESPACE, **more: Any,
) -> AsyncIterator[Door]:  # fmt: skip
    config = settings_for(folder, **more)
    model = msgspec.structs.replace(config.model, served_model_name=names, lora_modules=dict(adapters))
    config = msgspec.structs.replace(config, model=model)
    settings = {"bos_token": "<s>", "chat_template": template}
    (Path(config.model.path) / "tokenizer_config.json").write_text(json.dumps(settings))
    async with served(config) as router, aiohttp.ClientSession() as http:
        router.cluster.adapters, router.cluster.namespace = sorted(adapters), namespace
        for number in range(workers):
            router.start("decode", f"decode-{number}")
        client = Door(router, http)
        if workers:
            await eventually_async(lambda: ready(client))
        yield client


async def ready(client: Door) -> bool:
    return (await client.get("/ready"))[0] == 200


async def test_a_body_of_many_prompts_leaves_room_in_the_queue(tmp_path: Path) -> None:
    async with door(tmp_path, workers=0, max_queued=20) as client:
        client.router.start("decode", "decode-0", pool_pages=16)
        await eventually_async(lambda: ready(client))
        many = asyncio.create_task(client.complete(prompt=[PROMPT] * 60))
        while not many.done():
            assert (await client.complete())["choices"][0]["text"] == text_of()
        assert len((await many)["choices"]) == 60


async def test_an_answer_tells_why_its_prompt_was_not_cached_and_its_id_explains_it(tmp_path: Path) -> None:
    """In each API, whole and streamed, where the client asks for it. A session has the turns of all of them."""
    messages = [{"role": "user", "content": "The quick brown fox jumps over the lazy dog."}]
    chat = {"messages": messages, "max_tokens": 2}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": completion(max_tokens=2),
        "/v1/chat/completions": chat,
        "/v1/messages": chat,
        "/v1/responses": {"input": messages, "max_output_tokens": 16},
    }

    def details(usage: Any) -> Any:
        return usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or usage

    async with door(tmp_path) as client, AsyncClient(operator=client.router.addresses.operator) as operator:
        for path, body in bodies.items():
            _, plain, _ = await client.post(path, body)
            assert "not_cached" not in details(plain["usage"])
            headers = {"baton-not-cached": "true", "X-Claude-Code-Session-Id": "turns"}
            status, answer, _ = await client.post(path, body, **headers)
            assert status == 200, answer
            why, usage = details(answer["usage"])["not_cached"], answer["usage"]
            request = (await operator.explain(answer["id"])).request
            assert request.session == "turns"
            assert (why["reason"], why["first_token"]) == (request.not_cached.reason, request.not_cached.token)
            cached = usage.get("cache_read_input_tokens") or details(usage).get("cached_tokens", 0)
            assert sum(why["tokens"].values()) == request.prompt_tokens - cached
        turns = await operator.requests(session="turns")
        assert len(turns) == len(bodies)
        assert await operator.requests(session="none") == []
        stream = {**chat, "stream": True, "stream_options": {"include_usage": True}}
        headers = {"baton-not-cached": "1"}
        async with client.http.post(f"{client.url}/v1/chat/completions", json=stream, headers=headers) as answer:
            assert '"not_cached":{"reason":' in await answer.text()


async def test_a_completion_of_each_kind_of_prompt(tmp_path: Path) -> None:
    async with door(tmp_path) as client:
        answer = await client.complete()
        assert answer["object"] == "text_completion"
        (choice,) = answer["choices"]
        assert choice["text"] == text_of()
        assert choice["finish_reason"] == expected(SEED, len(PROMPT), 12)[1]
        tokens = expected(SEED, len(PROMPT), 12)[0]
        usage = answer["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] < len(PROMPT)
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT), len(tokens))
        assert usage["total_tokens"] == len(PROMPT) + len(tokens)
        assert answer["metrics"]["time_to_first_token_ms"] > 0
        assert {"placed", "first_token", "ended"} <= set(answer["metrics"]["hops_ms"])
        text = "The quick brown fox"
        prompt = TOKENIZER.encode(text)
        answer = await client.complete(prompt=text)
        assert answer["choices"][0]["text"] == text_of(prompt=len(prompt))
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        answer = await client.complete(prompt=text, add_special_tokens=False)
        assert answer["usage"]["prompt_tokens"] == len(prompt) - 1
        for several in ([PROMPT, PROMPT[:5]], [text, "Hello"]):
            answer = await client.complete(prompt=several)
            assert [choice["index"] for choice in answer["choices"]] == [0, 1]
            lengths = [len(one) if isinstance(one, list) else len(TOKENIZER.encode(one)) for one in several]
            assert [choice["text"] for choice in answer["choices"]] == [text_of(prompt=one) for one in lengths]
            assert answer["usage"]["prompt_tokens"] == sum(lengths)
        answer = await client.complete(truncate_prompt_tokens=7, return_token_ids=True)
        assert answer["choices"][0]["prompt_token_ids"] == PROMPT[-7:]
        long = text * 5_000  # no context here has room for so much
        for prompt in (long, [long]):
            answer = await client.complete(prompt=prompt, truncate_prompt_tokens=7, return_token_ids=True)
            ids = answer["choices"][0]["prompt_token_ids"]
            assert ids == [*TOKENIZER.encode("x")[:1], *TOKENIZER.encode(text * 3)[-6:]]


def test_a_response_in_pieces_is_the_response_at_once() -> None:
    for count in (1, 700):
        scored = ChatLogprobs([ChatTokenLogprob("b", [98], -1.0, [])] * count)
        for value in (scored, [OutputMessage(id="x", status="completed", content=[])], ChatToolCall("x", scored)):
            assert b"".join(json_pieces(value)) == msgspec.json.encode(value)


async def test_without_max_tokens_a_completion_has_sixteen(tmp_path: Path) -> None:
    async with door(tmp_path) as client:
        answer = await client.complete(max_tokens=None, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == 16


async def test_further_names_of_the_model_are_accepted_and_listed(tmp_path: Path) -> None:
    async with door(tmp_path, names=("one", "two")) as client:
        _, models = await client.get("/v1/models")
        assert [card["id"] for card in models["data"]] == ["one", "two"]
        assert (await client.get("/v1/models/two"))[1]["root"] == "one"
        for name in ("one", "two", ""):
            assert (await client.complete(model=name))["model"] == "one"
        status, answer, _ = await client.post("/v1/completions", completion(model="three"))
        assert (status, "'three'" in answer["error"]["message"]) == (404, True)


async def test_an_adapter_answers_by_its_name(tmp_path: Path) -> None:
    async with door(tmp_path, names=("base",), adapters={"tuned": "/somewhere/tuned"}) as client:
        assert (await client.get("/v1/models/tuned"))[1]["parent"] == "base"
        for name in ("base", "tuned"):
            assert (await client.complete(model=name))["model"] == name
        async with client.http.get(f"{client.url}/metrics") as metrics:
            page = await metrics.text()
        (line,) = [each for each in page.splitlines() if each.startswith("vllm:lora_requests_info{")]
        assert 'max_lora="1"' in line


async def test_the_fingerprint_is_that_of_model_and_numerics(tmp_path: Path) -> None:
    async with door(tmp_path, adapters={"tuned": "/somewhere/tuned"}) as client:
        plain = system_fingerprint(NAMESPACE)
        tuned = system_fingerprint(msgspec.structs.replace(NAMESPACE, adapter="digest of tuned"))
        chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        for model, right in (("", plain), ("tuned", tuned)):
            for path, body in (("/v1/completions", completion()), ("/v1/chat/completions", chat)):
                _, whole, _ = await client.post(path, body | {"model": model})
                assert whole["system_fingerprint"] == right
                chunks = await client.events(path, body | {"model": model, "stream": True})
                assert {chunk["system_fingerprint"] for chunk in chunks} == {right}


async def test_a_mixed_cluster_has_no_fingerprint(tmp_path: Path) -> None:
    async with door(tmp_path, namespace=msgspec.structs.replace(NAMESPACE, numerics=MIXED)) as client:
        assert (await client.complete())["system_fingerprint"] is None
        chunks = await client.events("/v1/completions", completion(stream=True))
        assert {chunk["system_fingerprint"] for chunk in chunks} == {None}


async def test_a_stream_says_the_same(tmp_path: Path) -> None:
    async with door(tmp_path) as client:
        whole = await client.complete(return_token_ids=True)
        options = {"include_usage": True}
        body = completion(stream=True, stream_options=options, return_token_ids=True)
        *chunks, last = await client.events("/v1/completions", body)
        choices = [chunk["choices"][0] for chunk in chunks]
        assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
        tokens = [token for choice in choices for token in choice.get("token_ids", ())]
        assert tokens == whole["choices"][0]["token_ids"]
        assert choices[0]["prompt_token_ids"] == PROMPT
        assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1]["finish_reason"] == whole["choices"][0]["finish_reason"]
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
        assert all(chunk["usage"] is None for chunk in chunks)
        always = await client.events(
            "/v1/completions", completion(stream=True, stream_options={"continuous_usage_stats": True})
        )
        counts = [chunk["usage"]["completion_tokens"] for chunk in always]
        assert counts == sorted(counts)
        assert counts[-1] == whole["usage"]["completion_tokens"]
        plain = await client.events("/v1/completions", completion(stream=True, stream_options=None, stop=None))
        assert all("usage" not in chunk for chunk in plain)


@pytest.mark.parametrize("stream", [False, True])
async def test_several_samples_have_seeds_in_a_row(tmp_path: Path, stream: bool) -> None:
    async with door(tmp_path, workers=2) as client:
        body = completion(n=3, prompt=[PROMPT, PROMPT[:4]], stream=stream)
        right = [text_of(SEED + sample, length) for length in (len(PROMPT), 4) for sample in range(3)]
        if stream:
            texts = [""] * 6
            for chunk in await client.events("/v1/completions", body):
                (choice,) = chunk["choices"]
                texts[choice["index"]] += choice["text"]
        else:
            answer = await client.complete(**body)
            texts = [choice["text"] for choice in answer["choices"]]
            assert answer["usage"]["prompt_tokens"] == len(PROMPT) + 4
        assert texts == right


async def test_a_chat_is_rendered_by_the_checkpoints_template(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]},
    ]
    rendered = "<s>[system]Be brief.[user]Hello\nthere[assistant]"
    prompt = TOKENIZER.encode(rendered, special_tokens=False)
    async with door(tmp_path) as client:
        body = {"messages": messages, "seed": SEED, "max_completion_tokens": 12, "return_token_ids": True}
        status, answer, _ = await client.post("/v1/chat/completions", body)
        assert status == 200, answer
        assert answer["object"] == "chat.completion"
        assert answer["prompt_token_ids"] == prompt
        (choice,) = answer["choices"]
        assert choice["message"] == {"role": "assistant", "content": text_of(prompt=len(prompt)), "refusal": None}
        chunks = await client.events("/v1/chat/completions", body | {"stream": True})
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert chunks[0]["prompt_token_ids"] == prompt
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        assert text == choice["message"]["content"]
        status, counted, _ = await client.post("/tokenize", {"messages": messages, "return_token_strs": True})
        assert counted["tokens"] == prompt
        assert "".join(counted["token_strs"]) == rendered
        continued = [messages[0], {"role": "assistant", "content": "Well,"}]
        body = {"messages": continued, "continue_final_message": True, "add_generation_prompt": False}
        _, counted, _ = await client.post("/tokenize", body)
        _, text, _ = await client.post("/detokenize", {"tokens": counted["tokens"]})
        assert text == {"prompt": "<s>[system]Be brief.[assistant]Well,"}


async def test_names_headers_and_what_the_server_is(tmp_path: Path) -> None:
    async with door(tmp_path) as client:
        _, answer, headers = await client.post("/v1/completions", completion(), **{"X-Request-Id": "mine-1"})
        assert headers["x-request-id"] == "mine-1"
        assert answer["id"] == "cmpl-mine-1"
        _, models = await client.get("/v1/models")
        (model,) = models["data"]
        assert (model["object"], model["max_model_len"]) == ("model", 4_096)
        assert await client.get(f"/v1/models/{model['id']}") == (200, model)
        assert (await client.get("/v1/models/other"))[0] == 404
        anthropics = {"anthropic-version": "2023-06-01"}
        async with client.http.get(f"{client.url}/v1/models", headers=anthropics) as listed:
            page = await listed.json()
        assert (page["first_id"], page["has_more"]) == (model["id"], False)
        assert page["data"][0]["type"] == "model"
        for path in ("/v1/models/other", "/v1/nowhere"):
            async with client.http.get(client.url + path, headers=anthropics) as missing:
                assert (missing.status, (await missing.json())["error"]["type"]) == (404, "not_found_error")
        for path in ("/live", "/ready", "/health", "/health/ready", "/version", "/openapi.json"):
            assert (await client.get(path))[0] == 200, path
        async with client.http.get(f"{client.url}/metrics") as page:
            assert "baton_num_requests_running" in await page.text()
        assert (await client.get("/nowhere"))[0] == 404
        async with client.http.get(f"{client.url}/v1/completions") as wrong:
            assert wrong.status == 405


async def test_slashes_at_the_end_and_the_way_to_the_dashboard(tmp_path: Path) -> None:
    async with door(tmp_path) as client:
        assert (await client.get("/v1/models/"))[1] == (await client.get("/v1/models"))[1]
        for path in ("/v1/completions/", "/v1/completions//"):
            async with client.http.post(client.url + path, json=completion(), allow_redirects=False) as answer:
                assert answer.status == 200
        assert (await client.get("/health/"))[0] == 200
        for path, to in (("/", "/dashboard"), ("/dashboard/", "/dashboard"), ("/dashboard", "/dashboard")):
            async with client.http.get(client.url + path) as page:
                assert (page.status, page.url.path) == (200, to)
        assert (await client.get("/v1/nowhere/"))[0] == 404


@pytest.mark.parametrize("encoding", ["gzip", "zstd", "GZip", "br, gzip"])
async def test_a_compressed_body_is_refused_as_such(tmp_path: Path, encoding: str) -> None:
    data, headers = gzip.compress(json.dumps(completion()).encode()), {"Content-Encoding": encoding}
    async with door(tmp_path, workers=0) as client:
        for path in ("completions", "chat/completions", "messages", "messages/count_tokens", "responses"):
            async with client.http.post(f"{client.url}/v1/{path}", data=data, headers=headers) as answer:
                error = (await answer.json())["error"]
                assert (answer.status, answer.headers["baton-reason"]) == (415, "unsupported_encoding")
                assert encoding in error["message"]


async def test_anthropics_answers_have_their_own_names_header(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    async with door(tmp_path) as client:
        for more, status in (({}, 200), ({"stream": True}, 200), ({"max_tokens": 0}, 400)):
            mine = {"X-Request-Id": "mine-1"}
            async with client.http.post(f"{client.url}/v1/messages", json=body | more, headers=mine) as answer:
                assert (answer.status, answer.headers.get("request-id")) == (status, "mine-1")
        async with client.http.post(f"{client.url}/v1/messages/count_tokens", json=body) as answer:
            assert answer.headers["request-id"] == answer.headers["x-request-id"]
        async with client.http.post(f"{client.url}/v1/completions", json=completion()) as answer:
            assert "request-id" not in answer.headers


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("completions", b"{", 400, "no JSON"),
        ("completions", b"[]", 400, "Expected `object`"),
        ("completions", b'"\xff"', 400, "JSON"),
        ("completions", {}, 400, "no prompt"),
        ("completions", {"prompt": []}, 400, "empty list"),
        ("completions", {"prompt": ""}, 400, "empty"),
        ("completions", {"prompt": [1, "a"]}, 400, "'a'"),
        ("completions", {"prompt": [1_000]}, 400, "999"),
        ("completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        ("completions", {"prompt": "x", "max_tokens": "many"}, 400, "$.max_tokens"),
        ("completions", {"prompt": "x", "temperature": -1}, 400, "temperature"),
        ("completions", {"prompt": "x", "temperature": 1e300}, 400, "temperature"),
        ("completions", {"prompt": "x", "top_p": 0}, 400, "top_p"),
        ("completions", {"prompt": "x", "top_k": -2}, 400, "top_k"),
        ("completions", {"prompt": "x", "n": 0}, 400, "n is 0"),
        ("completions", {"prompt": "x", "n": 129}, 400, "n is 129"),
        ("completions", {"prompt": "x", "stop": list("abcdefghijklmnopq")}, 400, "stop"),
        ("completions", {"prompt": "x", "logprobs": 21}, 400, "logprobs"),
        ("completions", {"prompt": "x", "model": "gpt-5"}, 404, "gpt-5"),
        ("completions", {"prompt": "x", "presence_penalty": 3}, 400, "presence_penalty"),
        ("completions", {"prompt": "x", "repetition_penalty": 0}, 400, "repetition_penalty"),
        ("completions", {"prompt": "x", "repetition_penalty": 1e-45}, 400, "repetition_penalty"),
        ("completions", {"prompt": "x", "repetition_penalty": 3e38}, 400, "repetition_penalty"),
        ("completions", {"prompt": "x", "logit_bias": {"5": 101}}, 400, "logit_bias"),
        ("completions", {"prompt": "x", "logit_bias": {"1000": 1}}, 400, "logit_bias"),
        ("completions", {"prompt": "x", "logit_bias": {"five": 1}}, 400, "logit_bias"),
        ("completions", {"prompt": "x", "allowed_token_ids": [1000]}, 400, "allowed_token_ids"),
        ("completions", {"prompt": "x", "min_tokens": 20, "max_tokens": 10}, 400, "min_tokens"),
        ("completions", {"prompt": "x", "bad_words": [" "]}, 400, "bad_words"),
        ("completions", {"prompt": "x", "response_format": {"type": "xml"}}, 400, "response_format"),
        ("completions", {"prompt": "x", "guided_json": {}}, 400, "structured_outputs.json"),
        ("completions", {"prompt": "x", "use_beam_search": True, "stream": True}, 400, "use_beam_search"),
        ("completions", {"prompt": "x", "use_beam_search": True, "presence_penalty": 1}, 400, "beam search"),
        ("chat/completions", {"messages": [USER], "use_beam_search": True}, 400, "max_tokens"),
        ("completions", {"prompt": "x", "use_beam_search": True, "n": 65}, 400, "beams"),
        ("completions", {"prompt": "x", "n": 3, "best_of": 2}, 400, "best_of is 2"),
        ("completions", {"prompt": "x", "length_penalty": 2}, 400, "length_penalty"),
        ("completions", {"prompt": "x", "use_beam_search": True, "length_penalty": 6e4}, 400, "length_penalty"),
        ("completions", {"prompt": "x", "priority": 2**40}, 400, "priority"),
        ("completions", {"prompt": [5] * 5_000}, 400, "context"),
        ("completions", {"prompt": ["x"] * 3_000}, 400, "3000 prompts"),
        ("completions", {"prompt": ["x"] * 100, "n": 100}, 400, "outputs"),
        ("completions", {"prompt": "x", "allowed_token_ids": [1] * 340_000}, 413, "bytes"),
        ("completions", {"prompt": "x", "logit_bias": {str(token): 0 for token in range(1_025)}}, 400, "logit_bias"),
        ("completions", {"prompt": "x", "stop_token_ids": [1] * 1_001}, 400, "stop_token_ids"),
        ("chat/completions", {"messages": []}, 400, "messages is empty"),
        ("completions", {"prompt": [1, 2], "prompt_logprobs": 21}, 400, "prompt_logprobs is 21"),
        ("completions", {"prompt": [1, 2], "prompt_logprobs": 1, "stream": True}, 400, "stream"),
        ("chat/completions", {"messages": [{"content": "x"}]}, 400, "messages[0].role"),
        ("chat/completions", {"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content"),
        ("chat/completions", {"messages": [USER | {"content": [IMAGE]}]}, 400, "image_url"),
        ("chat/completions", {"messages": [USER], "top_logprobs": 2}, 400, "logprobs"),
        ("chat/completions", {"messages": [USER], "chat_template": "{{ x }}"}, 400, "api.trust_request_chat_template"),
    ],
)
async def test_what_is_wrong_with_a_request_is_named(
    tmp_path: Path, path: str, body: Any, status: int, says: str
) -> None:
    async with door(tmp_path, workers=0) as client:
        data = body if isinstance(body, bytes) else json.dumps(body)
        async with client.http.post(f"{client.url}/v1/{path}", data=data) as answer:
            error = (await answer.json())["error"]
            assert answer.status == status, error
            assert error["code"] == ("context_length_exceeded" if says == "context" else status)
            assert says in error["message"]
            assert set(error) == {"message", "type", "param", "code"}


async def test_an_error_names_the_field_that_the_client_sent(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "x"}]
    schema = {"type": "json_schema", "schema": {"type": "string", "not": {}}}
    chat, response = {"messages": messages}, {"input": messages}
    async with door(tmp_path, workers=0) as client:
        for path, body, field in (
            ("completions", {"prompt": "x", "max_tokens": 0}, "max_tokens"),
            ("chat/completions", chat | {"max_tokens": 0}, "max_tokens"),
            ("chat/completions", chat | {"max_completion_tokens": 0}, "max_completion_tokens"),
            ("chat/completions", chat | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
            ("chat/completions", {"messages": []}, "messages"),
            ("responses", {"input": []}, "input"),
            ("responses", response | {"max_output_tokens": 0}, "max_output_tokens"),
            ("responses", response | {"text": {"format": schema}}, "text.format"),
            ("messages", chat | {"max_tokens": 4, "stop_sequences": [""]}, "stop_sequences"),
            ("messages", chat | {"max_tokens": 4, "tools": [{"name": "f", "input_schema": {}}] * 2}, "tools[1].name"),
            ("messages", chat | {"max_tokens": 4, "output_config": {"format": schema}}, "output_config.format"),
        ):
            status, answer, _ = await client.post(f"/v1/{path}", body)
            error = answer["error"]
            assert (status, error["message"].startswith(field)) == (400, True), answer
            assert path == "messages" or error["param"] == field, answer


async def test_log_probabilities_of_the_prompt(tmp_path: Path) -> None:
    async with door(tmp_path) as client:
        plain = await client.complete()
        assert "prompt_logprobs" not in plain["choices"][0]
        scored = await client.complete(prompt_logprobs=2, n=2)
        for choice in scored["choices"]:
            first, *others = choice["prompt_logprobs"]
            assert first is None
            assert len(others) == len(PROMPT) - 1
            for at, entry in enumerate(others, start=1):
                assert entry[str(PROMPT[at])] == {
                    "logprob": -at / 8, "rank": at, "decoded_token": TOKENIZER.text_of(PROMPT[at])
                }  # fmt: skip
                assert entry["2"]["rank"] == 2
        assert scored["choices"][0]["text"] == plain["choices"][0]["text"]
        status, answer, _ = await client.post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "ab"}], "prompt_logprobs": 0}
        )
        assert status == 200, answer
        assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


async def test_echo_with_log_probabilities_has_those_of_the_prompt(tmp_path: Path) -> None:
    """What lm-eval asks for: the prompt's tokens, then the output's, in one list."""
    async with door(tmp_path) as client:
        (choice,) = (await client.complete(echo=True, logprobs=1, max_tokens=2))["choices"]
        logprobs = choice["logprobs"]
        output = expected(SEED, len(PROMPT), 2)[0]
        assert logprobs["tokens"] == [TOKENIZER.text_of(token) for token in (*PROMPT, *output)]
        assert logprobs["token_logprobs"] == [None, *(-at / 8 for at in range(1, len(PROMPT) + 2))]
        assert logprobs["top_logprobs"][0] is None
        assert logprobs["top_logprobs"][1] == {TOKENIZER.text_of(1): -0.25}
        assert logprobs["text_offset"][-1] == len("".join(logprobs["tokens"][:-1]))
        assert choice["text"] == TOKENIZER.decode(PROMPT) + text_of(count=2)
        events = await client.events(
            "/v1/completions", completion(echo=True, logprobs=1, max_tokens=2, stream=True, n=2)
        )
        for index in (0, 1):
            parts = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
            assert [value for part in parts for value in (part["logprobs"] or logprobs | {"tokens": []})["tokens"]][
                : len(PROMPT)
            ] == logprobs["tokens"][: len(PROMPT)]
            assert "".join(part["text"] for part in parts).startswith(TOKENIZER.decode(PROMPT))


async def test_echo_without_output(tmp_path: Path) -> None:
    async with door(tmp_path) as client:
        answer = await client.complete(echo=True, logprobs=0, max_tokens=0)
        (choice,) = answer["choices"]
        assert choice["text"] == TOKENIZER.decode(PROMPT)
        assert len(choice["logprobs"]["tokens"]) == len(PROMPT)
        assert answer["usage"]["completion_tokens"] == 0
        for wrong in ({"max_tokens": 0}, {"max_tokens": 0, "echo": True, "stream": True}):
            assert (await client.post("/v1/completions", completion(**wrong)))[0] == 400


async def test_neutral_and_unknown_fields_change_nothing(tmp_path: Path) -> None:
    neutral = {
        "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1, "logit_bias": {}, "min_tokens": 0,
        "best_of": 1, "use_beam_search": False, "response_format": {"type": "text"}, "suffix": None, "stop": None,
        "user": "me", "some_new_field": [1], "top_k": -1, "stream_options": None,
    }  # fmt: skip
    async with door(tmp_path) as client:
        assert (await client.complete(**neutral))["choices"][0]["text"] == text_of()


async def test_without_a_worker_readiness_says_so(tmp_path: Path) -> None:
    async with door(tmp_path, workers=0) as client:
        assert (await client.get("/live"))[0] == 200
        status, answer = await client.get("/ready")
        assert (status, answer["error"]["message"]) == (503, "no decode worker is live")


async def test_vllms_metrics_add_up(tmp_path: Path) -> None:
    async with door(tmp_path) as client:
        for _ in range(2):
            await client.complete()
        async with client.http.get(f"{client.url}/metrics") as page:
            families = {family.name: family for family in text_string_to_metric_families(await page.text())}

        def total(name: str) -> float:
            return sum(s.value for s in families[f"vllm:{name}"].samples if s.name.endswith("_total"))

        for name in ("prompt_tokens", "prompt_tokens_by_source", "prefix_cache_queries"):
            assert total(name) == 2 * len(PROMPT), name
        assert total("request_success") == 2
        (sample, *_) = families["vllm:generation_tokens"].samples
        assert sample.labels == {"model_name": "small", "engine": "0"}
        for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"):
            (count,) = [s.value for s in families[f"vllm:{name}"].samples if s.name.endswith("_count")]
            assert count > 0
        assert "vllm:num_requests_running" in families
        assert "vllm:cache_config_info" in families


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_frees_everything(tmp_path: Path, stream: bool) -> None:
    async with door(tmp_path) as client:
        body = completion(max_tokens=2_000, ignore_eos=True, stream=stream, n=3)
        with contextlib.suppress(asyncio.TimeoutError):
            async with asyncio.timeout(0.5), client.http.post(f"{client.url}/v1/completions", json=body) as answer:
                await answer.read()
        processes = client.router.cluster.processes.values()
        await eventually_async(lambda: not any(process.sequences for process in processes))


async def test_a_router_that_stops_lets_streams_end_and_takes_no_more(tmp_path: Path) -> None:
    async with door(tmp_path, shutdown_timeout_ms=60_000) as client:
        client.router.step_seconds = 0.02
        fields = completion(max_tokens=60, ignore_eos=True)
        running = asyncio.create_task(client.complete(**fields))
        processes = client.router.cluster.processes.values()
        await eventually_async(lambda: any(process.sequences for process in processes))
        client.router.stop.set()
        await becomes(lambda: ready(client), False)
        status, answer, _ = await client.post("/v1/completions", completion())
        assert (status, "the router is stopping" in answer["error"]["message"]) == (503, True)
        assert (await client.get("/live"))[0] == 200
        whole = await running
        assert whole["usage"]["completion_tokens"] == 60


async def test_small_segments_are_sent_at_once() -> None:
    """asyncio switches Nagle's algorithm off only for sockets that say that they are TCP: without it, the first token
    of a second request on a connection took 20 ms longer."""
    with await FixedPort("api.port", "127.0.0.1", 0).listener() as listener:
        no_delay: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            peer = writer.get_extra_info("socket")
            no_delay.set_result(peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        async with await asyncio.start_server(connected, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            assert await no_delay
            writer.close()


# --- Anthropic's Messages and OpenAI's Responses ----------------------------------------------------------------------


def named_events(raw: str) -> list[tuple[str, Any]]:
    result: list[tuple[str, Any]] = []
    *events, rest = raw.split("\n\n")
    assert rest == ""
    for event in events:
        name, data = event.split("\n")
        result.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        assert result[-1][1]["type"] == result[-1][0]
    return result


async def stream_of(client: Door, path: str, body: Any) -> list[tuple[str, Any]]:
    async with client.http.post(client.url + path, json=body | {"stream": True}) as answer:
        assert answer.status == 200, await answer.text()
        return named_events((await answer.read()).decode())


async def test_anthropics_messages(tmp_path: Path) -> None:
    body = {
        "model": "small",
        "max_tokens": 12,
        "temperature": 0,
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
    }
    prompt = len(TOKENIZER.encode("<s>[system]Be brief.[user]Hello[assistant]", special_tokens=False))
    async with door(tmp_path) as client:
        status, answer, _ = await client.post("/v1/messages", body)
        assert status == 200, answer
        assert (answer["type"], answer["role"]) == ("message", "assistant")
        usage = answer["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == prompt
        ended = answer["stop_reason"] == "end_turn"  # perhaps with the last token
        assert ended or (answer["stop_reason"], usage["output_tokens"]) == ("max_tokens", 12)
        events = await stream_of(client, "/v1/messages", body)
        names = [name for name, _ in events]
        assert names[:3] == ["message_start", "ping", "content_block_start"]
        assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        assert set(names[3:-3]) <= {"content_block_delta"}  # the seed is drawn, and may end the output at once
        assert events[0][1]["message"]["content"] == []
        assert events[-2][1]["usage"]["output_tokens"] > 0
        inside = body | {"system": None}
        inside["messages"] = [{"role": "system", "content": "Be brief."}, *body["messages"]]
        _, same, _ = await client.post("/v1/messages", inside)
        total = same["usage"]["input_tokens"] + same["usage"]["cache_read_input_tokens"]
        assert total == prompt


async def test_anthropics_stop_sequence(tmp_path: Path) -> None:
    async with door(tmp_path) as client:
        messages = [{"role": "user", "content": "Hello"}]
        prompt = len(TOKENIZER.encode("<s>[user]Hello[assistant]", special_tokens=False))
        likely = "".join(text_of(seed, prompt, 64) for seed in range(100))
        stops = [character for character, _ in Counter(likely).most_common(16)]
        body = {"max_tokens": 64, "messages": messages, "stop_sequences": stops}
        ended = [(await client.post("/v1/messages", body))[1] for _ in range(40)]  # seeds are drawn; two in five stop
        assert any(answer["stop_reason"] == "stop_sequence" for answer in ended)
        for answer in ended:
            assert not set(stops) & set(answer["content"][0]["text"])
            assert (answer["stop_sequence"] is not None) == (answer["stop_reason"] == "stop_sequence")


async def test_anthropics_errors(tmp_path: Path) -> None:
    fine = {"messages": [USER], "max_tokens": 5}
    async with door(tmp_path, workers=0) as client:
        for body, status, says in (
            ({"messages": []}, 400, "max_tokens"),
            (fine | {"messages": []}, 400, "messages is empty"),
            (fine | {"model": "no"}, 404, "no"),
            (fine | {"messages": [USER | {"content": [{"type": "image"}]}]}, 400, "'image'"),
            (fine | {"thinking": {"type": "on"}}, 400, "thinking"),
        ):
            got, answer, _ = await client.post("/v1/messages", body)
            kind = {400: "invalid_request_error", 404: "not_found_error"}[status]
            assert (got, answer["type"], answer["error"]["type"]) == (status, "error", kind)
            assert says in answer["error"]["message"]


async def test_openais_responses(tmp_path: Path) -> None:
    prompt = len(TOKENIZER.encode("<s>[system]Be brief.[user]Hello[assistant]", special_tokens=False))
    body = {"instructions": "Be brief.", "input": "Hello", "max_output_tokens": 12, "seed": SEED}
    async with door(tmp_path) as client:
        status, answer, _ = await client.post("/v1/responses", body)
        assert status == 200, answer
        (item,) = answer["output"]
        assert item["content"][0]["text"] == text_of(prompt=prompt)
        assert answer["usage"]["input_tokens"] == prompt
        assert answer["status"] == item["status"]
        events = await stream_of(client, "/v1/responses", body)
        names = [name for name, _ in events]
        assert names[:4] == [
            "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"
        ]  # fmt: skip
        assert names[-1] == f"response.{answer['status']}"
        assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
        text = "".join(data["delta"] for name, data in events if name == "response.output_text.delta")
        assert text == text_of(prompt=prompt) == events[-1][1]["response"]["output"][0]["content"][0]["text"]
        items = [
            {"type": "message", "role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        ]
        _, same, _ = await client.post("/v1/responses", {"input": items, "max_output_tokens": 12, "seed": SEED})
        assert same["output"][0]["content"][0]["text"] == text_of(prompt=prompt)
        for field, value in (("store", True), ("previous_response_id", "resp_1"), ("background", True)):
            status, answer, _ = await client.post("/v1/responses", body | {field: value})
            assert (status, answer["error"]["param"]) == (400, field)
