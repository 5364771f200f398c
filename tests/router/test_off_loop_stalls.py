"""Work in proportion to a body never runs on the router's event loop, whatever the body holds.

Each of the largest bodies that the doors take is sent to a router. Each turn of its loop is measured in processor time
of the loop's own thread, so that other work of the machine does not count.
"""

import asyncio
import gc
import http.client
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.v1 import generation_pb2 as pb
from baton.v1 import generation_pb2_grpc
from tests.router import model, served
from tests.router.served import Served, settings_for
from tests.support.machine_speed import slowness

pytestmark = pytest.mark.slow

LONGEST = 0.05  # seconds of a turn, on the machine of `machine_speed`
CONTEXT = 131_072
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
WORDS = "the quick brown fox jumps over the lazy dog "


@dataclass
class Turns:
    """The longest turns of the loop, but those of the workers that the tests simulate in it."""

    longest: float = 0.0  # seconds
    what: str = ""


@contextmanager
def measured() -> Iterator[Turns]:
    turns, run, collecting = Turns(), asyncio.events.Handle._run, [0.0, 0.0]

    def collected(phase: str, info: dict[str, int]) -> None:
        """Python's collector goes through what the simulated workers hold, too, so it does not count."""
        collecting[0], last = time.thread_time(), collecting[0]
        if phase == "stop":
            collecting[1] += collecting[0] - last

    def timed(handle: asyncio.Handle) -> None:
        began, before = time.thread_time(), collecting[1]
        run(handle)
        took = time.thread_time() - began - (collecting[1] - before)
        task = getattr(handle._callback, "__self__", None)
        if took > turns.longest and not (isinstance(task, asyncio.Task) and "Served.work" in repr(task.get_coro())):
            turns.longest, turns.what = took, repr(task)[:200] + repr(handle)[:100]

    asyncio.events.Handle._run = timed  # type: ignore[method-assign]
    gc.callbacks.append(collected)
    try:
        yield turns
    finally:
        gc.callbacks.remove(collected)
        asyncio.events.Handle._run = run  # type: ignore[method-assign]


def chat(**fields: Any) -> tuple[str, Any]:
    return "/v1/chat/completions", {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}], **fields}


def completion(**fields: Any) -> tuple[str, Any]:
    return "/v1/completions", {"max_tokens": 1, "prompt": "x", **fields}


def message(number: int) -> dict[str, str]:
    return {"role": ("user", "assistant")[number % 2], "content": "a"}


def properties(count: int) -> dict[str, Any]:
    return {f"property_{number}": {"type": "string", "description": "d" * 900} for number in range(count)}


def tool(number: int) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties(1), "required": []}
    return {"type": "function", "function": {"name": f"tool_{number}", "parameters": parameters}}


IDS = [20 + number % 900 for number in range(CONTEXT - 8)]
BODIES: dict[str, Callable[[], tuple[str, Any]]] = {
    "messages": lambda: chat(messages=[message(number) for number in range(100_000)]),
    "parts": lambda: chat(
        messages=[{"role": "user", "content": [{"type": "text", "text": "a"} for _ in range(100_000)]}]
    ),
    "anthropic messages": lambda: (
        "/v1/messages", {"max_tokens": 1, "messages": [message(number) for number in range(100_000)]},
    ),
    "count tokens": lambda: ("/v1/messages/count_tokens", {"messages": [message(number) for number in range(100_000)]}),
    "responses items": lambda: (
        "/v1/responses", {"max_output_tokens": 1, "input": [message(number) for number in range(100_000)]},
    ),
    "text": lambda: completion(prompt=WORDS * 5_000),
    "escaped text": lambda: completion(prompt="\u00e9" * 300_000),
    "token ids": lambda: completion(prompt=IDS),
    "n": lambda: completion(prompt=IDS[:500], n=128),
    "n of a long prompt": lambda: completion(prompt=IDS, n=32),
    "best of": lambda: completion(prompt=IDS[:500], best_of=128),
    "beams": lambda: completion(prompt=IDS[:2_000], best_of=64, n=64, use_beam_search=True),
    "prompts": lambda: completion(prompt=["hello world"] * 2_048),
    "prompts that are refused": lambda: completion(prompt=[WORDS * 10] * 2_047 + [WORDS * 40_000]),
    "prompts and n": lambda: completion(prompt=["hello world"] * 16, n=128),
    "short prompts": lambda: completion(prompt=["a"] * 900),
    "bad words": lambda: completion(bad_words=["abcdefghij" * 96 + f"{number:06}" for number in range(1_000)]),
    "fewer bad words": lambda: completion(bad_words=[f"abcdef {number} xyz" for number in range(1_000)]),
    "allowed tokens": lambda: completion(allowed_token_ids=[number % 900 for number in range(2**18)]),
    "allowed tokens of many prompts": lambda: completion(
        prompt=["a"] * 2_000, allowed_token_ids=[number % 900 for number in range(500)]
    ),
    "biases": lambda: completion(logit_bias={str(number % 900): 1 for number in range(1_024)}),
    "far too many biases": lambda: completion(logit_bias={str(number): 1 for number in range(200_000)}),
    "tools": lambda: chat(tools=[tool(number) for number in range(450)], tool_choice="required"),
    "schema": lambda: chat(
        response_format={
            "type": "json_schema", "json_schema": {"schema": {"type": "object", "properties": properties(450)}},
        }
    ),
    "choices": lambda: completion(structured_outputs={"choice": [f"choice {number}" for number in range(10_000)]}),
    "containers": lambda: chat(tools=[{"a": [[] for _ in range(240_000)]}]),
    "unknown members": lambda: completion(unknown=[[] for _ in range(240_000)]),
    "nested": lambda: chat(messages=[{"role": "user", "content": json.loads("[" * 900 + "]" * 900)}] * 100),
    "tokenize": lambda: ("/tokenize", {"prompt": WORDS * 5_000, "return_token_strs": True}),
    "detokenize": lambda: ("/detokenize", {"tokens": IDS}),
    "echo": lambda: completion(prompt=IDS, echo=True, max_tokens=1),
    "token ids in the answer": lambda: completion(prompt=IDS, return_token_ids=True),
}  # fmt: skip


def post(address: str, path: str, body: bytes) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(address, timeout=100)
    try:
        connection.request("POST", path, body)
        answer = connection.getresponse()
        text = answer.read()
        return answer.status, text[:150] if answer.status != 200 else b""
    finally:
        connection.close()


def generate(address: str, request: pb.GenerateRequest) -> None:
    with grpc.insecure_channel(address) as channel:
        for _ in generation_pb2_grpc.GenerationStub(channel).Generate(request, timeout=100):
            pass


def test_no_body_holds_up_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (model, served):
        monkeypatch.setattr(module, "CONTEXT", CONTEXT)
    config = settings_for(tmp_path)
    folder = Path(config.model.path)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    stalls, statuses = dict[str, tuple[float, str]](), dict[str, tuple[int, bytes] | None]()

    async def tried(router: Served, name: str, send: Callable[[], Any]) -> None:
        gc.collect()
        gc.freeze()  # or the collector goes through what the tests before have left
        with measured() as turns:
            statuses[name] = await asyncio.to_thread(send)
        stalls[name] = (turns.longest, turns.what)

    async def test() -> None:
        async with served.served(config) as router:
            router.start("decode", "decode-0", pool_pages=CONTEXT)
            address = router.addresses.api
            for name, make in BODIES.items():
                path, body = make()
                encoded = json.dumps(body).encode()
                await tried(router, name, lambda path=path, encoded=encoded: post(address, path, encoded))
            long = pb.GenerateRequest(token_ids=pb.TokenIds(ids=IDS), max_tokens=1)
            await tried(router, "gRPC", lambda: generate(router.addresses.grpc, long))

    async def main() -> None:
        await asyncio.wait_for(test(), 280)

    asyncio.run(main())
    slower = slowness()
    print(f"slowness {slower:.2f}")
    for name, (took, what) in sorted(stalls.items(), key=lambda each: -each[1][0]):
        print(f"{1_000 * took:7.1f} ms {statuses[name]} {name:32} {what[:300]}")
    assert not {name: stall for name, stall in stalls.items() if stall[0] > LONGEST * slower}
