"""Recorded agent sessions on a real cluster, through /v1/chat/completions and /v1/messages: reuse and first tokens.

    python -m bench.cluster.agents traces/agentic_*.jsonl --prefill 2 --decode 2
    python -m bench.cluster.agents traces/agentic_firefox.jsonl --doors messages --time-scale 0.1

Lengths are scaled so that the longest prompt fits the model's context. Text is words drawn from a seed, and answers are
the model's. A turn follows the answer to the one before, after its gap times `--time-scale`. `reuse` is the share of
prompt tokens that came from caches. Its limit counts the whole pages that an earlier prompt of the run began with. The
warm round sends every session again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from baton.config import parse_override
from baton.errors import BatonError, Unavailable
from bench import clusters, models, report
from deploy.models import DEMO_MODEL
from simulator import mooncake
from simulator.mooncake import BLOCK, TraceLine
from simulator.sessions import common_blocks, recordings, tokens_of_parent

_DOORS = {"chat": "/v1/chat/completions", "messages": "/v1/messages"}
_VERSION = {"anthropic-version": "2023-06-01"}
_SLACK = 64  # tokens by which a recording's template may end otherwise than the next turn goes on
_ROOM = 0.9  # of the context, for the longest prompt and its answer: the lengths of texts are estimates
_FRAME = 16  # tokens of a template around the messages of a turn, which do not scale
_WORDS = ("page", "prompt", "session", "waits", "tool", "answer", "router", "store", "reads", "keeps", "next", "file")


@dataclass(frozen=True)
class Message:
    """One message of a conversation, and where it ends in the recording, in tokens."""

    role: str
    content: str
    end: int


@dataclass(frozen=True)
class Turn:
    session: str
    ttft: float
    prompt: int  # tokens
    cached: int
    possible: int


class Pages:
    """The whole pages of all prompts that were answered, each with everything before it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._known: set[int] = set()

    def count(self, tokens: Sequence[int]) -> int:
        """Return how many tokens of a prompt are in whole pages that are known; the last token is always computed."""
        chain = self._chain(tokens)
        return self._size * next((i for i, page in enumerate(chain) if page not in self._known), len(chain))

    def add(self, tokens: Sequence[int]) -> None:
        self._known.update(self._chain(tokens))

    def _chain(self, tokens: Sequence[int]) -> list[int]:
        pages, before = [], 0
        for begin in range(0, len(tokens) - self._size, self._size):
            before = hash((before, *tokens[begin : begin + self._size]))
            pages.append(before)
        return pages


class Player:
    def __init__(
        self, http: aiohttp.ClientSession, url: str, door: str, pages: Pages, scale: float, pace: float
    ) -> None:
        self._http, self._url, self._door = http, url, door
        self._pages, self._scale, self._pace = pages, scale, pace
        self._per_word = 1.0

    async def calibrate(self) -> None:
        """Learn how many tokens a word has."""
        count = 500
        tokens = await self._tokens([Message("user", self._text(random.Random(0), count), 0)])
        self._per_word = len(tokens) / count

    async def play(
        self, turns: Sequence[TraceLine], common: set[int], seed: int, room: asyncio.Semaphore
    ) -> list[Turn]:
        """Play one session when there is room. Raises Unavailable."""
        own, shared = random.Random(f"{turns[0].session} {seed}"), random.Random(seed)
        prompts: list[list[Message]] = []
        outcomes: list[Turn] = []
        async with room:
            for place, turn in enumerate(turns):
                if place:
                    await asyncio.sleep((turn.after_ms or 0.0) / 1_000 * self._pace)
                if turn.parent >= 0:
                    history = self._continued(prompts[turn.parent], turns, place)
                else:
                    known = BLOCK * sum(block in common for block in turn.hash_ids[: turn.input_length // BLOCK])
                    history = [Message("system", self._text(shared, self._words(known)), known)] if known else []
                new = turn.input_length - (history[-1].end if history else 0)
                history.append(Message("user", self._text(own, self._words(new)), turn.input_length))
                count = max(1, round(turn.output_length * self._scale))
                answer, outcome = await self._ask(turns[0].session, history, count)
                outcomes.append(outcome)
                end = turn.input_length + max(1, turn.output_length)
                prompts.append([*history, Message("assistant", answer.strip() or "ok", end)])
        return outcomes

    @staticmethod
    def _continued(before: list[Message], turns: Sequence[TraceLine], place: int) -> list[Message]:
        """Return the messages of the parent that a turn begins with: all of them, or those that it shares."""
        if turns[place].shared >= turns[turns[place].parent].input_length - _SLACK:
            return before[:]
        return [message for message in before if message.end <= tokens_of_parent(turns, place)]

    def _words(self, tokens: int) -> int:
        return max(1, round(tokens * self._scale / self._per_word))

    @staticmethod
    def _text(rng: random.Random, words: int) -> str:
        return " ".join(rng.choices(_WORDS, k=words))

    async def _tokens(self, messages: Sequence[Message]) -> list[int]:
        body = {"messages": [{"role": each.role, "content": each.content} for each in messages]}
        return (await self._post("/tokenize", body))["tokens"]

    async def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        async with self._http.post(self._url + path, json=body) as response:
            if response.status != 200:
                raise Unavailable(f"{path} answers {response.status}: {(await response.text())[:500]}")
            return await response.json()

    async def _ask(self, session: str, messages: list[Message], count: int) -> tuple[str, Turn]:
        tokens = await self._tokens(messages)
        possible = self._pages.count(tokens)
        sent = [{"role": each.role, "content": each.content} for each in messages]
        body: dict[str, Any] = {"model": "agents", "messages": sent, "max_tokens": count, "stream": True}
        body["temperature"] = 0
        if self._door == "messages" and sent[0]["role"] == "system":
            body |= {"system": sent[0]["content"], "messages": sent[1:]}
        if self._door == "chat":
            body["stream_options"] = {"include_usage": True}
        began, first, text, cached = time.perf_counter(), 0.0, "", 0
        async with self._http.post(self._url + _DOORS[self._door], json=body, headers=_VERSION) as response:
            if response.status != 200:
                raise Unavailable(f"{self._door} answers {response.status}: {(await response.text())[:500]}")
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise Unavailable(f"{self._door} ended a stream: {event['error']}")
                piece, usage = (_chat if self._door == "chat" else _anthropic)(event)
                if piece and not first:
                    first = time.perf_counter()
                text += piece
                cached = usage if usage is not None else cached
        self._pages.add(tokens)
        return text, Turn(session, (first or time.perf_counter()) - began, len(tokens), cached, possible)


def _chat(event: Mapping[str, Any]) -> tuple[str, int | None]:
    """Return the text and the cached tokens that an event brings."""
    usage = event.get("usage")
    text = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    return text, usage["prompt_tokens_details"]["cached_tokens"] if usage else None


def _anthropic(event: Mapping[str, Any]) -> tuple[str, int | None]:
    usage = event.get("usage")
    return event.get("delta", {}).get("text") or "", usage["cache_read_input_tokens"] if usage else None


async def measure(url: str, context: int, page: int, lines: Sequence[TraceLine], arguments: argparse.Namespace) -> None:
    """Play all sessions, several at a time, and print the figures. Raises Unavailable."""
    sessions = recordings(lines)
    common = common_blocks(sessions)
    longest = max(line.input_length + line.output_length for line in lines)
    room = context - _FRAME * max(map(len, sessions))
    scale = arguments.length_scale or min(1.0, _ROOM * room / longest)
    report.say(f"{len(sessions)} sessions, {len(lines)} turns, lengths x{scale:.3g}")
    timeout = aiohttp.ClientTimeout(total=arguments.timeout)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        for seed, door in enumerate(arguments.doors, arguments.seed):
            player = Player(http, url, door, Pages(page), scale, arguments.time_scale)
            await player.calibrate()
            users = asyncio.Semaphore(arguments.users)
            for when in ("cold", "warm"):
                played = await asyncio.gather(*(player.play(turns, common, seed, users) for turns in sessions))
                for turns in played:
                    _emit(f"{door}, {when}, {turns[0].session}", turns)
                _emit(f"{door}, {when}, all", [turn for turns in played for turn in turns])


def _emit(case: str, turns: Sequence[Turn]) -> None:
    prompts = sum(turn.prompt for turn in turns)
    reuse, limit = (sum(each) / prompts for each in ([t.cached for t in turns], [t.possible for t in turns]))
    if limit:
        report.emit(report.judged(report.beside("agents", f"{case}: reuse", "ratio", [reuse], [limit]), 0.98, "high"))
    for percentile in (50, 90, 99):
        ttft = float(np.percentile([turn.ttft for turn in turns], percentile))
        report.emit(report.Result("agents", f"{case}: TTFT p{percentile}", ttft * 1_000, "ms"))


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    try:
        lines = [line for path in arguments.traces for line in mooncake.read_trace(path)]
        model = models.directory(arguments.model)
        context = json.loads((model / "config.json").read_text())["max_position_embeddings"]
        settings = dict(map(parse_override, arguments.settings)) | {"model.served_model_name": "agents"}
        cluster = clusters.local(model, arguments.prefill, arguments.decode, settings, patience=300.0)
        report.say(report.machine())
        with cluster:
            url = f"http://{cluster.api_of('router')}"
            asyncio.run(measure(url, context, cluster.config.pages.page_size, lines, arguments))
    except BatonError as error:
        report.say(f"agents: {error}")
        return 1
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("traces", type=Path, nargs="+", help="recorded sessions, JSON lines")
    add(
        "--model",
        default=str(DEMO_MODEL),
        help="the directory of a checkpoint with a chat template (default the demo's)",
    )
    add("--prefill", type=int, default=2, metavar="N", help="prefill workers; 0 is the colocated mode")
    add("--decode", type=int, default=2, metavar="N", help="decode workers")
    add("--set", dest="settings", action="append", default=[], metavar="SECTION.SETTING=VALUE")
    add("--doors", nargs="+", default=list(_DOORS), choices=_DOORS)
    add("--users", type=int, default=4, help="sessions at a time")
    add("--length-scale", type=float, help="multiplies lengths; by default the longest prompt fits the context")
    add("--time-scale", type=float, default=0.0, metavar="X", help="multiplies the gaps between turns")
    add("--timeout", type=float, default=300.0, metavar="S", help="a request may take so long")
    add("--seed", type=int, default=1)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
