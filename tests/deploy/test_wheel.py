"""The built wheel holds what the tree's packages hold, and nothing else."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {"baton", "engine", "kvstore", "router", "prefill_worker", "decode_worker", "worker", "simulator", "deploy"}


def test_the_wheel_is_the_tree(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "baton = deploy.__main__:main" in archive.read(entry_points).decode()
    listed = subprocess.run(
        ["git", "ls-files", *sorted(PACKAGES)], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
    )
    assert names == set(listed.stdout.split())
    assert not (ROOT / "proto" / "__init__.py").exists()  # ray[default] owns that import name
