"""Run the checks of one client and print what came of each, a line of JSON each.

A client's module has functions `check_…(target)`, plain or async. This module needs the standard library alone, since
it runs in environments without Baton's packages.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_SECONDS = 60.0  # of one async check


def prompt_of(case: str, client: str) -> str:
    """Return the user's prompt in a case of `tests/interop/scripted_model.py`."""
    return f"Case {case} of {client}: do as the model says."


LOOP, PICTURE, TYPED = (prompt_of(case, "a library") for case in ("loop", "picture", "typed"))
VERDICT = {"answer": "yes", "certain": True}
END = {
    "loop": "The command printed baton-42.",
    "cut": "The command printed baton-42.",
    "picture": "The picture was left out.",
    "context": "The numbers are in SUMMARY-7.",
    "typed": json.dumps(VERDICT),
}
"""The last text of the model in each case."""
TOO_LONG = "Tell of batons. " * 12_000
PICTURE_URL = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
)


@dataclass(frozen=True)
class Target:
    """The server: its URL without a path, and the model's name."""

    url: str
    model: str


def main(module: Mapping[str, Any]) -> None:
    """Run every check of a module, in order."""
    target = Target(*sys.argv[1:3])
    for name, check in module.items():
        if name.startswith("check_"):
            print(json.dumps(_outcome(name.removeprefix("check_"), check, target)), flush=True)


def _outcome(name: str, check: Any, target: Target) -> dict[str, str]:
    try:
        result = check(target)
        if inspect.isawaitable(result):
            asyncio.run(_bounded(result))
    except Exception as error:  # noqa: BLE001 whatever a check raises is its result
        last = traceback.extract_tb(error.__traceback__)[-1] if error.__traceback__ else None
        reason = f"{type(error).__name__}: {error or (last.line if last else '')}"
        return {"name": name, "outcome": "failed", "reason": reason}
    return {"name": name, "outcome": "passed"}


async def _bounded(result: Any) -> None:
    await asyncio.wait_for(result, _SECONDS)


@contextmanager
def refused(kind: type[Exception], says: str = "") -> Iterator[None]:
    """Expect an exception of that class whose text has `says`."""
    text = None
    try:
        yield
    except kind as error:
        text = str(error)
    assert text is not None, f"no {kind.__name__} was raised"
    assert says in text, f"{says!r} is not in {text}"
