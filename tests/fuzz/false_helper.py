"""A helper process (`router.frontend.off_loop`) that says what each order wants it to say.

An order is {"say": the bytes in base64, "end": whether the process ends then}. `NUMBER` in it becomes the order's.
"""

import base64
import json
import os
import sys

from router.frontend.off_loop import READY

NUMBER = b" " * 7 + b"#"


def order(output: bytes, *, end: bool = False) -> bytes:
    """Have exactly these bytes said."""
    return json.dumps({"say": base64.b64encode(output).decode(), "end": end}).encode()


GOOD = b'{"number":' + NUMBER + b', "text": "x"}'
"""The body of a good answer."""


def answer(body: bytes) -> bytes:
    """A body behind its length, as answers have it."""
    return len(body).to_bytes(4, "big") + body


def main() -> None:
    orders, replies = sys.stdin.buffer, sys.stdout.buffer
    replies.write(READY)
    replies.flush()
    while len(head := orders.read(4)) == 4:
        message = json.loads(orders.read(int.from_bytes(head, "big")))
        script = message["order"]
        number = str(message["number"]).encode().rjust(len(NUMBER))
        replies.write(base64.b64decode(script["say"]).replace(NUMBER, number))
        replies.flush()
        if script["end"]:
            os._exit(3)


if __name__ == "__main__":
    main()
