"""Run suites of other projects' clients against a cluster: `python -m tests.interop [SUITE…] [--report FILE]`.

Each suite has a virtual environment of its own. All of them speak to one cluster of real processes, 1P+1D. With
`--report`, the result of every suite is written there; it is complete only if no suite is named.

`--quick` runs those that fit into five minutes. A suite then uses this process's own environment where that has its
packages. If no package index answers, or the time is over, a suite is printed as NOT RUN, which is no failure.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

from tests.interop import environment as environments
from tests.interop import report, target
from tests.interop.catalog import QUICK, QUICK_SECONDS, SUITES, Suite
from tests.interop.environment import Environment, IndexUnreachable, SuiteTimeout
from tests.interop.result import Case, SuiteResult, one_line
from tests.interop.target import Target

_LEAST_LEFT = 60.0
"""Seconds of a quick run that must be left for a suite to begin. The longest takes half of that on two idle cores."""

_ENOUGH = 180.0
"""A suite that does not end within so many seconds has failed, also on a machine that does much else."""


class NoTimeLeft(Exception):
    """A quick run is about to end."""


def main(argv: list[str]) -> int:
    """Run the suites; 1 if a case has failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.interop", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(SUITES)}; none: all")
    parser.add_argument("--report", type=Path, help="write the result there, as Markdown")
    parser.add_argument("--quick", action="store_true", help=f"run {', '.join(QUICK)}, within five minutes")
    options = parser.parse_args(argv)
    if strange := set(options.suites) - set(SUITES):
        parser.error(f"there is no suite {', '.join(sorted(strange))}; there are {', '.join(SUITES)}")
    suites = [SUITES[name] for name in options.suites or (QUICK if options.quick else SUITES)]
    commit = report.commit_here()
    results = run_all(suites, time.monotonic() + QUICK_SECONDS if options.quick else None)
    if options.report:
        options.report.write_text(report.render({suite.name: suite for suite in suites}, results, commit))
    return int(any(result.count("failed") for result in results.values()))


def run_all(suites: Sequence[Suite], until: float | None) -> dict[str, SuiteResult]:
    """Run suites, each once its environment is there, while those of the next are made. `until`, on the monotonic
    clock, is the end of a quick run."""
    results = dict[str, SuiteResult]()
    with tempfile.TemporaryDirectory(prefix="baton-interop-") as scratch, ThreadPoolExecutor(1) as installer:
        folder = Path(scratch)
        futures = {installer.submit(prepare, suite, folder / suite.name, until): suite for suite in suites}
        model = target.make_checkpoint(folder / "model")
        with target.cluster(model, folder / "cluster") as running:
            while futures:
                done = wait(futures, return_when=FIRST_COMPLETED).done
                ready = next(one for one in futures if one in done)
                suite = futures.pop(ready)
                results[suite.name] = run_suite(suite, running, ready, until)
                say(suite, results[suite.name])
    return {suite.name: results[suite.name] for suite in suites}


def prepare(suite: Suite, scratch: Path, until: float | None) -> Environment:
    """Return the environment of a suite. Raises InstallError and NoTimeLeft."""
    own = environments.here(suite.requirements, scratch, suite.seconds)
    if own is not None and not suite.requirements:
        new = own
    elif until is None:
        new = environments.make(suite.name, suite.requirements, scratch, suite.seconds, needs_torch=suite.needs_torch)
    elif own is not None:
        return own
    else:
        new = environments.make(suite.name, suite.requirements, scratch, _left(until), patience=_left(until))
    if suite.npm:
        environments.install_npm(suite.name, suite.npm, new)
    if suite.fetch is not None:
        suite.fetch(new if until is None else replace(new, seconds=_left(until)))
    return new


def run_suite(suite: Suite, running: Target, ready: Future[Environment], until: float | None) -> SuiteResult:
    """Run a suite. What keeps it from running counts as a failure, except where a quick run allows it."""
    began = time.monotonic()
    versions: list[str] = []
    seconds = suite.seconds
    try:
        environment = ready.result()
        if until is not None:
            seconds = min(suite.seconds, _left(until))
            environment = replace(environment, seconds=seconds)
        versions = [*suite.npm, *environment.versions(suite.packages)]
        began = time.monotonic()
        result = suite.run(running, environment)
    except SuiteTimeout as error:
        reason = f"{suite.name} had {seconds:.0f} s: {error}"
        slow = until is not None and seconds < _ENOUGH
        result = SuiteResult([], not_run=reason) if slow else SuiteResult([Case.failed(suite.name, reason)])
    except (IndexUnreachable, NoTimeLeft) as error:
        reason = one_line(str(error))
        failed = SuiteResult([Case.failed(suite.name, reason)])
        result = failed if until is None and suite.requirements else SuiteResult([], not_run=reason)
    except Exception as error:  # noqa: BLE001 a suite that breaks is a result, and the others still run
        result = SuiteResult([Case.failed(suite.name, f"{type(error).__name__}: {error}")])
    return replace(result, versions=versions, seconds=time.monotonic() - began)


def _left(until: float) -> float:
    """Return the seconds that are left. Raises NoTimeLeft."""
    if (left := until - time.monotonic()) < _LEAST_LEFT:
        raise NoTimeLeft(f"{max(0.0, left):.0f} s are left of {QUICK_SECONDS:.0f} s, too few to begin")
    return left


def say(suite: Suite, result: SuiteResult) -> None:
    if result.not_run:
        print(f"{suite.name} NOT RUN: {result.not_run}", flush=True)
        return
    counts = ", ".join(f"{result.count(outcome)} {outcome}" for outcome in ("passed", "failed", "skipped"))
    print(f"{suite.name} ({', '.join(result.versions)}): {counts} in {result.seconds:.0f} s", flush=True)
    for case in result.cases:
        if case.outcome == "failed":
            print(f"  FAILED {case.name}: {case.reason}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
