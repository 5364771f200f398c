"""`baton run-batch`: a file of requests in OpenAI's batch format, and a file with their results."""

import asyncio
import contextlib
import time
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any

import typer

from baton import batch
from baton.batch import Answer, Results
from baton.client import ClientTls
from baton.client.connection import ClientConnection
from baton.errors import InvalidRequest, Unauthenticated, Unavailable
from deploy.commands.chat import http_address
from deploy.commands.terminal import CaFile, HttpUrl, Json, Name, command, err, print_json

_PATIENCE = 60.0  # seconds without any answer after which the command ends
_TELL = 2.0  # seconds between two lines of progress


@command(
    "baton run-batch -i requests.jsonl -o results.jsonl", "baton run-batch -i in.jsonl -o out.jsonl --url router:8000"
)
def run_batch(
    input_file: Annotated[Path, typer.Option("--input-file", "-i", help="Requests, one on each line.")],
    output_file: Annotated[Path, typer.Option("--output-file", "-o", help="Results; those that it has stay.")],
    max_concurrency: Annotated[int, typer.Option(min=1, max=1_024, help="Requests under way.")] = batch.AT_ONCE,
    url: HttpUrl = "",
    ca_file: CaFile = "",
    name: Name = "baton",
    as_json: Json = False,
) -> None:
    """Serve a file of requests in OpenAI's batch format, and write a result for each line as it comes.

    Run the same command again to go on after it was ended: lines with a result are not sent again. The requests are of
    the lowest class, so they fill gaps. The API key, if one is needed, comes from $BATON_API_KEY."""
    address, encrypted = http_address(url, ca_file, name)
    connection = ClientConnection("", "", address, None, ClientTls(ca_file) if encrypted else False)
    begun = time.monotonic()
    try:
        with input_file.open("rb") as source, contextlib.closing(Results(output_file)) as results:
            earlier = len(results.lines)
            asyncio.run(_run(source, results, connection, max_concurrency))
    except OSError as error:
        raise InvalidRequest(f"can't use {error.filename}: {error.strerror}") from None
    seconds = round(time.monotonic() - begun, 3)
    summary = {"completed": results.completed, "failed": results.failed, "earlier": earlier, "seconds": seconds}
    if as_json:
        print_json(summary | {"output": str(output_file)})
    else:
        err.print(f"{_status(results)}, {earlier} of them by an earlier run; the results are in {output_file}")


async def _run(source: Any, results: Results, connection: ClientConnection, at_once: int) -> None:
    progress = asyncio.create_task(_tell(results))
    try:
        await batch.run(source, results, _Sender(connection), at_once=at_once)
    finally:
        progress.cancel()
        await connection.close()


class _Sender:
    """Sends requests to a cluster. One that is restarted meanwhile gets them again."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._answered = time.monotonic()

    async def __call__(self, path: str, body: bytes, name: str) -> Answer:
        """Raises Unavailable if nothing has answered for long, and Unauthenticated without a known key."""
        import aiohttp

        session, url = self._connection.http(path)
        headers = {"Content-Type": "application/json"}
        while True:
            try:
                async with session.post(url, data=body, headers=headers, timeout=aiohttp.ClientTimeout()) as response:
                    content = await response.read()
            except aiohttp.ClientError as error:
                if time.monotonic() - self._answered > _PATIENCE:
                    raise Unavailable(f"no router answers at {url} ({error}); run the command again to go on") from None
                await asyncio.sleep(1.0)
                continue
            self._answered = time.monotonic()
            if response.status == HTTPStatus.UNAUTHORIZED:
                raise Unauthenticated("the cluster knows no such API key; set BATON_API_KEY and run the command again")
            return Answer(response.status, {key.lower(): text for key, text in response.headers.items()}, content)


async def _tell(results: Results) -> None:
    last = ""
    while True:
        await asyncio.sleep(_TELL)
        if (line := _status(results)) != last:
            err.print(line)
        last = line


def _status(results: Results) -> str:
    return f"{results.completed + results.failed} lines have results, {results.failed} of them errors"
