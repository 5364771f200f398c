"""Logging as every process does it: one file per process in one folder, one line per record, the request id in it.

2026-01-31T12:00:00.123 decode-0 INFO decode_worker.service request=ab12 accepted attempt 1
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any


class _Formatter(logging.Formatter):
    converter = time.gmtime
    default_msec_format = "%s.%03d"
    default_time_format = "%Y-%m-%dT%H:%M:%S"


def configure(process: str, folder: Path | None, level: int = logging.INFO) -> Path | None:
    """Send this process's records to `folder`/`process`.log, or to stderr where there is no folder."""
    handler: logging.Handler
    path = None
    if folder is None:
        handler = logging.StreamHandler(sys.stderr)
    else:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = folder / f"{process}.log"
        handler = logging.FileHandler(path)
    handler.setFormatter(_Formatter(f"%(asctime)s {process} %(levelname)s %(name)s %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    return path


class RequestLog(logging.LoggerAdapter[logging.Logger]):
    """A logger whose every line names its request."""

    def __init__(self, logger: logging.Logger, request: str) -> None:
        super().__init__(logger, {})
        self._request = request

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return f"request={self._request} {msg}", kwargs
