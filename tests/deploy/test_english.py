"""`.ci/english.py` reads the names that code binds."""

import runpy
from pathlib import Path

import pytest

from tests.support.documents import ROOT

CHECK = runpy.run_path(str(ROOT / ".ci" / "english.py"))["check"]
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
    assert bool(list(CHECK(path))) == (code in REFUSED)
