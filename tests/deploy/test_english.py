"""`.ci/english.py` reads the names that code binds, and those of files of tests."""

import runpy
from pathlib import Path

import pytest

from tests.support.documents import ROOT

ENGLISH = runpy.run_path(str(ROOT / ".ci" / "english.py"))
REFUSED = """
asked = 1
def f(told_of): ...
class _Found: ...
self.pages_wanted += 1
match x: case [*said]: ...
def test_nobody_waits(): ...
"""
ACCEPTED = """
kept_pages = 1
def is_kept(not_found): ...
def test_a_page_is_found(): ...
self.whole = told.whole
"""


@pytest.mark.parametrize("code", [*REFUSED.strip().splitlines(), *ACCEPTED.strip().splitlines()])
def test_names(tmp_path: Path, code: str):
    path = tmp_path / "module.py"
    path.write_text(code.replace(": case", ":\n    case") + "\n")
    assert bool(list(ENGLISH["check"](path))) == (code in REFUSED)


@pytest.mark.parametrize(
    ("path", "right"),
    [
        ("tests/router/test_state.py", True),
        ("tests/router/chat/test_parser.py", True),
        ("tests/router/test_state_faults.py", True),
        ("tests/router/test_stately.py", False),
        ("tests/router/test_router_faults.py", False),
        ("tests/processes/test_ipv6.py", True),
        ("tests/engine/test_engine_gpu.py", True),
    ],
)
def test_files_of_tests_bear_the_names_of_modules(path: str, right: bool):
    assert ENGLISH["is_named_by_module"](Path(path)) == right


def test_each_file_without_a_modules_name_exists():
    assert all(list(ROOT.glob(f"tests/*/{name}.py")) for name in ENGLISH["TESTS_OF_SEVERAL"])
