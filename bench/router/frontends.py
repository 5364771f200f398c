"""Measure what the doors cost: beside each other on one cluster, and by themselves beside vLLM's own front.

    python -m bench.router.frontends [--rounds N] [--streams N] [--quick] [--only cluster|speed|rate|chats]
    python -m bench.router.frontends --prepare    # once: vLLM's environment, 5 minutes and 3.8 GB

`cluster`: a colocated cluster serves eight streams at a time, by each door in turns, to clients in another process. The
ratios are of medians over the rounds: a door's time to first token and gap between tokens over those of `baton.v1`.

In the other parts each front stands by itself, in a process on one core, before an engine that computes nothing. The
clients run on another core, and the fronts take turns. vLLM's front is left out where its environment is not.

`speed`: as fast as they can. Each of 64 streams gets its next token when the front has taken the one before. The
figures are tokens for each second of the front's CPU time, and tokens a second as the clients see them.

`rate`: 8 and 64 streams with a token each every 10 ms. The figures are time to first token, gap between tokens, and the
share of its core that the front takes.

`chats`: agents' conversations with prompts of 60,000 tokens, which are tokenized, beside vLLM's fronts in Python and in
Rust (`vllm-rs`). The figures are requests for each second of the front's CPU time, its helper processes included, and
the time to the end of an answer of one token. First turns are new to the front; further ones add 2 % to the last.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Collection, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

from bench import clusters, models, processes, report
from bench.peers import environments
from bench.peers.adapter import PeerFailed
from bench.peers.environments import VLLM, NotPrepared
from bench.router import fronts
from bench.router.front_clients import Client, Order, Stream, StreamFailed
from bench.router.fronts import Front
from deploy.load.figures import percentile

TARGET = 1.10
TARGET_TOKENS = 10_000
_DOORS = {"http": "HTTP", "grpc": "gRPC"}
_PARTS = ("cluster", "speed", "rate", "chats")
_RUST = "vLLM's HTTP in Rust"
_PEER, _PEER_LOGGING = "vLLM's HTTP", "vLLM's HTTP with its statistics"
_OUTPUT = 200  # tokens of a stream
_MANY = 64  # streams
_SESSIONS, _TURNS = 4, 6  # chats at a time, and turns of each
_INTERVAL = 0.01  # seconds between two tokens of a stream, where they come at one rate


# --- a cluster --------------------------------------------------------------------------------------------------------


def against_grpc(client: Client, model: Path, rounds: int, streams: int, count: int) -> None:
    """The doors in turns on one cluster."""
    firsts: dict[str, list[float]] = {door: [] for door in _DOORS}
    gaps: dict[str, list[float]] = {door: [] for door in _DOORS}
    with clusters.local(model, 0, 1, {"decode.kv_cache_bytes": "64MiB"}) as running:
        assert running.addresses is not None
        for number in range(rounds + 1):
            for door in _DOORS:
                address = running.addresses.api if door == "http" else running.addresses.grpc
                results = client.round(Order(door, address, streams, count))
                if number:  # the first round warms up
                    firsts[door].append(_first(results))
                    gaps[door].append(statistics.median(_gaps(results)))
    for case, values in (("TTFT", firsts), ("ITL", gaps)):
        _compare(f"HTTP {case}, {streams} streams", "ms", values["http"], values["grpc"], TARGET, "low", 1e3)


# --- fronts by themselves ---------------------------------------------------------------------------------------------


@dataclass
class Figures:
    """A front's figures, one of each round."""

    per_cpu_second: list[float] = field(default_factory=list[float])  # tokens
    per_second: list[float] = field(default_factory=list[float])  # tokens
    share: list[float] = field(default_factory=list[float])  # of a core
    first: list[float] = field(default_factory=list[float])  # seconds, median of the streams
    gap: list[float] = field(default_factory=list[float])  # seconds, median
    late_gap: list[float] = field(default_factory=list[float])  # seconds, 99th percentile


def take_turns(client: Client, running: Sequence[Front], rounds: int, order: Order) -> dict[str, Figures]:
    """The same streams from each front, by name, round by round."""
    figures_by_front = {front.name: Figures() for front in running}
    for number in range(rounds + 1):
        for front in running:
            before = front.cpu_seconds()
            results = client.round(Order(front.door, front.address, order.streams, order.count))
            used = front.cpu_seconds() - before
            tokens = order.count * len(results)
            seconds = max(stream.times[-1] for stream in results) - min(stream.began for stream in results)
            if number:  # the first round warms up
                figures = figures_by_front[front.name]
                figures.per_cpu_second.append(tokens / used)
                figures.per_second.append(tokens / seconds)
                figures.share.append(used / seconds)
                figures.first.append(_first(results))
                figures.gap.append(statistics.median(_gaps(results)))
                figures.late_gap.append(percentile(_gaps(results), 99))
    return figures_by_front


def at_full_speed(client: Client, running: Sequence[Front], rounds: int, count: int) -> None:
    """Every front as fast as it can."""
    for front in running:
        front.pace(None)
    figures_by_front = take_turns(client, running, rounds, Order("", "", _MANY, count))
    for name, figures in figures_by_front.items():
        case = f"{name} alone, {_MANY} streams"
        if name in _DOORS.values():
            rate = statistics.median(figures.per_cpu_second)
            result = report.Result(
                "frontends", case, rate, "tokens/CPU-s", limit=TARGET_TOKENS, ratio=rate / TARGET_TOKENS,
                runs=tuple(figures.per_cpu_second),
            )  # fmt: skip
            report.emit(report.judged(result, 1.0, "high"))
        else:
            report.emit(report.median_of("frontends", case, "tokens/CPU-s", figures.per_cpu_second))
        report.emit(report.median_of("frontends", f"{case}, by the clock", "tokens/s", figures.per_second))
    ours = figures_by_front["HTTP"]
    for peer in (name for name in (_PEER, _PEER_LOGGING) if name in figures_by_front):
        case = f"HTTP over {peer}, {_MANY} streams"
        _compare(case, "tokens/CPU-s", ours.per_cpu_second, figures_by_front[peer].per_cpu_second, 1.0, "high")
        _compare(f"{case}, by the clock", "tokens/s", ours.per_second, figures_by_front[peer].per_second, 1.0, "high")


def at_one_rate(client: Client, running: Sequence[Front], rounds: int, count: int) -> None:
    """The HTTP fronts at the same rate of tokens."""
    for front in running:
        front.pace(_INTERVAL)
    for streams in (8, _MANY):
        figures_by_front = take_turns(client, running, rounds, Order("", "", streams, count))
        load = f"{streams} streams, a token every {_INTERVAL * 1e3:g} ms"
        for name, figures in figures_by_front.items():
            for case, values in (("TTFT", figures.first), ("ITL p50", figures.gap), ("ITL p99", figures.late_gap)):
                milliseconds = [value * 1e3 for value in values]
                report.emit(report.median_of("frontends", f"{name} alone {case}, {load}", "ms", milliseconds))
            report.emit(report.median_of("frontends", f"{name} alone, {load}", "of a core", figures.share))
        if _PEER in figures_by_front:
            ours, theirs = figures_by_front["HTTP"], figures_by_front[_PEER]
            _compare(f"HTTP over {_PEER} TTFT, {load}", "ms", ours.first, theirs.first, 1.0, "low", 1e3)
            _compare(f"HTTP over {_PEER} ITL p99, {load}", "ms", ours.late_gap, theirs.late_gap, TARGET, "low", 1e3)
            _compare(f"HTTP over {_PEER}, {load}", "of a core", ours.share, theirs.share, 1.0, "low")


def alone(client: Client, model: Path, parts: Collection[str], rounds: int, count: int, peers: Path) -> None:
    """All fronts by themselves. Raises PeerFailed."""
    available = os.sched_getaffinity(0)
    processes.pin(client.pid, {min(available)})
    words = fronts.words(model)
    with ExitStack() as stack:
        http, grpc = (fronts.baton(door, model, words, stack) for door in ("http", "grpc"))
        running = [Front("HTTP", "http", http), Front("gRPC", "grpc", grpc)]
        if environments.prepared(VLLM, peers):
            report.say(f"starting {VLLM.partial}")
            for name, options in ((_PEER, ("--disable-log-stats",)), (_PEER_LOGGING, ())):
                running.append(Front(name, "http", fronts.vllm(model, words, peers, stack, *options)))
        else:
            report.say(f"not beside vLLM: it is not in {VLLM.folder(peers)}; --prepare installs it")
        for front in running:
            front.pin(min(available), max(available))
        if "speed" in parts:
            at_full_speed(client, running, rounds, count)
        if "rate" in parts:
            at_one_rate(client, [front for front in running if front.name in ("HTTP", _PEER)], rounds, count)


def long_chats(client: Client, rounds: int, peers: Path) -> None:
    """Conversations of 60,000 tokens. Raises PeerFailed."""
    available = os.sched_getaffinity(0)
    processes.pin(client.pid, {min(available)})
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = fronts.chat_model(Path(folder))
        words = fronts.words(model)
        running = [Front("HTTP", "http", fronts.baton("http", model, words, stack))]
        if environments.prepared(VLLM, peers):
            running.append(Front(_PEER, "http", fronts.vllm(model, words, peers, stack, "--disable-log-stats")))
        if environments.vllm_rust(peers).exists():
            running.append(Front(_RUST, "http", fronts.vllm_rust(model, words, peers, stack)))
        rates: dict[str, dict[str, list[float]]] = {case: {} for case in ("first turns", "further turns")}
        times: dict[str, dict[str, list[float]]] = {case: {} for case in rates}
        for front in running:
            front.pin(min(available), max(available))
        for number in range(rounds + 1):
            chats = fronts.conversations(model.name, _SESSIONS, _TURNS, number)
            turns_by_case = zip(rates, ([chat[:1] for chat in chats], [chat[1:] for chat in chats]), strict=True)
            for case, turns in turns_by_case:
                for front in running:
                    before = front.cpu_seconds()
                    results = client.round(Order("http", front.address, chats=turns[1:]))
                    used = front.cpu_seconds() - before
                    alone = client.round(Order("http", front.address, chats=turns[:1]))
                    if number:  # the first round warms up
                        rates[case].setdefault(front.name, []).append(len(results) / used)
                        times[case].setdefault(front.name, []).append(_first(alone) * 1e3)
    for case in rates:
        for name in rates[case]:
            label = f"{name}, chats of 60,000 tokens, {case}"
            report.emit(report.median_of("frontends", label, "requests/CPU-s", rates[case][name]))
            report.emit(report.median_of("frontends", f"{label}: TTFT", "ms", times[case][name]))
            if name != "HTTP":
                label = f"HTTP over {name}, chats of 60,000 tokens, {case}"
                _compare(label, "requests/CPU-s", rates[case]["HTTP"], rates[case][name], 1.0, "high")
                _compare(f"{label}: TTFT", "ms", times[case]["HTTP"], times[case][name], 1.0, "low")


def _first(results: Sequence[Stream]) -> float:
    return statistics.median(stream.first for stream in results)


def _gaps(results: Sequence[Stream]) -> list[float]:
    return [gap for stream in results for gap in stream.gaps]


def _compare(
    case: str, unit: str, ours: Sequence[float], theirs: Sequence[float], target: float, better: report.Better,
    scale: float = 1.0,
) -> None:  # fmt: skip
    """Emit our median beside theirs, and the median of each round's ratio."""
    mine, limits = ([value * scale for value in values] for values in (ours, theirs))
    report.emit(report.judged(report.beside("frontends", case, unit, mine, limits), target, better))


def main() -> int:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--model", default="100m", help="of the cluster: tiny, 100m or a directory")
    parser.add_argument("--quick", action="store_true", help="three rounds of short streams")
    parser.add_argument("--only", action="append", choices=_PARTS, help="may be said several times")
    parser.add_argument("--peers", type=Path, default=models.cache() / "peers", help="of vLLM's environment")
    parser.add_argument("--prepare", action="store_true", help="make vLLM's environment, no more")
    arguments = parser.parse_args()
    rounds, count = (3, 50) if arguments.quick else (arguments.rounds, _OUTPUT)
    parts = set(arguments.only or _PARTS)
    try:
        if arguments.prepare:
            environments.prepare(VLLM, arguments.peers)
            environments.prepare_vllm_rust(arguments.peers)
            return 0
        report.say(report.machine())
        if "cluster" in parts:
            with closing(Client()) as client:
                model = models.directory(arguments.model)
                against_grpc(client, model, rounds, arguments.streams, count)
        if "chats" in parts:
            with closing(Client()) as client:
                long_chats(client, rounds, arguments.peers)
        if parts - {"cluster", "chats"}:
            with closing(Client()) as client:
                alone(client, models.directory("tiny"), parts, rounds, count, arguments.peers)
    except (NotPrepared, PeerFailed, StreamFailed) as error:
        report.say(f"frontends: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
