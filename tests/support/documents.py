"""The commands that README and docs show, and the reasons of those that no test runs.

A command is a line of a fenced `console` block that begins with `$`, with its continuation lines. A fenced `python`
block is one command. HTML comments right before a fence say what differs from a command that runs and succeeds:

    <!-- not run: needs the network -->                             the whole block
    <!-- not run: `baton size Qwen/Qwen3-0.6B`: needs the network --> one of its commands
    <!-- exit status 1: `baton pin prefixes.jsonl` -->              one command ends with another status than 0

`problems` names comments that say nothing about any command, and reasons that are none.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMENTS = re.compile(r"(?:<!-- (?:(?!-->).)*-->\s*)+\Z", re.DOTALL)
_COMMENT = re.compile(
    r"<!-- (not run|exit status (\d+)): (?:`([^`]+)`(?:: |(?= -->)))?((?:(?!-->).)*?) ?-->", re.DOTALL
)
_NEEDS = ("the network", "a GPU", "docker", "kubectl", "several machines", "Prometheus", "vLLM")
_SHELLS = ("sh", "bash", "shell", "zsh")
_REASON = re.compile(rf"needs (?:{'|'.join(_NEEDS)})|takes (?:minutes|hours)|`tests/[\w/]+\.py` runs it")


@dataclass(frozen=True)
class Command:
    """A command of a page. `reason` says why no test runs it, or is empty."""

    line: int
    """Of its block in the page."""
    section: str
    """The heading that it stands under."""
    language: str
    text: str
    output: str
    """What the page shows after it."""
    reason: str = ""
    status: int = 0
    """Its exit status."""


@dataclass(frozen=True)
class Page:
    """The commands of a Markdown file in their order."""

    name: str
    commands: tuple[Command, ...]
    problems: tuple[str, ...]

    @property
    def run(self) -> tuple[Command, ...]:
        return tuple(command for command in self.commands if not command.reason)


def pages() -> list[Page]:
    """Return README and all pages below docs that show a command."""
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    read = [parse(str(path.relative_to(ROOT)), path.read_text()) for path in paths]
    return [page for page in read if page.commands or page.problems]


def parse(name: str, text: str) -> Page:
    commands: list[Command] = []
    problems: list[str] = []
    read = 0
    for fence in _FENCE.finditer(text):
        line = text.count("\n", 0, fence.start()) + 1
        before = text[: fence.start()]
        headings = re.findall(r"^#+ (.*)$", before, re.MULTILINE)
        block = _block(fence[1], fence[2], line, headings[-1] if headings else "")
        if fence[1] in _SHELLS or (fence[1] != "console" and re.search(r"^\$ ", fence[2], re.MULTILINE)):
            problems.append(f"{name}:{line}: commands stand in a block of the language `console`")
        marks = _COMMENTS.search(before)
        for mark in _COMMENT.finditer(marks[0] if marks else ""):
            read += 1
            block = _marked(block, mark, f"{name}:{line}", problems)
        commands += block
    if read != len(re.findall(r"<!--\s*(?:not run|exit status)", text)):
        problems.append(f"{name}: a comment `not run` or `exit status` stands before no block, or can't be read")
    return Page(name, tuple(commands), tuple(problems))


def _block(language: str, body: str, line: int, section: str) -> list[Command]:
    if language == "python":
        return [Command(line, section, language, body, "")]
    if language != "console":
        return []
    commands: list[Command] = []
    for shown in body.splitlines():
        if shown.startswith("$ "):
            commands.append(Command(line, section, language, shown.removeprefix("$ "), ""))
        elif commands and not commands[-1].output and commands[-1].text.endswith("\\"):
            commands[-1] = replace(commands[-1], text=f"{commands[-1].text}\n{shown}")
        elif commands:
            commands[-1] = replace(commands[-1], output=f"{commands[-1].output}{shown}\n")
    return commands


def _marked(commands: list[Command], mark: re.Match[str], place: str, problems: list[str]) -> list[Command]:
    """Return the block's commands with what a comment says of them."""
    kind, status, named, reason = mark[1], mark[2], mark[3], mark[4]
    meant = [command for command in commands if named is None or command.text == named]
    if not meant:
        problems.append(f"{place}: a comment names {named!r}, which the block does not show")
    if kind == "not run" and not _REASON.fullmatch(reason):
        problems.append(f"{place}: {reason!r} is no reason: {_REASON.pattern}")
    for path in re.findall(r"`(tests/[\w/]+\.py)`", reason):
        if not (ROOT / path).exists():
            problems.append(f"{place}: {path} does not exist")
    changes = {"reason": reason} if kind == "not run" else {"status": int(status)}
    return [replace(command, **changes) if command in meant else command for command in commands]
