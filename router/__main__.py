"""`python -m router`: a router without Ray. Says where it listens in one line of JSON on stdout, once it does."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence

import msgspec

from baton.addresses import ServiceAddresses
from baton.errors import BatonError
from baton.grpc_loop import GrpcEventLoop
from baton.process import Arguments, parse
from router.service import serve


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; 0, or 1 with the reason on stderr."""
    try:
        arguments = parse("router", argv, needs_router=False)
        with asyncio.Runner(loop_factory=GrpcEventLoop) as runner:
            runner.run(_serve(arguments))
    except BatonError as error:
        print(f"router: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


async def _serve(arguments: Arguments) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await serve(arguments.config, arguments.name, arguments.node, stop, _say, arguments.host)


def _say(addresses: ServiceAddresses) -> None:
    print(msgspec.json.encode(addresses).decode(), flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
