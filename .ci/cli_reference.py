"""Write docs/cli.md from the commands themselves: `python .ci/cli_reference.py docs/cli.md`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.core import TyperGroup
from typer.main import get_command

from deploy.cli import app
from deploy.commands.terminal import EXIT_STATUSES

_HEAD = """# The command line

`baton --help` and `baton COMMAND --help` print the same. Results go to stdout, progress and errors to stderr. With
`--json`, stdout holds exactly one JSON object. `baton --install-completion` teaches the shell to complete commands and
flags. `python .ci/cli_reference.py docs/cli.md` writes this page.

| exit status | meaning |
|---|---|
"""

NOT_RUN = {
    "baton up --model Qwen/Qwen3-0.6B --prefill 1 --decode 2": "needs the network",
    "baton up --model ./small --model ./large": "`tests/cluster/test_own_ray.py` runs it",
    "baton scale --model large --decode 2": "`tests/cluster/test_own_ray.py` runs it",
    "baton up --model ./model --engine vllm --max-model-len 8192 --set pages.page_size=32": "needs vLLM",
    "baton size Qwen/Qwen3-0.6B --context 8192 --concurrency 16": "needs the network",
    "baton run-batch -i requests.jsonl -o results.jsonl": "`tests/router/test_batches.py` runs it",
    "baton run-batch -i in.jsonl -o out.jsonl --url router:8000": "`tests/router/test_batches.py` runs it",
    "baton reload ./checkpoint-2000": "`tests/processes/test_reload.py` runs it",
    "baton reload ./checkpoint-2000 --patience 5": "`tests/processes/test_reload.py` runs it",
    "baton reload ./large-2000 --model large": "`tests/processes/test_two_models.py` runs it",
    "baton adapters load poet /models/poet-lora": "needs vLLM",
    "baton adapters unload poet": "needs vLLM",
    "baton up --model ./model.gguf": "needs the network",
    "baton quantize smollm2 --format int4 --group 32 --head -o ./smollm2-int4": "needs the network",
    "baton bench": "takes minutes",
    "baton bench interactive-chat --users 16 --requests 200 --report chat.html": "takes minutes",
    "baton advise --poisson 4 --prompt lognormal:4000:1.0:32000 --output 300 --plot advice.svg": "takes minutes",
}
"""Examples that `tests/cluster/test_documents.py` does not run, with the reason."""


def commands(group: Any = None, name: str = "baton") -> Iterator[tuple[str, Any]]:
    """Yield every command that does something, under its whole name."""
    group = group or get_command(app)
    if not isinstance(group, TyperGroup):
        yield name, group
        return
    context: Any = None
    for each in group.list_commands(context):
        yield from commands(group.get_command(context, each), f"{name} {each}")


def examples(command: Any) -> list[str]:
    """Return the command lines at the end of a command's help."""
    lines = (command.epilog or "").split("\n\n")
    return [line.removeprefix("[dim]$[/] ").replace("\\[", "[") for line in lines if line.startswith("[dim]$[/] ")]


def page() -> str:
    """Return the page as Markdown."""
    statuses = "".join(f"| {status} | {meaning} |\n" for status, meaning in EXIT_STATUSES.items())
    return f"{_HEAD}{statuses}{''.join(_section(name, command) for name, command in commands())}"


def _section(name: str, command: Any) -> str:
    shown = "\n".join(f"$ {line}" for line in examples(command))
    marks = "".join(f"<!-- not run: `{line}`: {NOT_RUN[line]} -->\n" for line in examples(command) if line in NOT_RUN)
    rows = "".join(_row(parameter) for parameter in command.params if parameter.name != "help")
    about = re.sub(r"\n(?!\n)\s*", " ", command.help).replace("\n ", "\n\n")
    table = f"\n| flag | what it says |\n|---|---|\n{rows}" if rows else ""
    return f"\n## {name}\n\n{about}\n\n{marks}```console\n{shown}\n```\n{table}"


def _row(parameter: Any) -> str:
    names = ", ".join(f"`{name}`" for name in parameter.opts)
    if parameter.param_type_name == "argument":
        names = f"`{parameter.metavar or parameter.name.upper()}`"
    default = "" if parameter.default in (None, "", False) else f" Default: {_plain(parameter.default)}."
    return f"| {names} | {(parameter.help or '').replace('|', chr(92) + '|')}{default} |\n"


def _plain(default: Any) -> str:
    return str(getattr(default, "value", default))


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
