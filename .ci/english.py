"""Check the English of documents, docstrings, comments and names: `python .ci/english.py [PATH…]`; see CONTRIBUTING.md.

- No word that speaks of a process, a request or a page as of a person: see `PEOPLE`. Names of tests are read too.
- No sentence of more than `MOST_WORDS` words. A semicolon ends a sentence.
- No name that code binds ends in a participle (`asked`, `pages_wanted`), with or without an adverb (`_told_of`): that
  says not what the thing is. After a form of be, have or not (`is_kept`) and before a noun (`kept_pages`) it may stand.
- A file of tests bears the name of a module or folder of its package, `tests/router/test_state_faults.py` that of
  `router/state.py`. `TESTS_OF_SEVERAL` lists the others. A folder of tests without a package has names of its own.

Code in backticks, fenced and indented blocks, and drawings are not read. Names of tests are sentences.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PEOPLE = re.compile(r"\b(who|whom|whoever|nobody|somebody|everybody)\b", re.IGNORECASE)
MOST_WORDS = 35
PARTICIPLE = re.compile(
    r"(?:^|_)(?:asked|told|wanted|said|given|made|taken|found|kept)"
    r"(?:_(?:again|anew|as|at|away|back|before|by|for|from|here|in|now|of|off|on|out|over|to|up|with))*$"
)
_VERB = re.compile(r"(?:^|_)(?:is|are|was|were|be|been|being|has|have|had|not)_")
# Of documents and scripts, of the tests' own tools, and of workers, stores or files of several packages together.
TESTS_OF_SEVERAL = frozenset(
    {"test_documents", "test_english", "test_test_runs", "test_vllm_upgrade", "test_wheel", "test_fuzzer"}
    | {"test_reference", "test_hand_off", "test_overlapped", "test_window_groups", "test_simulator"}
    | {"test_way_of_a_chat"}
)
_NAMES_OF_OTHERS = frozenset({"connection_made", "pages_found"})  # asyncio calls it; a column of the dashboard's page

_ROOT = Path(__file__).parents[1]
_DRAWING = re.compile(r"[─│┌┐└┘├┤┬┴┼▶◀▲▼⇄═║]")
_ITEM = re.compile(r"\s*(?:[-*+]|\d+\.)\s+")
_HEADING = re.compile(r"\s*(?:#+\s|[-=~]{3,}\s*$)")
_SENTENCE = re.compile(r"(?<=[.!?;])[\"')\]]*\s+|;\s+")
_ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|cf|vs|al|etc|approx|Fig|No)\.$")

Text = tuple[int, str]  # line, text


def main(paths: list[str]) -> int:
    """Print what is wrong, a line each; 1 if there is anything."""
    problems = 0
    for path in paths or _tracked():
        for line, problem in check(Path(path)):
            print(f"{path}:{line}: {problem}")
            problems += 1
    if problems:
        print(f"{problems} sentences and names to mend: see CONTRIBUTING.md")
    return int(problems > 0)


def check(path: Path) -> Iterator[Text]:
    """What is wrong with a file, with its line."""
    text = path.read_text()
    blocks = _paragraphs(text.split("\n"), 1) if path.suffix == ".md" else _python(text)
    if path.suffix == ".py":
        if not is_named_by_module(path):
            yield 1, f"{path.name}: test_MODULE.py or test_MODULE_ASPECT.py, with a module or folder of its package"
        yield from ((line, problem) for line, name in _names(ast.parse(text)) if (problem := _wrong_name(name)))
    for line, paragraph in blocks:
        plain = re.sub(r"``[^`]+``|`[^`]+`|\[([^\]]*)\]\([^)]*\)", lambda m: m[1] or "CODE", paragraph)
        for word in PEOPLE.findall(plain):
            yield line, f"{word!r}: name the process, request or page: {_short(plain)}"
        for sentence in _sentences(plain):
            words = [word for word in sentence.split() if re.search(r"\w", word)]
            if len(words) > MOST_WORDS:
                yield line, f"{len(words)} words in a sentence: {_short(sentence)}"


def is_named_by_module(path: Path) -> bool:
    """Whether a file of tests bears the name of a module or folder of its package, or need not."""
    if path.parts[0] != "tests" or not path.stem.startswith("test_") or path.stem in TESTS_OF_SEVERAL:
        return True
    modules = _modules(path.parts[1])
    return not modules or any(f"{path.stem}_".startswith(f"test_{module}_") for module in modules)


@cache
def _modules(package: str) -> frozenset[str]:
    listing = subprocess.run(["git", "ls-files", package], cwd=_ROOT, capture_output=True, text=True, check=True)  # noqa: S603, S607
    return frozenset(part.partition(".")[0] for path in listing.stdout.split() for part in Path(path).parts[1:])


def _names(tree: ast.AST) -> Iterator[Text]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.ExceptHandler(name=str(name)):
                yield node.lineno, name
            case ast.alias(asname=str(name)):
                yield node.lineno, name


def _wrong_name(name: str) -> str:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().rstrip("_")
    if words.startswith("test_") or not PARTICIPLE.search(words) or _VERB.search(words) or name in _NAMES_OF_OTHERS:
        return ""
    return f"{name}: a participle is no noun; name the thing"


def _sentences(paragraph: str) -> Iterator[str]:
    held = ""
    for part in _SENTENCE.split(paragraph):
        held = f"{held} {part}".strip()
        if not _ABBREVIATION.search(held):
            yield held
            held = ""
    if held:
        yield held


def _python(text: str) -> Iterator[Text]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from _paragraphs(_dedented(node.value.value), node.lineno)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield node.lineno, node.name.replace("_", " ")
    comment: list[str] = []
    begin = last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or re.match(r"#\s*(?:type:|noqa|pyright|fmt:|!|---)", token.string):
            continue
        words = token.string.lstrip("#").strip()
        alone = token.line.lstrip().startswith("#")
        if comment and alone and token.start[0] == last + 1:
            comment.append(words)
        else:
            yield from _paragraphs(comment, begin)
            comment, begin = [words], token.start[0]
        last = token.start[0] if alone else -1
    yield from _paragraphs(comment, begin)


def _dedented(docstring: str) -> list[str]:
    first, *rest = docstring.split("\n")
    indent = min((len(line) - len(line.lstrip()) for line in rest if line.strip()), default=0)
    return [first, *(line[indent:] for line in rest)]


def _paragraphs(lines: list[str], begin: int) -> Iterator[Text]:
    """Prose, a paragraph, list item or table cell each."""
    held: list[str] = []
    start = begin
    fenced = False
    for number, line in enumerate(lines, begin):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        code = fenced or line.startswith("```") or _DRAWING.search(line) or (line.startswith("    ") and not held)
        ends = code or not line.strip() or _HEADING.match(line) or line.lstrip().startswith("|") or _ITEM.match(line)
        if ends and held:
            yield start, " ".join(held)
            held = []
        if code or not line.strip() or line.lstrip().startswith("```"):
            continue
        if line.lstrip().startswith("|"):
            yield from ((number, cell.strip()) for cell in line.strip().strip("|").split(" | "))
            continue
        if _HEADING.match(line):
            yield number, line.lstrip("# ")
            continue
        if not held:
            start = number
        held.append(_ITEM.sub("", line.strip(), count=1) if _ITEM.match(line) else line.strip())
    if held:
        yield start, " ".join(held)


def _short(text: str) -> str:
    return text if len(text) <= 90 else text[:87] + "…"


def _tracked() -> list[str]:
    listing = subprocess.run(["git", "ls-files", "*.md", "*.py"], cwd=_ROOT, capture_output=True, text=True, check=True)  # noqa: S607
    return [path for path in listing.stdout.split() if not path.startswith("baton/v1/")]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
