"""/v1/files and /v1/batches, OpenAI's: a file of requests, which are served in gaps, and files with their results.

A batch calls the routes of this router's own API as the client that made it, within the limits of its key, and under
that key's tenant. Its requests have places of their own, so they take none of its client's. Its executor is
`baton.batch`. A batch whose router ends is continued by another one, or by the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, BinaryIO, TypeVar

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message

from baton import batch
from baton.api_keys import ANONYMOUS, Identity
from baton.batch import Answer
from baton.errors import (
    BatchConflict,
    BatchNotFound,
    BatonError,
    BodyTimeout,
    InvalidRequest,
    PayloadTooLarge,
    PermissionDenied,
    Unavailable,
    shown,
)
from baton.logs import RateLimitedLog
from router.frontend.api.batch_store import (
    Batch,
    BatchError,
    BatchErrors,
    BatchStore,
    File,
    Status,
    StoredBatch,
    TenantBatches,
)
from router.frontend.api.errors import json_response
from router.frontend.api.gates import BodyReader
from router.frontend.generation import GenerationService
from router.frontend.identity import Gatekeeper, caller
from router.tracing.origin import Origin, origin

log = logging.getLogger(__name__)
_client_log = RateLimitedLog(log)  # a client can cause these lines

T = TypeVar("T", File, Batch)
Endpoint = Callable[[Request], Awaitable[Response]]

_BATCHES = 8  # executed at a time, of a tenant one
_LOOK = 1.0  # seconds between two looks for batches, and between two notes of how far one is
_MOST_LINES = 50_000  # of a batch, as OpenAI has it
_PIECE_SECONDS = 30.0  # within which the next piece of a file must come
_CHECKED = 2**20  # bytes of a file after which the tenant's room is looked at again
_MOST_METADATA = 16  # as OpenAI has it
_BOUNDARY = re.compile(r'multipart/form-data\s*;.*boundary="?([^";]{1,200})"?', re.IGNORECASE | re.DOTALL)


class CreateBatch(Struct, kw_only=True):
    """The body of POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None


class Deleted(Struct, kw_only=True, tag_field="object", tag="file"):
    """The answer of DELETE /v1/files/ID."""

    id: str
    deleted: bool = True


class _Page(Struct, kw_only=True, tag_field="object", tag="list"):
    """A part of a list."""

    first_id: str | None
    last_id: str | None
    has_more: bool


class FileList(_Page, kw_only=True):
    """Some files of a tenant, the newest first."""

    data: list[File]


class BatchList(_Page, kw_only=True):
    """Some batches of a tenant, the newest first."""

    data: list[Batch]


class BatchRoutes:
    """The routes, and the batches that this router executes."""

    def __init__(
        self, store: BatchStore, service: GenerationService, gate: Gatekeeper, bodies: BodyReader,
        guarded: Callable[[Endpoint], ASGIApp],
    ) -> None:  # fmt: skip
        """`guarded` turns an endpoint's errors into answers."""
        self._store, self._service, self._gate, self._bodies = store, service, gate, bodies
        self._news = asyncio.Event()  # a batch has been made here, or cancelled
        self._running: dict[str, asyncio.Task[None]] = {}  # by tenant
        paths: dict[str, dict[str, Endpoint]] = {
            "/v1/files": {"GET": self._files, "POST": self._upload},
            "/v1/files/{file}": {"GET": self._file, "DELETE": self._delete},
            "/v1/files/{file}/content": {"GET": self._content},
            "/v1/batches": {"GET": self._batches, "POST": self._create},
            "/v1/batches/{batch}": {"GET": self._batch},
            "/v1/batches/{batch}/cancel": {"POST": self._cancel},
        }
        # One route for each path: a refused method is answered with all that are allowed.
        self.routes = [
            Route(path, guarded(partial(_by_method, endpoints)), methods=[*endpoints])
            for path, endpoints in paths.items()
        ]

    # --- files -------------------------------------------------------------------------------------------------------

    async def _upload(self, request: Request) -> Response:
        if (match := _BOUNDARY.match(request.headers.get("content-type", ""))) is None:
            raise InvalidRequest("the body is no form; send multipart/form-data with the fields `file` and `purpose`")
        tenant = self._mine()
        path = await asyncio.to_thread(tenant.begin_upload)
        try:
            with await asyncio.to_thread(path.open, "wb") as file:
                await _receive(request, tenant, file)
            new = await asyncio.to_thread(tenant.add_upload, path, match[1].encode())
        finally:
            path.unlink(missing_ok=True)
        return json_response(new)

    async def _files(self, request: Request) -> Response:
        entries = await asyncio.to_thread(self._mine().files)
        if purpose := request.query_params.get("purpose"):
            entries = [file for file in entries if file.purpose == purpose]
        if request.query_params.get("order") == "asc":
            entries.reverse()
        data, more = _page(entries, request, most=10_000)
        return json_response(FileList(data=data, has_more=more, **_ends(data)))

    async def _file(self, request: Request) -> Response:
        file, _ = await asyncio.to_thread(self._mine().file, request.path_params["file"])
        return json_response(file)

    async def _delete(self, request: Request) -> Response:
        name = request.path_params["file"]
        await asyncio.to_thread(self._mine().delete, name)
        return json_response(Deleted(id=name))

    async def _content(self, request: Request) -> Response:
        _, path = await asyncio.to_thread(self._mine().file, request.path_params["file"])
        return FileResponse(path, media_type="application/jsonl")

    # --- batches -----------------------------------------------------------------------------------------------------

    async def _create(self, request: Request) -> Response:
        order = await self._bodies.read_body(request, CreateBatch, _checked)
        create = partial(self._mine().create, caller.get().name, order.endpoint, order.input_file_id, order.metadata)
        new = await asyncio.to_thread(create)
        self._news.set()
        return json_response(new)

    async def _batches(self, request: Request) -> Response:
        data, more = _page(await asyncio.to_thread(self._mine().batches), request, most=100)
        return json_response(BatchList(data=data, has_more=more, **_ends(data)))

    async def _batch(self, request: Request) -> Response:
        tenant = self._mine()
        stored = await asyncio.to_thread(tenant.stored, request.path_params["batch"])
        return json_response(tenant.shown(stored))

    async def _cancel(self, request: Request) -> Response:
        cancelled = await asyncio.to_thread(self._mine().cancel, request.path_params["batch"])
        self._news.set()
        return json_response(cancelled)

    def _mine(self) -> TenantBatches:
        return self._store.of(caller.get().tenant)

    # --- execution ---------------------------------------------------------------------------------------------------

    async def run(self, routes: ASGIApp) -> None:
        """Execute batches, one of a tenant at a time, until the router stops."""
        try:
            while True:
                self._running = {tenant: task for tenant, task in self._running.items() if not task.done()}
                if self._service.driver.stopping:
                    for task in self._running.values():
                        task.cancel()
                else:
                    for tenant, batch_id in await asyncio.to_thread(self._store.active):
                        if tenant.name not in self._running and len(self._running) < _BATCHES:
                            self._running[tenant.name] = asyncio.create_task(self._execute(routes, tenant, batch_id))
                self._news.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), _LOOK)
        finally:
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _execute(self, routes: ASGIApp, tenant: TenantBatches, batch_id: str) -> None:
        """Execute a batch to its end, unless another router does."""
        stored: StoredBatch | None = None
        try:
            stored = await asyncio.to_thread(tenant.stored, batch_id)
            results = await _opened(tenant, stored)
        except BatchConflict:
            await asyncio.sleep(_LOOK)  # of this tenant nothing else is executed here meanwhile
            return
        except BatchNotFound as error:
            log.warning("batch %s is lost: %s", batch_id, error)
            await asyncio.to_thread(tenant.forget, batch_id)
            return
        except InvalidRequest as error:
            log.warning("batch %s has failed: %s", batch_id, error)
            assert stored is not None, "its results alone are checked so"
            stored.batch.errors = BatchErrors([BatchError("storage", "its results are damaged; make the batch again")])
            await asyncio.to_thread(tenant.end, stored, "failed")
            return
        except (BatonError, OSError) as error:
            log.warning("batch %s can't be executed: %s", batch_id, error)
            await asyncio.sleep(_LOOK)
            return
        try:
            status = await self._served(routes, tenant, stored, results)
        except (BatonError, OSError) as error:
            code = error.reason if isinstance(error, BatonError) else "storage"
            stored.batch.errors = BatchErrors([BatchError(code, str(error))])
            status = "failed"
        except Exception:  # it ends this batch, and not the router
            log.exception("batch %s failed in the router", batch_id)
            stored.batch.errors = BatchErrors([BatchError("internal", "internal error; the router's log says more")])
            status = "failed"
        except asyncio.CancelledError:
            results.close()
            raise
        stored.batch.request_counts.completed, stored.batch.request_counts.failed = results.completed, results.failed
        results.close()
        try:
            await asyncio.to_thread(tenant.end, stored, status)
        except OSError as error:  # such as a full disk: then it is executed again, which adds what is missing
            _client_log.warning("how batch %s has ended can't be written: %s", batch_id, error)
            await asyncio.sleep(_LOOK)
            return
        log.info("batch %s is %s: %d lines, %d failed", batch_id, status, results.completed, results.failed)

    async def _served(
        self, routes: ASGIApp, tenant: TenantBatches, stored: StoredBatch, results: batch.Results
    ) -> Status:
        """Serve every line, or until the batch is cancelled. Raises BatonError and OSError."""
        job, identity = stored.batch, self._owner(stored.key)
        caller.set(identity)
        _, path = await asyncio.to_thread(tenant.file, job.input_file_id)
        with await asyncio.to_thread(path.open, "rb") as source:
            job.request_counts.total = await asyncio.to_thread(_count, source)
            job.status, job.in_progress_at = "in_progress", job.in_progress_at or int(time.time())
            work = asyncio.create_task(
                batch.run(
                    source, results, partial(_send, routes, job.id), endpoint=job.endpoint,
                    at_once=min(batch.AT_ONCE, identity.max_streams or batch.AT_ONCE),
                    max_line=self._bodies.max_body, seconds=job.expires_at - time.time(),
                )
            )  # fmt: skip
            try:
                while not work.done():
                    job.request_counts.completed, job.request_counts.failed = results.completed, results.failed
                    await asyncio.to_thread(tenant.save, stored)
                    await asyncio.to_thread(tenant.check_room, 0)
                    if await asyncio.to_thread(tenant.is_cancelled, job.id):
                        job.cancelling_at = int(time.time())
                        return "cancelled"
                    await asyncio.wait([work], timeout=_LOOK)
                work.result()
            finally:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
        return "expired" if time.time() >= job.expires_at else "completed"

    def _owner(self, key: str) -> Identity:
        """Return the client with the key of that name. Raises PermissionDenied if there is none any more."""
        if not self._gate.keys.required and not key:
            return ANONYMOUS
        if (owner := self._gate.keys.named(key)) is None:
            raise PermissionDenied(f"the API key {shown(repr(key))}, which made this batch, does not exist any more")
        return owner


async def _by_method(endpoints: Mapping[str, Endpoint], request: Request) -> Response:
    try:
        return await endpoints["GET" if request.method == "HEAD" else request.method](request)
    except OSError as error:  # such as a full disk
        _client_log.warning("files and batches of clients can't be kept: %s", error)
        raise Unavailable(
            f"files and batches can't be kept here: {error.strerror}; the router's log says more"
        ) from None


async def _opened(tenant: TenantBatches, stored: StoredBatch) -> batch.Results:
    """Open the results of a batch on a thread. Whatever it opens after a cancellation is closed again."""
    opening = asyncio.ensure_future(asyncio.to_thread(tenant.results, stored))
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        with contextlib.suppress(BatonError, OSError):
            (await opening).close()
        raise


async def _receive(request: Request, tenant: TenantBatches, file: BinaryIO) -> None:
    """Write a body to a file. Raises BodyTimeout, PayloadTooLarge and QuotaExceeded."""
    size, unchecked, pieces, limit = 0, 0, aiter(request.stream()), caller.get().max_body_bytes
    while True:
        try:
            piece = await asyncio.wait_for(anext(pieces, None), _PIECE_SECONDS)
        except TimeoutError:
            raise BodyTimeout(f"the next part of the file did not come within {_PIECE_SECONDS:g} s") from None
        if piece is None:
            return
        size += len(piece)
        unchecked += len(piece)
        if limit is not None and size > limit:
            raise PayloadTooLarge(f"the file has more than the {limit} bytes that this API key may send; send less")
        await asyncio.to_thread(file.write, piece)
        if unchecked >= _CHECKED:
            unchecked = 0
            await asyncio.to_thread(tenant.check_room, 0)


async def _send(routes: ASGIApp, batch_id: str, path: str, body: bytes, name: str) -> Answer:
    """Call a route of this router as the caller of this task."""
    name = f"{batch_id}-{name.removeprefix('batch_req_')}"
    headers = [(b"content-type", b"application/json"), (b"x-request-id", name.encode())]
    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": path, "headers": headers,
        "raw_path": path.encode(), "query_string": b"", "root_path": "", "client": None, "server": None,
        "state": {"headers": {"x-request-id": name}},
    }  # fmt: skip
    unread, status, answer_headers, parts = [body], 0, dict[str, str](), list[bytes]()

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        return await asyncio.get_running_loop().create_future()  # this client never goes away

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            answer_headers.update((key.decode().lower(), value.decode()) for key, value in message["headers"])
        else:
            parts.append(message.get("body", b""))

    origin.set(Origin({}, "chat" if path != "/v1/completions" else "text_completion"))
    await routes(scope, receive, send)
    task = asyncio.current_task()
    if task is not None and task.cancelling():  # a route that was cancelled because the router stops has answered
        raise asyncio.CancelledError
    return Answer(status, answer_headers, b"".join(parts))


def _checked(order: CreateBatch) -> CreateBatch:
    """Raises InvalidRequest."""
    if order.endpoint not in batch.ENDPOINTS:
        raise InvalidRequest(
            f"endpoint is {shown(repr(order.endpoint))}; it must be {' or '.join(batch.ENDPOINTS)}", "endpoint"
        )
    if order.completion_window != "24h":
        raise InvalidRequest(
            f"completion_window is {shown(repr(order.completion_window))}; it must be '24h'", "completion_window"
        )
    metadata: Mapping[str, str] = order.metadata or {}
    if len(metadata) > _MOST_METADATA or any(len(key) > 64 or len(text) > 512 for key, text in metadata.items()):
        raise InvalidRequest(
            f"metadata has {len(metadata)} pairs; at most {_MOST_METADATA} are allowed, of 64 and 512 characters",
            "metadata",
        )
    return order


def _page(entries: Sequence[T], request: Request, most: int) -> tuple[list[T], bool]:
    """Return the part of a list that a request asks for, and whether there is more behind it. Raises InvalidRequest."""
    after, limit = request.query_params.get("after"), request.query_params.get("limit", "20" if most == 100 else "")
    if limit and not (limit.isdecimal() and len(limit) < 9 and 1 <= int(limit) <= most):
        raise InvalidRequest(f"limit is {shown(repr(limit))}; it must be from 1 to {most}", "limit")
    ids = [one.id for one in entries]
    if after is not None and after not in ids:
        raise InvalidRequest(f"after is {shown(repr(after))}, which is no id of this list", "after")
    rest = entries[ids.index(after) + 1 :] if after is not None else entries
    size = int(limit or most)
    return list(rest[:size]), len(rest) > size


def _ends(data: Sequence[File | Batch]) -> dict[str, Any]:
    return {"first_id": data[0].id if data else None, "last_id": data[-1].id if data else None}


def _count(source: BinaryIO) -> int:
    """Return the number of requests. Raises InvalidRequest where there is none, or too many."""
    lines, begins = 0, True
    while piece := source.readline(2**20):
        lines += begins and bool(piece.strip())
        begins = piece.endswith(b"\n")
    source.seek(0)
    if not 0 < lines <= _MOST_LINES:
        raise InvalidRequest(f"the input file has {lines} lines; a batch has 1 to {_MOST_LINES}")
    return lines
