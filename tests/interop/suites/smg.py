"""smg: a gateway that takes Baton's HTTP API for one engine's, and passes OpenAI's API on."""

import json
import socket

from tests.interop.environment import Environment
from tests.interop.http import RefusedError, get, post
from tests.interop.result import Case, SuiteResult
from tests.interop.target import Target
from tests.support.eventually import eventually

_READY_SECONDS = 60.0
_PROMPTS = ("bonfan korles dimin taras", "nossa ser sosbesken", "kontur")


def run(target: Target, environment: Environment) -> SuiteResult:
    """Start the gateway and compare what comes through it with what Baton says itself."""
    port, log = _free_port(), environment.scratch / "smg.log"
    gateway = f"http://127.0.0.1:{port}"
    argv = [
        environment.program("smg"), "launch", "--worker-urls", target.url,
        "--model-path", str(target.folder), "--host", "127.0.0.1", "--port", str(port),
        "--prometheus-port", str(_free_port()),
    ]  # fmt: skip
    with environment.running(log, *argv):
        try:
            eventually(lambda: _has_model(gateway), what="smg lists a model", seconds=_READY_SECONDS)
        except AssertionError:
            tail = " ".join(log.read_text(errors="replace").splitlines()[-8:])
            return SuiteResult([Case.failed("smg lists a model", tail)])
        (model,) = [card["id"] for card in get(gateway + "/v1/models")["data"]][:1]
        cases = [Case("smg lists a model", "passed")]
        for prompt in _PROMPTS:
            cases += _compared(prompt, target, gateway, model)
    return SuiteResult(cases)


def _compared(prompt: str, target: Target, gateway: str, model: str) -> list[Case]:
    fields = {
        "messages": [{"role": "user", "content": prompt}], "max_tokens": 24, "temperature": 0.0, "ignore_eos": True,
    }  # fmt: skip
    whole, streamed = f"chat: {prompt}", f"streamed chat: {prompt}"
    try:
        right = _text(post(f"{target.url}/v1/chat/completions", fields | {"model": target.model}))
        through = _text(post(f"{gateway}/v1/chat/completions", fields | {"model": model}))
        pieces = post(f"{gateway}/v1/chat/completions", fields | {"model": model, "stream": True})
    except (RefusedError, ValueError, KeyError) as error:
        return [Case.failed(whole, f"{type(error).__name__}: {error}")]
    joined = "".join(
        choice["delta"].get("content") or ""
        for line in pieces.splitlines()
        if line.startswith("data: {")
        for choice in json.loads(line.removeprefix("data: "))["choices"]
    )
    return [
        Case(name, "passed") if actual == right != "" else Case.failed(name, f"{actual!r} instead of {right!r}")
        for name, actual in ((whole, through), (streamed, joined))
    ]


def _has_model(gateway: str) -> bool:
    try:
        return bool(get(f"{gateway}/v1/models")["data"])
    except (RefusedError, ValueError, KeyError):
        return False


def _text(answer: str) -> str:
    return json.loads(answer)["choices"][0]["message"]["content"]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
