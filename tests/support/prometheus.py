"""A real Prometheus: where its programs are, a server that scrapes a cluster, and questions to it."""

import json
import os
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton-prometheus"  # as in the Makefile


def find(name: str) -> Path | None:
    """`prometheus` or `promtool`: on PATH, or where `make prometheus` unpacks them."""
    if installed := shutil.which(name):
        return Path(installed)
    unpacked = CACHE / "usr" / "bin" / name
    return unpacked if unpacked.exists() else None


def program(name: str) -> Path:
    """The same. Skips the test where there is none."""
    if (path := find(name)) is None:
        pytest.skip(f"no {name} on PATH; `make prometheus` fetches Debian's package, which needs the network once")
    return path


@contextmanager
def scraping(config: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """Run Prometheus with that configuration; gives its own address. `folder` holds its files."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(dict(config)))
    command = [
        str(program("prometheus")),
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        running = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        running.terminate()
        running.wait(timeout=20)


def query(address: str, expression: str) -> list[dict[str, Any]]:
    """What Prometheus answers to it now; nothing while it isn't up. Raises AssertionError for what it refuses."""
    try:
        with urllib.request.urlopen(
            f"{address}/api/v1/query?{urllib.parse.urlencode({'query': expression})}", timeout=5
        ) as answer:
            return json.load(answer)["data"]["result"]
    except urllib.error.HTTPError as error:
        if error.code == 503:  # it is starting
            return []
        raise AssertionError(f"{expression}: {error.read().decode(errors='replace')}") from None
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return []
