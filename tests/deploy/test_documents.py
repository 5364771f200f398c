"""What pages say of their commands is true. `tests/cluster/test_documents.py` runs every command without a reason."""

import importlib
import re
import runpy
import shlex
from pathlib import Path

import pytest

from baton.config import Config
from tests.support import documents
from tests.support.documents import ROOT, Command, Page

READ = documents.pages()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
REFERENCE = runpy.run_path(str(ROOT / ".ci" / "cli_reference.py"))


@pytest.mark.parametrize("page", READ, ids=lambda page: page.name)
def test_what_comments_say_of_commands_is_true(page: Page):
    assert not page.problems


@pytest.mark.parametrize("page", READ, ids=lambda page: page.name)
def test_scripts_of_commands_that_take_too_long_have_their_flags(page: Page):
    for command in page.commands:
        if command.reason.startswith("takes") and (script := _script(command)):
            text = (ROOT / script).read_text()
            for flag in re.findall(r"(?<!\S)--[\w-]+", command.text.partition("#")[0]):
                assert f'"{flag}"' in text, f"{page.name}: {script} has no {flag}"


@pytest.mark.parametrize("page", READ, ids=lambda page: page.name)
def test_baton_commands_that_are_not_run_parse(page: Page):
    known = dict(REFERENCE["commands"]())
    for command in page.commands:
        if command.reason and command.text.startswith("baton "):
            words = shlex.split(command.text, comments=True)
            name = max((name for name in known if words[: len(name.split())] == name.split()), key=len)
            known[name].make_context(name, words[len(name.split()) :])


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading_of_it(page: Path):
    for file, heading in re.findall(r"\]\((?!\w+:)([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        target = page.parent / file if file else page
        assert target.exists(), file
        assert not heading or heading in _headings(target), f"{file}#{heading}"


def _headings(page: Path) -> set[str]:
    """The names by which GitHub links to the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


_FILES = ("cpp", "key", "json", "log", "md", "py", "yaml")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_setting_that_a_page_names_exists(page: Path):
    for section, setting in re.findall(r"(?:`|--set[= ])([a-z_]+)\.([a-z_]+)(?=[`:=])", page.read_text()):
        if hasattr(Config(), section) and setting not in _FILES:
            assert hasattr(getattr(Config(), section), setting), f"{section}.{setting} is no setting"


@pytest.mark.parametrize(
    "page", sorted({*PAGES} - {ROOT / "CHANGELOG.md"}), ids=lambda path: str(path.relative_to(ROOT))
)
def test_every_module_of_bench_and_tools_that_a_page_names_exists(page: Path):
    """Scripts that are gone are named with the commit that has them."""
    for name in re.findall(r"(?<![0-9a-f]{7}:)\b(?:bench|tools)[./][a-z][\w./]*\w", page.read_text()):
        path = ROOT / name.removesuffix(".py").replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file(), name


def test_each_script_of_bench_stands_in_the_table_of_questions():
    table = (ROOT / "docs" / "benchmarks.md").read_text().partition("## How to repeat it")[2].partition("###")[0]
    for path in (ROOT / "bench").rglob("*.py"):
        if "argparse.ArgumentParser(" in path.read_text():
            assert f"`{'.'.join(path.relative_to(ROOT).with_suffix('').parts)}`" in table, path


def test_the_glossary_lists_the_fields_of_a_request_on_its_way():
    rows = re.findall(r"^\|.*\|$", (ROOT / "docs" / "glossary.md").read_text().partition("## From a request")[2], re.M)
    head, _, *cells = ([re.findall(r"`(.+?)`", cell) for cell in row.split("|")[2:-1]] for row in rows)
    for column, (name, path) in enumerate(head):
        struct = getattr(importlib.import_module(path.removesuffix(".py").replace("/", ".")), name)
        fields = [field for row in cells for field in row[column]]
        own = getattr(struct, "__struct_fields__", struct.__annotations__)  # a message has fields of its base, too
        assert sorted(fields) == sorted(own), f"{name} in docs/glossary.md"


def test_install_is_two_commands_and_one_of_them_runs_the_tests():
    (readme,) = (page for page in READ if page.name == "README.md")
    commands = [command.text for command in readme.commands if command.section == "Install"]
    assert commands[1:3] == ["make demo", "make test"]
    assert commands[0].startswith("git clone")


def test_every_reason_of_an_example_is_used():
    shown = {line for _, command in REFERENCE["commands"]() for line in REFERENCE["examples"](command)}
    assert set(REFERENCE["NOT_RUN"]) <= shown


def _script(command: Command) -> str:
    """Return the file of a command like `python x.py` or `python -m bench.x`."""
    words = shlex.split(command.text, comments=True)
    if words[0].rpartition("/")[2] != "python":
        return ""
    return words[1] if words[1] != "-m" else f"{words[2].replace('.', '/')}.py"


def test_a_page_is_read_as_it_is_typed():
    page = documents.parse(
        "x.md",
        "# One\n\n```console\n$ a \\\n    b\nshown\n$ c\n```\n\n## Two\n\n<!-- not run: `d`: needs a GPU -->\n"
        "<!-- exit status 1: `e` -->\n\n```console\n$ d\n$ e\n```\n\n<!-- not run: `tests/conftest.py` runs it -->\n"
        "```python\nf()\n```\n",
    )
    assert page.problems == ()
    assert [(c.section, c.text, c.output, c.reason, c.status) for c in page.commands] == [
        ("One", "a \\\n    b", "shown\n", "", 0),
        ("One", "c", "", "", 0),
        ("Two", "d", "", "needs a GPU", 0),
        ("Two", "e", "", "", 1),
        ("Two", "f()\n", "", "`tests/conftest.py` runs it", 0),
    ]


@pytest.mark.parametrize(
    ("comment", "problem"),
    [
        ("not run: `b`: needs a GPU", "which the block does not show"),
        ("not run: no time", "is no reason"),
        ("not run: `tests/none.py` runs it", "does not exist"),
        ("exit status 1: `b`", "which the block does not show"),
        ("not run:needs a GPU", "can't be read"),
    ],
)
def test_a_comment_that_is_wrong_is_told(comment: str, problem: str):
    page = documents.parse("x.md", f"<!-- {comment} -->\n```console\n$ a\n```\n")
    assert problem in "".join(page.problems)


@pytest.mark.parametrize(
    "text",
    ["<!-- not run: needs a GPU -->\n\ntext\n\n```console\n$ a\n```\n", "```bash\na\n```\n", "```\n$ a\n```\n"],
    ids=["a comment before no block", "a shell's block", "a prompt in another block"],
)
def test_commands_that_no_test_would_see_are_told(text: str):
    assert documents.parse("x.md", text).problems
