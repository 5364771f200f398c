"""`baton pin`: pin the prefixes of a file, one after the other. An error in one does not stop the others.

A file holds one prefix per line, as JSON: {"text": …} or {"token_ids": […]}, optionally with "id" and "ttl". Only
requests of its "tenant", with its "cache_salt", find it. A file with the extension .txt is one prefix as a whole.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.markup import escape

from baton.client import Client, PinOptions
from baton.errors import BatonError, InvalidRequest
from baton.operator_api import NewPin, Pin
from deploy.commands.running_cluster import operator_client
from deploy.commands.terminal import Json, Name, Operator, command, err, new_table, out, print_json, size

STDIN = "-"
_UNITS_MS = {"": 1_000, "ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|)", re.IGNORECASE)
_FIELDS = {"text", "token_ids", "id", "ttl", "tenant", "cache_salt"}


@command(
    "baton pin prefixes.jsonl --ttl 12h", "baton pin system-prompt.txt --tenant research", "baton pin --list",
    "baton pin --remove support",
)  # fmt: skip
def pin(
    file: Annotated[str, typer.Argument(help="Prefixes, a JSON object per line; *.txt: one prefix; -: stdin.")] = "",
    ttl: Annotated[str, typer.Option(help="How long to keep them: 90s, 15m, 1h, 2d.")] = "",
    list_: Annotated[bool, typer.Option("--list", help="Show what is pinned.")] = False,
    remove: Annotated[list[str] | None, typer.Option(metavar="ID", help="End a pin; may be repeated.")] = None,
    model: Annotated[
        str, typer.Option(help="The model or LoRA adapter whose requests find them; else the first.")
    ] = "",
    tenant: Annotated[str, typer.Option(help="The tenant whose requests find the prefixes; --remove: its pins.")] = "",
    timeout: Annotated[float | None, typer.Option(help="Seconds that each prefix may take.")] = None,
    operator: Operator = "",
    name: Name = "baton",
    as_json: Json = False,
) -> None:
    """Compute prefixes ahead of requests, and pin their KV pages for a while."""
    if sum([bool(file), list_, bool(remove)]) != 1:
        raise InvalidRequest("give a FILE with prefixes, or --list, or --remove ID")
    ttl_ms = parse_duration_ms(ttl) if ttl else None
    lines = read_prefixes(file, sys.stdin.read() if file == STDIN else "") if file else []
    with operator_client(operator, name) as client:
        for each in remove or ():
            client.unpin(each, tenant)
        pins = client.pins() if list_ else []
        outcomes: list[PinOutcome] = []
        for outcome in pin_prefixes(client, lines, ttl_ms, timeout, tenant, model):
            outcomes.append(outcome)
            if not as_json:
                _show_pinned(file, outcome)
    if as_json:
        done = {"pinned": [outcome.as_json() for outcome in outcomes]} if file else {"removed": remove}
        print_json({"pins": msgspec.to_builtins(pins)} if list_ else done)
    elif list_:
        _show_pins(pins)
    elif file:
        _show_pinned_all(outcomes)
    else:
        out.print(f"removed {escape(', '.join(remove or ()))}")
    if any(outcome.error for outcome in outcomes):
        raise typer.Exit(1)


@dataclass(frozen=True)
class PinOutcome:
    """The outcome of one prefix. `line` counts from 1."""

    line: int
    pinned: NewPin | None = None
    error: BatonError | None = None

    def as_json(self) -> dict[str, Any]:
        if self.pinned is None:
            assert self.error is not None
            return {"line": self.line, "error": {"reason": self.error.reason, "message": str(self.error)}}
        fields = msgspec.to_builtins(self.pinned)
        return {"line": self.line, **fields.pop("pin"), **fields}


def parse_duration_ms(text: str) -> int:
    """Parse `90s`, `15m`, `1.5h`, `2d`, or a number of seconds. Raises InvalidRequest."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise InvalidRequest(f"{text!r} is no duration; write seconds, or a number with ms, s, m, h or d such as 1h")
    return int(float(match[1]) * _UNITS_MS[match[2].lower()])


def read_prefixes(source: str, stdin: str = "") -> list[tuple[int, str]]:
    """Return the prefixes of a file, or of `stdin` for "-": each as unparsed JSON, with its line number.

    Raises InvalidRequest if the file can't be read or holds none.
    """
    try:
        text = stdin if source == STDIN else Path(source).read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"can't read {source}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidRequest(f"{source} is not UTF-8 text") from None
    if Path(source).suffix == ".txt":
        lines = [(1, json.dumps({"text": text}))] if text else []
    else:  # not splitlines(): JSON strings may hold other line separators, such as U+2028
        lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise InvalidRequest(f"{source} holds no prefix; write one JSON object per line, such as " + '{"text": "…"}')
    return lines


def parse(line: str, ttl_ms: int | None, tenant: str = "") -> tuple[str | list[int], PinOptions]:
    """Parse one prefix: its text or token ids, and how to pin it. Raises InvalidRequest.

    `ttl_ms` applies if the line has no "ttl"; None: the router's default. `tenant` applies if the line has no "tenant".
    """
    try:
        prefix: object = json.loads(line)
    except ValueError as error:
        raise InvalidRequest(f"not JSON: {error}") from None
    if not isinstance(prefix, Mapping):
        raise InvalidRequest(f'{type(prefix).__name__} is no prefix; write an object, such as {{"text": "…"}}')
    if unknown := sorted(set(prefix) - _FIELDS):
        raise InvalidRequest(
            f"unknown field {unknown[0]!r}; a prefix has text or token_ids, id, ttl, tenant, cache_salt"
        )
    if ("text" in prefix) == ("token_ids" in prefix):
        raise InvalidRequest("give either text or token_ids")
    field, kind = ("text", str) if "text" in prefix else ("token_ids", list)
    prompt: Any = prefix[field]
    if not isinstance(prompt, kind):
        raise InvalidRequest(f"{field} can't be sent: it is a {type(prompt).__name__}")
    return prompt, {
        "ttl_ms": parse_duration_ms(str(prefix["ttl"])) if "ttl" in prefix else ttl_ms,
        "id": prefix.get("id", ""),
        "tenant": prefix.get("tenant", tenant),
        "cache_salt": prefix.get("cache_salt", ""),
    }


def pin_prefixes(
    client: Client,
    lines: list[tuple[int, str]],
    ttl_ms: int | None,
    timeout: float | None = None,
    tenant: str = "",
    model: str = "",
) -> Iterator[PinOutcome]:
    """Pin the prefixes in order, one at a time, so that they hardly delay requests.

    `timeout` is the time limit of each, in seconds.
    """
    for number, line in lines:
        try:
            prompt, options = parse(line, ttl_ms, tenant)
            options["model"] = model
            yield PinOutcome(number, pinned=client.pin_prefix(prompt, timeout=timeout, **options))
        except BatonError as error:
            yield PinOutcome(number, error=error)


def _show_pinned(source: str, outcome: PinOutcome) -> None:
    if outcome.pinned is None:
        err.print(f"[red]{escape(source)}:{outcome.line}[/] {escape(str(outcome.error))}")
        return
    pin = outcome.pinned.pin
    computed = f", {outcome.pinned.tokens_computed} computed" if outcome.pinned.tokens_computed is not None else ""
    out.print(
        f"{escape(pin.id)}  {pin.tokens} tokens{computed}, {pin.pages} pages, {size(pin.bytes)} on {escape(pin.node)} "
        f"for {_span(pin.expires_in_ms)}"
    )


def _show_pinned_all(outcomes: Sequence[PinOutcome]) -> None:
    """Print the sum of all outcomes. Pages that two prefixes share count twice."""
    pins = [outcome.pinned.pin for outcome in outcomes if outcome.pinned is not None]
    failed = len(outcomes) - len(pins)
    out.print(
        f"{len(pins)} prefixes are pinned, {sum(pin.pages for pin in pins)} pages, {size(sum(p.bytes for p in pins))}"
        + (f"; {failed} failed" if failed else "")
    )


def _show_pins(pins: Sequence[Pin]) -> None:
    table = new_table("pin", "tenant", ">tokens", ">pages", ">size", ">for another", "node")
    for pin in pins:
        node = escape(pin.node) or "[yellow]being made anew[/]"
        left = _span(pin.expires_in_ms)
        table.add_row(escape(pin.id), escape(pin.tenant), str(pin.tokens), str(pin.pages), size(pin.bytes), left, node)
    out.print(table if pins else "nothing is pinned")


def _span(milliseconds: int) -> str:
    minutes, seconds = divmod(round(milliseconds / 1_000), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
