"""A router on real sockets whose model follows a script: `python -m tests.interop.scripted_model TEMPLATE PICTURE`.

The template is `lenient` or `strict`, the picture a file. It prints its address, and ends when its standard input does.
It writes each request that it refuses to standard error. The model's context is 32 K. A token is some four bytes of
English, so that agents' first turns fit.
"""

import asyncio
import json
import re
import sys
import tempfile
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from baton.wire import use_keys
from kvstore.keys import unpack_tokens
from router.frontend.api.gates import KeyGate
from router.frontend.output_stream import OutputStream
from router.frontend.router_driver import RouterDriver
from router.generation_request import GenerationRequest
from tests.interop.clients.checks import END, VERDICT
from tests.interop.environment import ROOT
from tests.router import model
from tests.router.served import served, settings_for
from tests.support.cluster_keys import KEYS

NAME = "baton-scripted"
CONTEXT = 32_768
VOCABULARY = 8_000
CUT = 80  # tokens of an output that is cut in the middle of a call
_STRICT = (
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be at the beginning.') }}"
    "{% elif m.role not in ['system', 'user', 'assistant', 'tool'] %}{{ raise_exception('Unexpected role.') }}"
    "{% endif %}{% for call in m.tool_calls or [] %}{% for key, value in call.function.arguments.items() %}{% endfor %}"
    "{% endfor %}"
)
"""As Qwen3.5's: it refuses a second system message, unknown roles, and arguments that are no object."""

_FAILURE = re.compile(rb'^(event: (error|response\.failed)$|data: {"error")', re.MULTILINE)
THOUGHT = "<think>\nWell.\n</think>\n\n"  # before each output that no grammar binds
SUMMARY = "SUMMARY-7"
SUM = {"command": "echo baton-$((40+2))", "description": "a sum"}
LONG = SUM | {"command": SUM["command"] + " # to be cut" * 100}
MANY = {"command": "seq -s ' ' 100000 103000", "description": "many numbers"}


def template(*, strict: bool) -> str:
    return (
        "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{% for m in messages %}"
        f"{_STRICT if strict else ''}"
        "<|im_start|>{{ m.role }}\n"
        "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
        "{{ m.content or '' }}{% for call in m.tool_calls or [] %}<tool_call>"
        "{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def tokenizer() -> Tokenizer:
    """Return a tokenizer that knows the words of our documents."""
    result = Tokenizer(models.BPE())
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 3, special_tokens=[f"<{number}>" for number in range(model.EOS + 1)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    result.train([str(page) for page in sorted((ROOT / "docs").glob("*.md"))], trainer)
    result.add_special_tokens(["<tool_call>", "</tool_call>", "<|im_end|>"])
    return result


class Script:
    """What the model says to each request, by the seed of the request."""

    def __init__(self, picture: str) -> None:
        self._commands = {"exec_command": ("cmd",), "Bash": tuple(SUM), "bash": tuple(SUM), "run": ("command",)}
        self._pictures = {"view_image": "path", "Read": "file_path", "read": "filePath", "look": "path"}
        self._picture = picture
        self._tokenizer = tokenizer()
        self._cut = set[str]()  # prompts of users for which a call has been cut
        self._outputs: dict[int, list[int]] = {}
        self._begin: dict[int, int] = {}

    def reply(self, prompt: str, bound: Any) -> tuple[str, int | None]:
        """Return the output for a prompt, and its limit, if it has one. `bound`: the schema that it must match.

        An agent that asks for a summary may have dropped the user's prompt."""
        case, client = (re.findall(r"Case (\w+) of ([\w -]+):", prompt) or [("", "")])[0]
        head = prompt.partition("</tools>")[0] if prompt.startswith("<tools>") else ""
        names = re.findall(r'"name": "(\w+)"', head)
        if SUMMARY in prompt:
            return END["context"], None
        if re.search("(?i)summar", prompt.rpartition("<|im_start|>user")[2].partition("<|im_end|>")[0]):
            return f"{SUMMARY}: the command printed numbers.", None
        if case == "typed":
            verdict = [name for name in names if name in ("final_result", "Verdict")]
            return (_call(verdict[0], VERDICT, bound) if verdict else END[case]), None
        if not names:
            return "A title", None
        if case == "context":
            return self._command(names, MANY, bound), None
        if case == "picture" and ": this model reads text alone]" not in prompt:
            name = next(name for name in names if name in self._pictures)
            return _call(name, {self._pictures[name]: self._picture}, bound), None
        if case in ("loop", "cut") and "baton-42" not in prompt:
            limit = CUT if case == "cut" and client not in self._cut else None
            self._cut.add(client)
            return self._command(names, SUM if limit is None else LONG, bound), limit
        return END.get(case, "?"), None

    def _command(self, names: list[str], arguments: dict[str, str], bound: Any) -> str:
        name = next(name for name in names if name in self._commands)
        call = _call(name, dict(zip(self._commands[name], arguments.values(), strict=False)), bound)
        return call if bound else f"I run it twice.\n{call}\n{call}"

    def install(self) -> None:
        """Have every router of this process follow the script."""
        submit = RouterDriver.submit

        def submitted(driver: RouterDriver, request: GenerationRequest, **more: Any) -> OutputStream:
            prompt = self._tokenizer.decode(list(unpack_tokens(request.tokens)), skip_special_tokens=False)
            grammar = request.sampling.grammar
            bound = json.loads(grammar.text) if grammar and grammar.kind == "json_schema" else None
            output, limit = self.reply(prompt, bound)
            output = output if grammar else THOUGHT + output
            self._outputs[request.sampling.seed] = self._tokenizer.encode(output, add_special_tokens=False).ids
            limits = [each for each in (request.max_tokens, limit) if each is not None]
            request = msgspec.structs.replace(request, max_tokens=min(limits, default=None))
            return submit(driver, request, **more)

        RouterDriver.submit = submitted  # type: ignore[method-assign]
        model.token_at = self._token_at
        model.CONTEXT, model.VOCAB = CONTEXT, VOCABULARY

    def _token_at(self, seed: int, position: int) -> int:
        output, place = self._outputs[seed], position - self._begin.setdefault(seed, position)
        return output[place] if place < len(output) else model.EOS


def _call(name: str, arguments: Any, bound: Any) -> str:
    if bound is None:
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
    return json.dumps([{"name": name, "parameters": arguments}] if bound.get("type") == "array" else arguments)


def tell_refusals() -> None:
    """Have every router of this process print the requests that it refuses, and streams that end with an error."""
    answer = KeyGate.__call__

    async def watched(gate: KeyGate, scope: Any, receive: Any, send: Any) -> None:
        status = 0

        async def sent(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            status = message.get("status", status)
            body = message.get("body", b"")
            if scope["method"] == "POST" and body and (status >= 400 or _FAILURE.search(body)):
                reason = " ".join(body.decode(errors="replace").split())
                print("REFUSED", scope["path"], status, reason, file=sys.stderr, flush=True)
            await send(message)

        await answer(gate, scope, receive, sent)

    KeyGate.__call__ = watched  # type: ignore[method-assign]


async def serve(folder: Path, *, strict: bool) -> None:
    """Serve until standard input ends."""
    config = settings_for(folder)
    config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, served_model_name=(NAME,)))
    path = Path(config.model.path)
    limits = json.loads((path / "config.json").read_text())
    limits |= {"max_position_embeddings": CONTEXT, "vocab_size": VOCABULARY}
    (path / "config.json").write_text(json.dumps(limits))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template(strict=strict)}))
    tokenizer().save(str(path / "tokenizer.json"))
    async with served(config) as router:
        router.start("decode", "decode-0", pool_pages=4 * CONTEXT // model.PAGE)
        print(router.addresses.api, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    use_keys(KEYS)
    Script(sys.argv[2]).install()
    tell_refusals()
    with tempfile.TemporaryDirectory(dir=Path(sys.argv[2]).parent) as scratch:  # which goes with the suite's
        asyncio.run(serve(Path(scratch), strict=sys.argv[1] == "strict"))
