"""The checked-in stubs are what the contract generates."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_checked_in_stubs_are_those_of_the_contract(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    subprocess.run(
        ["sh", str(ROOT / "proto" / "generate.sh"), str(tmp_path)],
        check=True,
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable},
    )
    fresh = {path.name: path.read_text() for path in (tmp_path / "baton" / "v1").iterdir()}
    ours = {path.name: path.read_text() for path in (ROOT / "baton" / "v1").glob("*_pb2*")}
    assert ours == fresh


def test_proto_is_no_package() -> None:
    assert not (ROOT / "proto" / "__init__.py").exists()
