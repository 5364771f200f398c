"""The page's files, read once at start: plain HTML, CSS and ES modules, as they lie in `static`.

There is no build step and nothing comes from elsewhere. A file is served under its own name with its type and a strong
ETag, and a browser asks each time whether it has changed. No path of a client touches the disk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
PAGE = "index.html"

SECURITY_HEADERS: Mapping[str, str] = {
    # Names of requests, models and workers come from elsewhere. Were one of them taken for markup in spite of all, no
    # script but the page's own files could run, and no data could go to another server.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
        "trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


@dataclass(frozen=True)
class StaticFile:
    """One file of the page."""

    content: bytes
    media_type: str
    etag: str

    def answer(self, request: Request) -> Response:
        """The file, or 304 if the browser has it."""
        headers = {**SECURITY_HEADERS, "etag": self.etag, "cache-control": "no-cache"}
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if self.etag in known or "*" in known:
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers={**headers, "content-type": self.media_type})


@cache
def static_files() -> Mapping[str, StaticFile]:
    """Every file by its name."""
    folder = resources.files("router.frontend.api.dashboard").joinpath("static")
    files: dict[str, StaticFile] = {}
    for entry in folder.iterdir():
        suffix = entry.name[entry.name.rfind(".") :]
        if suffix in _TYPES:
            content = entry.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
            files[entry.name] = StaticFile(content, _TYPES[suffix], etag)
    return files
