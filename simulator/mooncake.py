"""Read production traces in Mooncake's format.

Each line is a JSON object with `timestamp` (milliseconds), `input_length`, `output_length` and `hash_ids`. Each hash id
stands for a block of 512 tokens and identifies the prompt up to and including that block.

Recorded sessions have more fields. `session` names one. `parent` is the earlier turn whose prompt this one continues
for `shared` tokens, and -1 for none. `after_ms` is the time from the answer before to this turn.

Traces hold no text. Tokens are made from the hash ids, so that prompts share exactly the prefixes that they shared in
production.
"""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from baton.errors import ConfigError

BLOCK = 512  # tokens per hash id


class TraceLine(Struct, frozen=True):
    """One request of a trace."""

    timestamp: Annotated[float, Meta(ge=0)]
    input_length: Annotated[int, Meta(ge=1)]
    output_length: Annotated[int, Meta(ge=0)]
    hash_ids: tuple[int, ...]
    session: str = ""
    parent: int = -1
    shared: int = 0
    after_ms: Annotated[float, Meta(ge=0)] | None = None


def read_trace(path: Path, count: int | None = None) -> list[TraceLine]:
    """Return the first `count` requests, ordered by time. Raises ConfigError, also for a trace without requests."""
    if count is not None and count < 1:
        raise ConfigError(f"{count} requests of {path} are asked for; ask for at least one")
    lines: list[TraceLine] = []
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    lines.append(_decode(text, path, number))
                if count is not None and len(lines) == count:
                    break
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from None
    if not lines:
        raise ConfigError(f"{path} has no requests")
    return sorted(lines, key=lambda line: line.timestamp)


def _decode(text: bytes, path: Path, number: int) -> TraceLine:
    try:
        return msgspec.json.decode(text, type=TraceLine)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}, line {number}: {error}") from None
