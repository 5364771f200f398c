"""vLLM's own HTTP front before an engine that computes nothing, in vLLM's environment.

`python -m bench.peers.vllm_front MODEL WORDS [OPTION …]`: WORDS is a JSON list of token ids, each OPTION one of
`vllm serve`. `fake_engine.follow` says what the process answers.

All but the engine core is vLLM's: the application on uvicorn and uvloop, the checks of a request, `AsyncLLM` with its
detokenizer and output collectors, the renderer of events. In vLLM the core is a process of its own, whose messages the
front reads from a socket. Here the tokens come from within the process, as those of Baton's front do in this benchmark,
so neither front pays for that way.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any, TextIO

from bench.peers.adapter import only_answers
from bench.peers.fake_engine import FakeEngine, follow


class FakeCore:
    """The engine core as `AsyncLLM` of vLLM 0.32.0 sees it."""

    engine_ranks_managed = (0,)
    resources = SimpleNamespace(engine_dead=False)

    def __init__(self, engine: FakeEngine[str]) -> None:
        self._engine = engine
        self._messages = import_module("vllm.v1.engine")  # by name, and only here: it is in no other environment
        self.requests: dict[str, Any] = {}  # AsyncLLM's, by name; each has the collector that its reader takes from

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def reset_mm_cache_async(self) -> None:
        """There is none."""

    async def add_request_async(self, request: Any) -> None:
        self._engine.add(request.request_id, request.sampling_params.max_tokens)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for name in request_ids:
            self._engine.drop(name)

    async def get_output_async(self) -> Any:
        length = self._messages.FinishReason.LENGTH
        outputs = [
            self._messages.EngineCoreOutput(each.stream, [each.token], finish_reason=length if each.last else None)
            for each in await self._engine.step(self._unread)
        ]
        return self._messages.EngineCoreOutputs(outputs=outputs)

    def _unread(self, name: str) -> int:
        output = self.requests[name].queue.output
        return len(output.outputs[0].token_ids) if output else 0

    def shutdown(self, timeout: float | None = None) -> None:
        """Nothing runs."""


def main() -> None:
    """Serve until stdin is closed."""
    answers = only_answers()
    model, words, *options = sys.argv[1:]
    engine = FakeEngine[str](json.loads(words))
    core = FakeCore(engine)
    client = import_module("vllm.v1.engine.core_client").EngineCoreClient
    client.make_async_mp_client = staticmethod(lambda *_args, **_named: core)
    command_line = import_module("vllm.entrypoints.launchers.cli_args")
    parser = command_line.make_arg_parser(import_module("vllm.utils.argparse_utils").FlexibleArgumentParser())
    args = parser.parse_args(["--model", model, "--host", "127.0.0.1", "--port", "0", *options])
    command_line.validate_parsed_serve_args(args)
    import_module("uvloop").run(_serve(args, core, engine, answers))


async def _serve(args: Any, core: FakeCore, engine: FakeEngine[str], answers: TextIO) -> None:
    entry = import_module("vllm.entrypoints.launchers.api_server.entry")
    url, listener = entry.setup_server(args, reuse_port=False)
    async with entry.build_async_engine_client(args) as client:
        core.requests = client.output_processor.request_states
        listener.listen()  # connections wait until it serves
        host, port = listener.getsockname()
        serving = asyncio.create_task(entry.build_and_serve(client, url, listener, args))
        following = asyncio.create_task(follow(engine, f"{host}:{port}", answers))
        await asyncio.wait({serving, following}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        os._exit(0)  # its own end takes seconds, and nothing is left to save


if __name__ == "__main__":
    main()
