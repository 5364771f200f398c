"""What a suite found: its cases, and how it was run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias
from xml.etree import ElementTree

Outcome: TypeAlias = Literal["passed", "failed", "skipped"]
_SHORT = 20  # characters of a message that says too little alone
_LONGEST = 400  # characters of a reason


class SuiteBroken(Exception):
    """A suite could not be run to its end."""


@dataclass(frozen=True)
class Case:
    name: str
    outcome: Outcome
    reason: str = ""

    @classmethod
    def failed(cls, name: str, reason: str) -> Case:
        return cls(name, "failed", one_line(reason))

    @classmethod
    def skipped(cls, name: str, reason: str) -> Case:
        return cls(name, "skipped", one_line(reason))


@dataclass(frozen=True)
class SuiteResult:
    cases: Sequence[Case]
    notes: Sequence[str] = field(default_factory=tuple)  # what the report says besides: figures, limits
    versions: Sequence[str] = field(default_factory=tuple)  # "package version", filled in by the runner
    seconds: float = 0.0
    not_run: str = ""  # why the suite was not run, where that is no failure

    def count(self, outcome: Outcome) -> int:
        return sum(case.outcome == outcome for case in self.cases)


def one_line(text: str) -> str:
    """A text as one line of bounded length."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"


def read_junit(file: Path) -> list[Case]:
    """The cases of a JUnit report, as pytest and schemathesis write it."""
    cases = list[Case]()
    for element in ElementTree.parse(file).iter("testcase"):
        name = f"{element.get('classname', '')}::{element.get('name', '')}".removeprefix("::")
        failure = next((one for kind in ("failure", "error") if (one := element.find(kind)) is not None), None)
        skipped = element.find("skipped")
        if failure is not None:
            cases.append(Case.failed(name, _text(failure)))
        elif skipped is not None:
            cases.append(Case.skipped(name, _text(skipped)))
        else:
            cases.append(Case(name, "passed"))
    return cases


def _text(element: ElementTree.Element) -> str:
    message, text = element.get("message") or "", element.text or ""
    return f"{message} {text}" if len(message) < _SHORT else message
