"""The store against the limits under it: memory, the link, the disk; and how many calls a second it answers.

    bench/kvstore.py [--quick] [--directory DIR]

Every ratio is to a limit measured in the same run, moments before or after. docs/lab/benchmarks.md says what each limit
is.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import checksum, disk_speed, hand_off, peer_speed, report

SEALING = 0.7  # of copying the same bytes
VERIFYING = 0.6
PAGES = (128 * 2**10, 2**20)  # bytes


def main(argv: Sequence[str] | None = None) -> int:
    asked = parse(argv)
    report.say(report.machine())
    runs = 3 if asked.quick else 9
    for page_bytes in PAGES:
        for result in hand_offs(page_bytes, runs):
            report.emit(result)
    for result in checksums(runs):
        report.emit(result)
    for result in round_trips(300 if asked.quick else 3_000):
        report.emit(result)
    for result in peer_speed.measure(7 if asked.quick else 31):
        report.emit(result)
    for page_bytes in PAGES:
        for speed in disk_speed.measure(asked.directory, page_bytes, 2**27 if asked.quick else 2**29, runs):
            for result in disk_speed.results(speed):
                report.emit(result)
    return 0


def hand_offs(page_bytes: int, runs: int) -> list[report.Result]:
    """Ratios are medians over runs of ratios: what disturbs a run disturbs its limit as well."""
    measured = hand_off.hand_offs(page_bytes, runs)
    limit = statistics.median(run.copying for run in measured)
    results: list[report.Result] = []
    for name, target in (("sealing", SEALING), ("verifying", VERIFYING)):
        speeds = [getattr(run, name) for run in measured]
        ratio = statistics.median(speed / run.copying for speed, run in zip(speeds, measured, strict=True))
        case = f"hand-off {name}, {page_bytes // 1_024} KiB pages"
        result = report.Result("kvstore", case, statistics.median(speeds), "B/s", limit, ratio)
        results.append(report.judged(result, target, "high"))
    return results


def checksums(runs: int) -> list[report.Result]:
    """Ratios are of the tree over KV heads to one hash of the whole page."""
    results: list[report.Result] = []
    for page_bytes in PAGES:
        for hashed in checksum.measure(page_bytes, 3 * runs):
            case = f"checksum of {hashed.heads} KV heads, {page_bytes // 1_024} KiB pages"
            ratio = hashed.tree / hashed.plain
            results.append(report.Result("kvstore", case, hashed.tree, "B/s", hashed.plain, ratio))
    return results


def round_trips(calls: int) -> list[report.Result]:
    results: list[report.Result] = []
    for kind, times in hand_off.round_trips(calls).items():
        results.append(report.Result("kvstore", f"{kind}, calls", 1 / statistics.median(times), "1/s"))
        results.append(report.Result("kvstore", f"{kind}, p99", hand_off.percentile(times, 0.99), "s"))
    return results


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller runs")
    parser.add_argument("--directory", type=Path, default=Path(), help="where the disk is measured (default: here)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
