"""docs/conformance.md: what the suites found."""

import datetime
import platform
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping

from tests.interop.catalog import Suite
from tests.interop.environment import ROOT
from tests.interop.result import SuiteResult

_HEAD = """\
# Conformance

`make interop` writes this page. Clients and suites of other projects run against a cluster of real processes (1 prefill
worker, 1 decode worker, 1 store, 1 router), which serves a random checkpoint with 512 tokens of context in float32.
Each suite has a virtual environment of its own. `make interop SUITES="openai anthropic"` runs some and writes nothing.

A test that must be refused counts as skipped if it is refused as its reason says, and as failed otherwise.
"""


def render(suites: Mapping[str, Suite], results: Mapping[str, SuiteResult], commit: str) -> str:
    """Return the page. `commit` is what was run."""
    lines = [_HEAD, f"Run on {_today()} with commit `{commit}`, Python {platform.python_version()}.", ""]
    lines += ["| suite | version | passed | failed | skipped |", "|---|---|---|---|---|"]
    for name, result in results.items():
        counts = " | ".join(str(result.count(outcome)) for outcome in ("passed", "failed", "skipped"))
        lines.append(f"| [{name}](#{name}) | {', '.join(result.versions)} | {counts} |")
    for name, result in results.items():
        lines += ["", *_section(suites[name], result)]
    return "\n".join(lines) + "\n"


def _section(suite: Suite, result: SuiteResult) -> Iterator[str]:
    yield f"## {suite.name}"
    yield ""
    yield f"Runs {suite.about}."
    for note in result.notes:
        yield f"- {note}" if note is not result.notes[0] else f"\n- {note}"
    failed = [case for case in result.cases if case.outcome == "failed"]
    if failed:
        yield from ("", "| failed | why |", "|---|---|")
        yield from (f"| `{_cell(case.name)}` | `{_cell(case.reason)}` |" for case in failed)
    skipped = Counter(case.reason for case in result.cases if case.outcome == "skipped")
    if skipped:
        yield from ("", "| skipped | reason |", "|---|---|")
        yield from (f"| {count} | {_cell(reason)} |" for reason, count in skipped.items())


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("`", "'")


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def commit_here() -> str:
    argv = ["git", "-C", str(ROOT), "rev-parse", "--short=10", "HEAD"]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=10).stdout.strip() or "unknown"
