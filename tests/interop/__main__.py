"""Run suites of other projects' clients against a cluster: `python -m tests.interop [SUITE…] [--report FILE]`.

Each suite has a virtual environment of its own. All of them speak to one cluster of real processes, 1P+1D. With
`--report`, the result of every suite is written there; it is complete only if no suite is named.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from tests.interop import environment as environments
from tests.interop import report, target
from tests.interop.catalog import SUITES, Suite
from tests.interop.result import Case, SuiteResult
from tests.interop.target import Target


def main(argv: list[str]) -> int:
    """Run the suites; 1 if a case has failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.interop", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(SUITES)}; none: all")
    parser.add_argument("--report", type=Path, help="write the result there, as Markdown")
    asked = parser.parse_args(argv)
    if strange := set(asked.suites) - set(SUITES):
        parser.error(f"there is no suite {', '.join(sorted(strange))}; there are {', '.join(SUITES)}")
    wanted = [SUITES[name] for name in asked.suites or SUITES]
    results, commit = dict[str, SuiteResult](), report.commit_here()
    with tempfile.TemporaryDirectory(prefix="baton-interop-") as scratch:
        folder = Path(scratch)
        model = target.make_checkpoint(folder / "model")
        with target.cluster(model, folder / "cluster") as running:
            for suite in wanted:
                results[suite.name] = _run(suite, running, folder / suite.name)
                _say(suite, results[suite.name])
    if asked.report:
        asked.report.write_text(report.render({suite.name: suite for suite in wanted}, results, commit))
    return int(any(result.count("failed") for result in results.values()))


def _run(suite: Suite, running: Target, scratch: Path) -> SuiteResult:
    """Run a suite. What keeps it from running counts as a failure."""
    began = time.monotonic()
    versions: list[str] = []
    try:
        environment = environments.make(
            suite.name, suite.requirements, scratch, suite.seconds, needs_torch=suite.needs_torch
        )
        versions = environment.versions(suite.packages)
        began = time.monotonic()
        result = suite.run(running, environment)
    except Exception as error:  # noqa: BLE001 a suite that breaks is a result, and the others still run
        result = SuiteResult([Case.failed(suite.name, f"{type(error).__name__}: {error}")])
    return replace(result, versions=versions, seconds=time.monotonic() - began)


def _say(suite: Suite, result: SuiteResult) -> None:
    counts = ", ".join(f"{result.count(outcome)} {outcome}" for outcome in ("passed", "failed", "skipped"))
    print(f"{suite.name} ({', '.join(result.versions)}): {counts} in {result.seconds:.0f} s", flush=True)
    for case in result.cases:
        if case.outcome == "failed":
            print(f"  FAILED {case.name}: {case.reason}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
