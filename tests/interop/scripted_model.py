"""A router on real sockets whose model follows a script: `python -m tests.interop.scripted_model TOOL lenient|strict`.

The model calls a tool that runs a command, and tells what the command printed. It prints its address, and ends when its
standard input does. Prompts have a token a byte, so that an agent's first turn is some 40,000 tokens long.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from baton.wire import use_keys
from kvstore.keys import unpack_tokens
from router.frontend.client_sessions import RouterDriver
from router.frontend.output_stream import OutputStream
from router.generation_request import GenerationRequest
from tests.router import model
from tests.router.served import served, settings_for
from tests.router.test_chat_api import tokenizer
from tests.support.cluster_keys import KEYS

NAME = "baton-scripted"
COMMAND, PRINTS = "echo baton-$((40+2))", "baton-42"
CONTEXT = 2_000_000
_STRICT = (
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be at the beginning.') }}"
    "{% elif m.role not in ['system', 'user', 'assistant', 'tool'] %}{{ raise_exception('Unexpected role.') }}"
    "{% endif %}{% for call in m.tool_calls or [] %}{% for key, value in call.function.arguments.items() %}{% endfor %}"
    "{% endfor %}"
)
"""As Qwen3.5's: it refuses a second system message, unknown roles, and arguments that are no object."""


def template(*, strict: bool) -> str:
    """Return a chat template."""
    return (
        "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{% for m in messages %}"
        f"{_STRICT if strict else ''}"
        "<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for call in m.tool_calls or [] %}<tool_call>"
        "{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


class Script:
    """What the model says to each request, by the seed of the request."""

    def __init__(self, tool: str, argument: str) -> None:
        self._tool, self._arguments = tool, {argument: COMMAND, "description": "a sum"}
        self._tokenizer = tokenizer()
        self._outputs: dict[int, list[int]] = {}
        self._begin: dict[int, int] = {}

    def reply(self, prompt: str) -> str:
        """Return the output for a prompt."""
        if "<tools>" not in prompt:
            return "A sum"  # a title of the conversation
        if PRINTS in prompt:
            return f"The command printed {PRINTS}."
        return f"<tool_call>\n{json.dumps({'name': self._tool, 'arguments': self._arguments})}\n</tool_call>"

    def install(self) -> None:
        """Have every router of this process follow the script."""
        submit = RouterDriver.submit

        def submitted(driver: RouterDriver, request: GenerationRequest, **more: Any) -> OutputStream:
            prompt = self._tokenizer.decode(list(unpack_tokens(request.tokens)), skip_special_tokens=False)
            output = self._tokenizer.encode(self.reply(prompt), add_special_tokens=False).ids
            self._outputs[request.sampling.seed] = output
            return submit(driver, request, **more)

        RouterDriver.submit = submitted  # type: ignore[method-assign]
        model.token_at = self._token_at
        model.CONTEXT = CONTEXT

    def _token_at(self, seed: int, position: int) -> int:
        output, place = self._outputs[seed], position - self._begin.setdefault(seed, position)
        return output[place] if place < len(output) else model.EOS


async def serve(folder: Path, *, strict: bool) -> None:
    """Serve until standard input ends."""
    config = settings_for(folder)
    config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, served_model_name=(NAME,)))
    path = Path(config.model.path)
    limits = json.loads((path / "config.json").read_text()) | {"max_position_embeddings": CONTEXT}
    (path / "config.json").write_text(json.dumps(limits))
    settings = {"bos_token": "<s>", "chat_template": template(strict=strict)}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer().save(str(path / "tokenizer.json"))
    async with served(config) as router:
        router.start("decode", "decode-0", pool_pages=2 * CONTEXT // model.PAGE)
        print(router.addresses.api, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    use_keys(KEYS)
    Script(sys.argv[1], sys.argv[2]).install()
    with tempfile.TemporaryDirectory(prefix="baton-interop-") as scratch:
        asyncio.run(serve(Path(scratch), strict=sys.argv[3] == "strict"))
