"""The fuzzers' cluster, the honest streams beside them, and the verdict.

No exchange may end in another way than its target knows. No honest request may fail, get a wrong token or stand still.
No process may end. No log may have a traceback or an error. At the end descriptors, threads, memory, pages, slots,
leases and requests are as before, within a deadline.
"""

import json
import select
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import psutil
from msgspec import structs

from baton.client import Client
from baton.config import Config
from deploy.local import LocalCluster
from kvstore.client.connection import store_address
from tests.fuzz.attacker import READY
from tests.fuzz.case import Summary, parse_summary
from tests.fuzz.honest import Honest
from tests.fuzz.targets import TARGETS
from tests.fuzz.victims import Victims, started
from tests.support import checkpoints, workload
from tests.support.cluster import at_rest, process
from tests.support.eventually import eventually
from tests.support.honest_streams import Size, grown, log_lines, references, sizes
from tests.support.metrics_page import nothing_held

EACH = 3  # honest clients of each API
LONGEST_GAP = 10.0  # seconds between two tokens of an honest stream; the fuzzers share its cores
_IDLE = 150.0  # seconds; a store closes a link to another store when it was not used for 60 s
_START = 300.0  # seconds in which a fuzzer must have started; some wait for processes that load a model
WARM = 3.0  # seconds of honest streams before the fuzzers
SLOPE = 48 * 2**20  # bytes that a process may grow by in the second half of a long run
LONG = 240.0  # seconds from which on a run is long
_LAST_WORDS = 5.0  # seconds
_TAIL = 6_000  # characters of a log
_SHOWN = 2_000  # characters of each piece that was sent
TEMPLATE = "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}assistant"
FAILURES = (
    "Traceback",
    "failed in the router",
    " ERROR ",
    "Task exception was never retrieved",
    "never awaited",
    "has ended (",
)


class Fuzzer:
    """One target's process."""

    def __init__(self, name: str, arguments: Mapping[str, object]) -> None:
        self.name = name
        command = [sys.executable, "-m", "tests.fuzz.attacker", name, json.dumps(arguments)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    def started(self) -> None:
        """Wait until it makes cases. Raises AssertionError if it does not."""
        assert self.process.stdout is not None
        heard = select.select([self.process.stdout], [], [], _START)[0]
        line = self.process.stdout.readline() if heard else b""
        assert line == READY, f"the fuzzer of {self.name} does not start"

    def ended(self) -> bool:
        """Whether it has found something, or made all its cases."""
        assert self.process.stdout is not None
        return bool(select.select([self.process.stdout], [], [], 0)[0])

    def end(self) -> Summary:
        try:
            output, _ = self.process.communicate(b"", timeout=300)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the fuzzer of {self.name} did not end") from None
        assert self.process.returncode == 0, f"the fuzzer of {self.name} ended with {self.process.returncode}"
        return parse_summary(output)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


def fuzz(
    seconds: float, seed: int, folder: Path, path: Path, only: Collection[str] = (), case: int | None = None
) -> dict[str, object]:
    """Fuzz for so long, or make one case of each target. Raises AssertionError for a finding."""
    with_template(path)
    expected = references(path, seed, folder / "reference")
    assert expected
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(workload.settings(path, 1, 1), folder))
        processes = {name: status.incarnation for name in cluster.pids if (status := process(cluster, name))}
        honest = Honest(cluster.address, cluster.api_of("router"), expected, seed, EACH)
        stack.callback(honest.stop)
        time.sleep(WARM)
        groups = victims_of(cluster.config, folder)
        needed = {name: group for name, group in groups.items() if not only or name in only}
        stack.enter_context(started(list(needed.values())))
        plans = {name: args for name, args in plan(cluster, groups, path).items() if not only or name in only}
        if "workers" in needed:
            plans["workers"] |= addresses_of(groups["workers"])
        orderly = [(group, name) for group in needed.values() for name in group.pids]
        which: dict[str, object] = {"seed": seed} if case is None else {"seed": seed, "first": case, "most": 1}
        before = sizes(cluster)
        fuzzers = {name: Fuzzer(name, {**which, **args}) for name, args in plans.items()}
        for fuzzer in fuzzers.values():
            stack.callback(fuzzer.kill)
        for fuzzer in fuzzers.values():
            fuzzer.started()
        before |= sizes_of(needed.values())  # victims have loaded their models now
        halves = _watch(cluster, fuzzers, honest, seconds, endless=case is None)
        until = time.monotonic() + (_LAST_WORDS if honest.failures else 0.0)
        while cluster.pids.keys() == processes.keys() and time.monotonic() < until:
            time.sleep(0.1)  # a process that is about to end still says why
        ended = [name for name in processes if name not in cluster.pids]
        assert not ended, f"{ended} ended:\n{tails(cluster, ended)}\n{last(fuzzers)}"
        assert not honest.failures, f"{honest.errors}\n{tails(cluster, list(processes))}\n{last(fuzzers)}"
        died = [name for group, name in orderly if name not in group.pids]
        assert not died, f"{died} ended:\n{tails(cluster, died)}\n{last(fuzzers)}"
        ends = {name: fuzzer.end() for name, fuzzer in fuzzers.items()}
        findings = [finding for end in ends.values() for finding in end.findings]
        assert not findings, f"{report(findings)}\n{tracebacks(cluster)}"
        honest.stop()
        assert not honest.failures, honest.errors
        alive = {name: status.incarnation for name in cluster.pids if (status := process(cluster, name))}
        assert alive == processes, f"processes were {processes} and are {alive}: {log_lines(cluster, 'Error')}"
        eventually(lambda: at_rest(cluster), what="everything freed")
        eventually(lambda: nothing_held(cluster, "store-0"), what="nothing held in the store")
        eventually(lambda: idle(cluster), what="no request in the router")
        assert not (lines := log_lines(cluster, *FAILURES)), f"logs tell of failures: {lines[:20]}"
        larger = f"{grown(before, sizes(cluster) | sizes_of(needed.values()))}: sizes as before"
        eventually(lambda: not grown(before, sizes(cluster) | sizes_of(needed.values())), larger, _IDLE)
        assert honest.requests
        assert honest.longest_gap <= LONGEST_GAP, f"an honest stream stood still for {honest.longest_gap:.2f} s"
        if seconds >= LONG:
            steep = {name: growth for name, growth in slope(halves).items() if growth > SLOPE}
            assert not steep, f"bytes that processes grew by in the second half: {steep}"
        return {
            "seed": seed,
            "seconds": round(seconds),
            "honest_requests": honest.requests,
            "honest_longest_gap_s": round(honest.longest_gap, 3),
            "cases": {name: sum(end.counts.values()) for name, end in ends.items()},
            "endings": {name: dict(sorted(end.counts.items())) for name, end in ends.items()},
            "grown_mib": _mib(
                {
                    name: now.anonymous - before[name].anonymous
                    for name, now in (sizes(cluster) | sizes_of(needed.values())).items()
                }
            ),
            "second_half_mib": _mib(slope(halves)),
        }


def _watch(
    cluster: LocalCluster, fuzzers: Mapping[str, Fuzzer], honest: Honest, seconds: float, *, endless: bool
) -> list[dict[str, Size]]:
    """Wait until the time is up, a fuzzer has ended or an honest request has failed. Return the processes' sizes, first
    those in the middle."""
    start, halves = time.monotonic(), list[dict[str, Size]]()
    running = dict(cluster.pids)
    while time.monotonic() - start < seconds:
        time.sleep(0.2)
        if not halves and time.monotonic() - start > seconds / 2:
            halves.append(sizes(cluster))
        ended = [fuzzer.ended() for fuzzer in fuzzers.values()]
        if (any(ended) and endless) or all(ended) or honest.failures or cluster.pids != running:
            break
    return [*halves, sizes(cluster)]


def tails(cluster: LocalCluster, names: Sequence[str]) -> str:
    """The last lines of the logs of these processes, and what went wrong in them."""
    files = [file for name in names for file in (cluster.config.cluster.logs / f"{name}.log", cluster.log(name))]
    return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-_TAIL:]}" for file in files if file.exists())


def tracebacks(cluster: LocalCluster) -> str:
    """The tracebacks in the logs, without what other threads wrote between."""
    texts = {file.name: file.read_text(errors="replace") for file in cluster.config.cluster.logs.glob("*.log")}
    parts = [f"--- {name}\n{part[:_TAIL]}" for name, text in texts.items() for part in text.split("Traceback")[1:5]]
    return "\n".join(parts)


def last(fuzzers: Mapping[str, Fuzzer]) -> str:
    """What the fuzzers say now, with their numbers of cases."""
    summaries = {name: fuzzer.end() for name, fuzzer in fuzzers.items()}
    cases = {name: sum(each.counts.values()) for name, each in summaries.items()}
    return f"cases {cases}\n{report([finding for each in summaries.values() for finding in each.findings])}"


def sizes_of(groups: Iterable[Victims]) -> dict[str, Size]:
    """What each process of these groups takes."""
    return {name: Size.of(pid) for group in groups for name, pid in group.pids.items()}


def slope(halves: list[dict[str, Size]]) -> dict[str, int]:
    """Bytes that each process has grown by between two looks."""
    first, last = halves[0], halves[-1]
    return {name: last[name].anonymous - size.anonymous for name, size in first.items() if name in last}


def idle(cluster: LocalCluster) -> bool:
    """Whether the router has no request."""
    with Client(cluster.address, cluster.operator) as client:
        counts = client.status(timeout=30).counts
    return not counts.queued and not counts.running


def with_template(path: Path) -> None:
    """Give the checkpoint a chat template."""
    file = path / "tokenizer_config.json"
    settings = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**settings, "chat_template": TEMPLATE}))


def report(findings: list[Mapping[str, Any]]) -> str:
    """Say what was found, and how to find it again."""
    lines = list[str]()
    for finding in findings:
        again = f"python -m tests.fuzz --seed {finding['seed']} --only {finding['target']} --case {finding['case']}"
        lines += [f"{finding['target']}, case {finding['case']}: {finding['why']}", f"    again: {again}"]
        lines += [f"    note: {note}" for note in finding.get("notes", ())]
        lines += [f"    sent: {piece[:_SHOWN]}" for piece in finding["sent"]]
    return "\n".join(lines)


def victims_of(config: Config, folder: Path) -> dict[str, Victims]:
    """The processes beside the cluster, by the target that needs them."""
    return {
        "orders": Victims(config, folder, "orders", ("store-9", "prefill-9", "decode-9")),
        "replies": Victims(config, folder, "replies", ("prefill-8", "decode-8")),
        "workers": Victims(config, folder, "workers", ("router-9",)),
    }


def addresses_of(group: Victims) -> dict[str, object]:
    """Where the router of a group serves."""
    served = group.addresses("router-9")
    return {"grpc_address": served.grpc, "operator": served.operator, "endpoint": served.endpoint_of(0)}


def plan(cluster: LocalCluster, victims: Mapping[str, Victims], path: Path) -> dict[str, dict[str, object]]:
    """Every target with its arguments."""
    with Client(cluster.address, cluster.operator) as client:
        status = client.status(timeout=30)
    config, api, operator = cluster.config, cluster.api_of("router"), cluster.operator
    keys, router = str(config.cluster.key_path), cluster.addresses.endpoint_of(0)
    of_role = {process.role: process for process in status.processes}
    store = of_role["store"]
    publishers = [process for process in status.processes if process.replay_endpoint]
    pages = [endpoint for process in publishers for endpoint in (process.replay_endpoint, process.events_endpoint)]
    data = _page_server(store.pid, [store.metrics_address, *pages])
    assert status.model is not None
    card = structs.replace(status.model, pool_pages=0)
    namespace = msgspec.json.encode(card.namespace).decode()
    incarnations = {process.incarnation: process.pid for process in status.processes}
    plans: dict[str, dict[str, object]] = {
        "http": {"address": api, "operator": operator},
        "grpc": {"address": cluster.address, "operator": operator},
        "operator": {"operator": operator},
        "router": {
            "endpoint": router, "keys": keys, "card": msgspec.json.encode(card).decode(), "operator": operator,
            "incarnations": incarnations,
        },
        "holders": {
            "endpoint": router, "keys": keys, "card": msgspec.json.encode(card).decode(), "operator": operator,
        },
        "workers": {"keys": keys, "card": msgspec.json.encode(card).decode()},
        "orders": {"endpoint": victims["orders"].endpoint, "keys": keys, "processes": 3},
        "replies": {
            "endpoint": victims["replies"].endpoint, "keys": keys, "processes": 2,
            "address": victims["replies"].store_address,
        },
        "helpers": {"tokenizer": str(path / "tokenizer.json"), "vocab_size": card.vocab_size, "eos": checkpoints.EOS},
        "store": {
            "address": store_address(config.cluster.name, cluster.node), "namespace": namespace,
            "page_bytes": card.page_bytes, "keys": keys, "node": cluster.node,
        },
        "pages": {
            "stores": {store.incarnation: data}, "replays": [each.replay_endpoint for each in publishers],
            "events": [each.events_endpoint for each in publishers], "page_bytes": card.page_bytes, "keys": keys,
        },
        "ports": {
            "pages": [each.metrics_address for each in status.processes if each.metrics_address],
            "zmq": [router, data, *pages],
        },
    }  # fmt: skip
    assert plans.keys() == TARGETS.keys()
    return plans


def _page_server(pid: int, others: Sequence[str]) -> str:
    """The endpoint where a store serves pages: the port of its that is none of the others."""
    known = {endpoint.rpartition(":")[2] for endpoint in others}
    ports = {
        each.laddr.port for each in psutil.Process(pid).net_connections("tcp") if each.status == psutil.CONN_LISTEN
    }
    (port,) = [port for port in ports if str(port) not in known]
    return f"tcp://127.0.0.1:{port}"


def _mib(sizes_of: Mapping[str, int]) -> dict[str, float]:
    return {name: round(size / 2**20, 1) for name, size in sizes_of.items()}
