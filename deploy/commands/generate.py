"""One request from the command line, and its result as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from baton.client import Generated
from baton.errors import InvalidRequest


def parse_token_ids(text: str) -> list[int]:
    """Parse token ids written as `1,2,3`. Raises InvalidRequest."""
    try:
        ids = [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidRequest(f"{text!r} is no list of token ids; write them as 1,2,3") from None
    for token in ids:
        if not 0 <= token < 2**32:
            raise InvalidRequest(f"{token} is no token id; they are 0 or more")
    return ids


def as_json(made: Generated) -> dict[str, Any]:
    """Return the result as plain data, without times that were not reached."""
    timing = {name: round(value, 3) for name, value in asdict(made.timing).items() if value is not None}
    return {
        "text": made.text,
        "token_ids": made.token_ids,
        "finish_reason": made.finish_reason,
        "usage": asdict(made.usage),
        "timing": timing,
        "work": asdict(made.work) | {"decode_workers": list(made.work.decode_workers)},
        "seed": made.seed,
        "request_id": made.request_id,
    }
