"""The protocol between the run and the process of a peer: a line of JSON for each job, a line of JSON for its answer.

The process says `{"ready": true}` when it can take jobs. A job is `{"prompts": [[ids], …], "count": n}`: all prompts
are submitted at once, and greedy decoding generates exactly `n` tokens for each, whatever they are. The answer is
`{"seconds": s, "tokens": [[ids], …]}`, from the submission to the last token of all. Closing the pipe ends the process.

Only the standard library: this file is read by the Python of each peer's own environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

_ROOT = Path(__file__).resolve().parent.parent.parent

Tokens = list[list[int]]
Generate = Callable[[Tokens, int], Tokens]
"""Prompts, and how many tokens each shall get → those tokens."""


class PeerFailed(Exception):
    """A peer ended, or did something else than it was asked for."""


@dataclass(frozen=True)
class Answer:
    """How long a job took, in seconds, and what came out."""

    seconds: float
    tokens: Tokens


def serve(load: Callable[[], Generate]) -> None:
    """A peer's process: load it, then do what comes in on stdin."""

    def loaded() -> Callable[[Tokens, int], dict[str, Any]]:
        generate = load()
        return lambda prompts, count: {"tokens": generate(prompts, count)}

    serve_answers(loaded)


def serve_answers(load: Callable[[], Callable[[Tokens, int], dict[str, Any]]]) -> None:
    """The same, where what is loaded returns the whole answer but for the seconds."""
    answers = only_answers()
    run = load()
    print('{"ready": true}', file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        begun = time.perf_counter()
        answer = run(job["prompts"], job["count"])
        print(json.dumps({"seconds": time.perf_counter() - begun, **answer}), file=answers, flush=True)


def only_answers() -> TextIO:
    """Return this process's stdout for its answers. All else that is printed goes to stderr from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


class PeerProcess:
    """A process that answers each line of JSON with one. It ends with this object."""

    def __init__(self, name: str, command: Sequence[str], variables: Mapping[str, str]) -> None:
        """`variables` are the whole environment of the process. Raises PeerFailed."""
        self.name = name
        self._process = subprocess.Popen(
            command, cwd=_ROOT, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid
        try:
            self.hello = self._answer()  # what it says when it can take jobs
        except PeerFailed:
            self.close()
            raise

    def ask(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a job. Raises PeerFailed."""
        assert self._process.stdin is not None
        try:
            print(json.dumps(job), file=self._process.stdin, flush=True)
        except BrokenPipeError as error:
            raise PeerFailed(f"{self.name} ended; its reason stands above") from error
        return self._answer()

    def close(self) -> None:
        self._process.communicate()  # closes its stdin, which ends it

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerFailed(f"{self.name} ended; its reason stands above")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Peer(PeerProcess):
    """The other end of `serve`."""

    def generate(self, prompts: Tokens, count: int) -> Answer:
        """Raises PeerFailed, also where an answer does not have exactly the tokens that were asked for."""
        reply = self.ask({"prompts": prompts, "count": count})
        answer = Answer(reply["seconds"], reply["tokens"])
        if [len(tokens) for tokens in answer.tokens] != [count] * len(prompts):
            raise PeerFailed(f"{self.name} did not generate {count} tokens for each of {len(prompts)} prompts")
        return answer
