"""JSON over HTTP with the standard library, for suites that ask a server themselves."""

import json
import urllib.error
import urllib.request
from typing import Any

_SECONDS = 60.0


class RefusedError(Exception):
    """The server answered with an error, or not at all."""


def get(url: str) -> Any:
    """Return what a GET answers. Raises RefusedError."""
    return json.loads(_read(urllib.request.Request(url)))


def post(url: str, body: dict[str, Any]) -> str:
    """Return what a POST answers, as text. Raises RefusedError."""
    return _read(urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"}))


def _read(request: urllib.request.Request) -> str:
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        raise RefusedError(f"{error.code} {error.read().decode(errors='replace')}") from None
    except OSError as error:
        raise RefusedError(f"{type(error).__name__}: {error}") from None
