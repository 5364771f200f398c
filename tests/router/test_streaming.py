"""Server-sent events before the first token, in gaps, and where the router stops."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from router.frontend.api import streaming
from router.frontend.api.prompts import PromptBuilder
from tests.router import model
from tests.router.processes import Process
from tests.router.test_api import completion, door

pytestmark = pytest.mark.slow

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "seed": 4, "max_tokens": 12, "ignore_eos": True}
MESSAGES = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12}
RESPONSES = {"input": "Hi", "seed": 4, "max_output_tokens": 12, "ignore_eos": True}
COMMENT = ": keep-alive"
PING = 'event: ping\ndata: {"type":"ping"}'
DOORS = [
    ("completions", completion(ignore_eos=True), [], COMMENT),
    ("completions", completion(ignore_eos=True, n=3), [], COMMENT),
    ("chat/completions", CHAT, ["chat.completion.chunk"], COMMENT),
    ("messages", MESSAGES, ["message_start", "ping"], PING),
    ("responses", RESPONSES, ["response.created", "response.in_progress"], COMMENT),
]


class HeldSteps:
    """Workers that take requests and make no token while they are held."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held = True
        step = Process.step
        monkeypatch.setattr(model, "token_at", lambda seed, position: 20 + position % 40)
        monkeypatch.setattr(Process, "step", lambda process: None if self.held else step(process))


async def next_event(stream: Any) -> str:
    event = (await asyncio.wait_for(stream.readuntil(b"\n\n"), 20)).decode()
    assert event, "the stream has ended"
    return event.removesuffix("\n\n")


@pytest.mark.parametrize(("path", "body", "opening", "sign"), DOORS)
async def test_a_stream_answers_before_its_first_token_and_lives_in_gaps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: Any, opening: list[str], sign: str
) -> None:
    workers = HeldSteps(monkeypatch)
    monkeypatch.setattr(streaming, "ALIVE_SECONDS", 0.05)
    async with door(tmp_path) as client:
        client.router.step_seconds = 0.02
        url = f"{client.url}/v1/{path}"
        async with client.http.post(url, json=body | {"stream": True}) as answer:  # the status is here
            assert answer.status == 200
            for kind in opening:
                event = json.loads((await next_event(answer.content)).split("data: ")[1])
                assert kind in (event.get("type"), event.get("object"))
            for _ in range(3):
                assert await next_event(answer.content) == sign
            workers.held = False
            events = [await next_event(answer.content) for _ in range(4)]
            workers.held = True
            while (event := await next_event(answer.content)) != sign:
                events.append(event)
            workers.held = False
            rest = [event for event in (await answer.text()).split("\n\n") if event != sign]
        assert any("data: " in event for event in events)
        if path == "completions" and "n" not in body:
            events = [json.loads(event[6:]) for event in (*events, *rest) if "{" in event]
            text = "".join(event["choices"][0]["text"] for event in events)
            assert text == (await client.complete(ignore_eos=True))["choices"][0]["text"]


async def test_a_stream_that_is_refused_at_once_has_a_status(tmp_path: Path) -> None:
    async with door(tmp_path) as client:
        for path, body, _, _ in DOORS[:3]:
            status, _, headers = await client.post(f"/v1/{path}", body | {"stream": True, "max_tokens": 5_000})
            assert (status, headers["baton-reason"]) == (400, "context_too_long")


@pytest.mark.parametrize(("path", "body", "opening", "sign"), DOORS)
async def test_a_stream_of_a_router_that_stops_ends_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: Any, opening: list[str], sign: str
) -> None:
    HeldSteps(monkeypatch)
    async with door(tmp_path) as client:
        async with client.http.post(f"{client.url}/v1/{path}", json=body | {"stream": True}) as answer:
            for _ in opening:
                await next_event(answer.content)
            client.router.stop.set()
            *_, last, rest = [event for event in (await answer.text()).split("\n\n") if event != "data: [DONE]"]
        assert rest == ""
        error = json.loads(last.split("data: ")[1])
        match path:
            case "messages":
                assert last.startswith("event: error\n")
                assert (error["type"], error["error"]["type"]) == ("error", "overloaded_error")
            case "responses":
                assert last.startswith("event: error\n")
                assert (error["type"], error["code"], error["sequence_number"]) == ("error", "unavailable", 2)
            case _:
                assert error["error"]["code"] == 503


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
async def test_a_request_that_is_being_prepared_when_the_router_stops_has_a_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    (body,) = [body for other, body, _, _ in DOORS if other == path]
    preparing = asyncio.Event()

    async def of_chat(*_: Any) -> Any:
        preparing.set()
        await asyncio.sleep(600)

    monkeypatch.setattr(PromptBuilder, "of_chat", of_chat)
    async with door(tmp_path) as client:
        post = asyncio.create_task(client.post(f"/v1/{path}", body))
        await preparing.wait()
        client.router.stop.set()
        status, answer, headers = await post
        assert (status, headers["baton-reason"]) == (503, "unavailable")
        assert "router" in answer["error"]["message"]
