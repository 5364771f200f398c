"""Files and batches on disk, in OpenAI's form. Tenants see their own.

    FOLDER/tenants/TENANT/files/file-ID        what a client sent, or results
    FOLDER/tenants/TENANT/files/file-ID.json   what is told of it; a file without is not shown
    FOLDER/tenants/TENANT/batches/batch_ID.json
    FOLDER/active/TENANT.batch_ID              a batch that has not ended; with content: it is to be cancelled

TENANT is a hash, so no name leads out of the folder. All routers of a cluster share it. Whichever has the results of a
batch open executes it, and after creation that router alone writes the batch's file. Every method blocks on the disk.
"""

# pyright: strict

from __future__ import annotations

import hashlib
import mmap
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from email.parser import HeaderParser
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct

from baton import private_folder
from baton.batch import Results
from baton.errors import BatchConflict, BatchNotFound, InvalidRequest, QuotaExceeded, shown

T = TypeVar("T", bound=Struct)

DAY = 86_400
_MOST = 1_000  # files of a tenant, and batches
_STALE = 3_600.0  # seconds after which an upload that has not ended is removed
_ID = re.compile(r"(file-|batch_)[0-9a-f]{24}")
_UPLOAD = ".upload-"
_PART_HEAD = 8_192  # bytes of the headers of a part


class File(Struct, kw_only=True, tag_field="object", tag="file"):
    """A file, as the API tells of it."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"


class RequestCounts(Struct):
    """Lines of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchError(Struct):
    """Why a batch has failed."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(Struct, tag_field="object", tag="list"):
    """All reasons."""

    data: list[BatchError]


Status = Literal["validating", "in_progress", "failed", "completed", "expired", "cancelling", "cancelled"]


class Batch(Struct, kw_only=True, tag_field="object", tag="batch"):
    """A batch, as the API tells of it. Times are seconds since the epoch."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: Status = "validating"
    created_at: int
    expires_at: int
    in_progress_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: BatchErrors | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None


class StoredBatch(Struct):
    """A batch, and what its client is not told: the name of its key, and where its results are written."""

    key: str
    output: str
    errors: str
    batch: Batch


class BatchStore:
    """The folder of all tenants."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """`max_bytes`: of all files of a tenant."""
        self._folder = folder
        self._active = folder / "active"
        self.max_bytes = max_bytes

    def of(self, tenant: str) -> TenantBatches:
        return self._named(hashlib.sha256(tenant.encode()).hexdigest()[:32])

    def active(self) -> list[tuple[TenantBatches, str]]:
        """Return the batches that have not ended, the oldest first, each with its tenant. One whose file was never
        written is none: its client was told so."""
        try:
            names = sorted(os.scandir(self._active), key=lambda entry: entry.stat().st_mtime)
        except FileNotFoundError:
            return []
        batches = [(self._named(tenant), batch) for tenant, _, batch in (entry.name.partition(".") for entry in names)]
        return [(tenant, batch) for tenant, batch in batches if tenant.has(batch)]

    def _named(self, name: str) -> TenantBatches:
        return TenantBatches(self._folder / "tenants" / name, self._active, self.max_bytes)


class TenantBatches:
    """The files and batches of one tenant."""

    def __init__(self, folder: Path, active: Path, max_bytes: int) -> None:
        self.name = folder.name
        self._files, self._batches, self._active = folder / "files", folder / "batches", active
        self._max_bytes = max_bytes

    # --- files -------------------------------------------------------------------------------------------------------

    def begin_upload(self) -> Path:
        """Return a new empty file for what a client sends. Raises QuotaExceeded."""
        for folder in (self._files, self._batches, self._active):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.check_room(0)
        if sum(1 for _ in self._files.glob("*.json")) >= _MOST:
            raise QuotaExceeded(f"this tenant has {_MOST} files; delete some")
        path = self._files / f"{_UPLOAD}{secrets.token_hex(12)}"
        path.touch(0o600)
        return path

    def check_room(self, size: int) -> None:
        """Raises QuotaExceeded if so many bytes more don't fit."""
        used = 0
        for entry in os.scandir(self._files):
            try:
                status = entry.stat()
            except FileNotFoundError:  # another upload has ended
                continue
            if entry.name.startswith(_UPLOAD) and time.time() - status.st_mtime > _STALE:
                Path(entry.path).unlink(missing_ok=True)
            else:
                used += status.st_size
        if used + size > self._max_bytes:
            raise QuotaExceeded(
                f"the files of this tenant have {used} bytes, and with api.batch_bytes they may have "
                f"{self._max_bytes}; delete some"
            )

    def add_upload(self, body: Path, boundary: bytes) -> File:
        """Make a file of a form that a client has sent. Raises InvalidRequest and QuotaExceeded."""
        fields = dict[str, str]()
        content: tuple[int, int] | None = None
        if not body.stat().st_size:
            raise InvalidRequest("the body is empty; send multipart/form-data")
        with body.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for name, filename, start, end in _parts(data, boundary):
                if name == "file":
                    content, fields["filename"] = (start, end), filename
                elif end - start <= _PART_HEAD:
                    fields[name] = data[start:end].decode(errors="replace")
            if fields.get("purpose") != "batch":
                raise InvalidRequest(f"purpose is {shown(repr(fields.get('purpose')))}; it must be 'batch'", "purpose")
            if content is None:
                raise InvalidRequest("the form has no file; send one as its field `file`", "file")
            self.check_room(content[1] - content[0])
            new = File(
                id=_new_id("file-"), bytes=content[1] - content[0], created_at=int(time.time()),
                filename=shown(fields["filename"], 255) or "upload.jsonl", purpose="batch",
            )  # fmt: skip
            file.seek(content[0])
            with private_folder.replacing(self._files / new.id) as target:
                left = new.bytes
                while left and (piece := file.read(min(left, 2**20))):
                    target.write(piece)
                    left -= len(piece)
        self._write(self._files / f"{new.id}.json", new)
        return new

    def file(self, file_id: str) -> tuple[File, Path]:
        """Return a file and where its content is. Raises BatchNotFound."""
        return self._read(self._files, file_id, File), self._files / file_id

    def files(self) -> list[File]:
        """Return all files, the newest first."""
        return self._all(self._files, File, lambda file: file.created_at)

    def delete(self, file_id: str) -> None:
        """Remove a file. Raises BatchNotFound."""
        _, content = self.file(file_id)
        (self._files / f"{file_id}.json").unlink(missing_ok=True)
        content.unlink(missing_ok=True)

    # --- batches -----------------------------------------------------------------------------------------------------

    def create(self, key: str, endpoint: str, input_file: str, metadata: dict[str, str] | None) -> Batch:
        """Add a batch, which a router then executes. Raises BatchNotFound and QuotaExceeded."""
        self.file(input_file)
        known = self.batches()
        if len(known) >= _MOST:
            ended = [batch for batch in known if not self._marker(batch.id).exists()]
            if not ended:
                raise QuotaExceeded(f"this tenant has {_MOST} batches that have not ended; wait for some")
            (self._batches / f"{ended[-1].id}.json").unlink(missing_ok=True)
        now = int(time.time())
        batch = Batch(
            id=_new_id("batch_"), endpoint=endpoint, input_file_id=input_file, completion_window="24h",
            created_at=now, expires_at=now + DAY, metadata=metadata,
        )  # fmt: skip
        self._marker(batch.id).touch(0o600)
        self.save(StoredBatch(key, _new_id("file-"), _new_id("file-"), batch))
        return batch

    def has(self, batch_id: str) -> bool:
        return (self._batches / f"{batch_id}.json").exists()

    def forget(self, batch_id: str) -> None:
        """Let no router execute a batch any more."""
        self._marker(batch_id).unlink(missing_ok=True)

    def stored(self, batch_id: str) -> StoredBatch:
        """Return a batch as it is stored. Raises BatchNotFound."""
        return self._read(self._batches, batch_id, StoredBatch)

    def batches(self) -> list[Batch]:
        """Return all batches, the newest first."""
        stored = self._all(self._batches, StoredBatch, lambda one: one.batch.created_at)
        return [self.shown(one) for one in stored]

    def shown(self, stored: StoredBatch) -> Batch:
        if self.is_cancelled(stored.batch.id):
            stored.batch.status = "cancelling"
        return stored.batch

    def cancel(self, batch_id: str) -> Batch:
        """Have the router that executes a batch end it. Raises BatchNotFound and BatchConflict."""
        stored = self.stored(batch_id)
        try:
            with self._marker(batch_id).open("r+") as marker:
                marker.write("cancel")
        except FileNotFoundError:
            raise BatchConflict(f"batch {batch_id} is {stored.batch.status}; it can't be cancelled any more") from None
        return self.shown(stored)

    def is_cancelled(self, batch_id: str) -> bool:
        """Whether a batch is to be cancelled."""
        try:
            return self._marker(batch_id).stat().st_size > 0
        except FileNotFoundError:
            return False

    def results(self, stored: StoredBatch) -> Results:
        """Open the results of a batch. Raises BatchConflict if another router has them open."""
        return Results(self._files / stored.output, self._files / stored.errors)

    def save(self, stored: StoredBatch) -> None:
        self._write(self._batches / f"{stored.batch.id}.json", stored)

    def end(self, stored: StoredBatch, status: Status) -> None:
        """Write how a batch has ended, and show its results."""
        batch, now = stored.batch, int(time.time())
        for file_id, name in ((stored.output, "output_file_id"), (stored.errors, "error_file_id")):
            content = self._files / file_id
            if content.exists() and (size := content.stat().st_size):
                card = File(
                    id=file_id, bytes=size, created_at=now, filename=f"{batch.id}_{name[:-8]}.jsonl",
                    purpose="batch_output",
                )  # fmt: skip
                self._write(self._files / f"{file_id}.json", card)
                setattr(batch, name, file_id)
            else:
                content.unlink(missing_ok=True)
        batch.status = status
        setattr(batch, f"{status}_at", now)
        self.save(stored)
        self.forget(batch.id)

    # --- the disk ----------------------------------------------------------------------------------------------------

    def _marker(self, batch_id: str) -> Path:
        return self._active / f"{self.name}.{batch_id}"

    def _read(self, folder: Path, name: str, kind: type[T]) -> T:
        if _ID.fullmatch(name):
            try:
                return msgspec.json.decode((folder / f"{name}.json").read_bytes(), type=kind)
            except (FileNotFoundError, msgspec.MsgspecError):  # such as one that a power cut has emptied
                pass
        raise BatchNotFound(f"there is no {'file' if kind is File else 'batch'} {shown(repr(name))}")

    def _all(self, folder: Path, kind: type[T], at: Callable[[T], int]) -> list[T]:
        entries: list[T] = []
        for path in folder.glob("*.json"):
            try:
                entries.append(msgspec.json.decode(path.read_bytes(), type=kind))
            except (FileNotFoundError, msgspec.MsgspecError):  # removed meanwhile, or emptied by a power cut
                continue
        return sorted(entries, key=at, reverse=True)

    def _write(self, path: Path, value: Struct) -> None:
        with private_folder.replacing(path) as file:
            file.write(msgspec.json.encode(value))


def _new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)


def _parts(data: mmap.mmap, boundary: bytes) -> Iterator[tuple[str, str, int, int]]:
    """Yield each part of a form: its name, its file's name, and where its content begins and ends. Raises
    InvalidRequest."""
    mark = b"--" + boundary
    at = data.find(mark)
    while at >= 0 and data[at + len(mark) : at + len(mark) + 2] != b"--":
        head_end, end = data.find(b"\r\n\r\n", at), data.find(b"\r\n" + mark, at)
        if not 0 <= head_end < end or head_end - at > _PART_HEAD:
            raise InvalidRequest("the body is no whole form; send multipart/form-data")
        head: Any = HeaderParser().parsestr(data[at + len(mark) + 2 : head_end + 2].decode(errors="replace"))
        name = head.get_param("name", "", header="content-disposition")
        filename = head.get_filename("")
        yield str(name), Path(str(filename)).name, head_end + 4, end
        at = end + 2
