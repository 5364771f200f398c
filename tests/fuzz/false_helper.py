"""A helper process (`router.frontend.helpers.helper_process`) that says what each order wants it to say.

An order is {"say": the bytes in base64, "end": whether the process ends then}.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from typing import Any


def order(said: bytes, *, end: bool = False) -> dict[str, Any]:
    """Have exactly these bytes said."""
    return {"say": base64.b64encode(said).decode(), "end": end}


def answer(body: bytes) -> bytes:
    """A body behind its length, as answers have it."""
    return len(body).to_bytes(4, "big") + body


def main() -> None:
    given, taken = sys.stdin.buffer, sys.stdout.buffer
    while len(head := given.read(4)) == 4:
        wanted = json.loads(given.read(int.from_bytes(head, "big")))
        taken.write(base64.b64decode(wanted["say"]))
        taken.flush()
        if wanted["end"]:
            os._exit(3)


if __name__ == "__main__":
    main()
