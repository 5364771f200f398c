"""A cluster of real processes under load, with deaths and stops at random: the first two parts of `make soak`."""

import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from itertools import cycle
from pathlib import Path

import psutil

from baton.client import Client, Generated
from deploy.local import LocalCluster
from engine.cpu import build
from tests.support import checkpoints, workload
from tests.support.cluster import at_rest
from tests.support.engines import ENGINE
from tests.support.eventually import eventually
from tests.support.metrics_page import metric
from tests.support.undisturbed import Stream, undisturbed

STREAMS, CROWD = 6, 64  # requests at a time; of a family
OUTPUT = 48  # tokens
BETWEEN_FAULTS = (0.5, 4.0)  # seconds
SPARED = 0.75  # of the faults while no decode worker serves: else none would get to a token on a busy machine
SURE = 1e-3
"""Where torch or vLLM computes, the order of sums goes by the step's rows. So two best logits closer than this may
swap, and so may two experts."""
ENDS = 30.0  # seconds in which a worker ends after a part of its has been killed, on a busy machine
PATIENCE = 300.0  # seconds for a request and for a start, on a busy machine whose workers are killed all the time
QUICK = {"cluster.heartbeat_ms": 100, "cluster.heartbeat_timeout_ms": 1_000, "decode.fetch_timeout_ms": 3_000}
PROPOSALS = {"model.speculation": "ngram"}  # every guess is verified, whatever it costs
PATIENT = {"router.max_attempts": 1_000, "router.queue_timeout_ms": 300_000, "router.attempt_timeout_ms": 300_000}
"""Where there is one decode worker, requests wait for its successor, however often it dies."""


@dataclass(frozen=True)
class Shape:
    """How many workers a cluster has of each role, and ranks each of them."""

    prefill: int
    decode: int
    prefill_ranks: int = 1
    decode_ranks: int = 1

    @property
    def ranks(self) -> int:
        return max(self.prefill_ranks, self.decode_ranks)

    def ranks_of(self, name: str) -> int:
        return self.prefill_ranks if name.startswith("prefill") else self.decode_ranks

    @property
    def kinds(self) -> list[str]:
        """The kinds of processes that a cluster has besides its router."""
        own = {"prefill": self.prefill, "vLLM": ENGINE.name == "vllm", "rank": self.ranks > 1}
        return ["store", "decode", *(kind for kind, there in own.items() if there)]

    @property
    def settings(self) -> dict[str, object]:
        degrees = {"prefill": self.prefill_ranks, "decode": self.decode_ranks}
        return {
            "router.disaggregation": "always" if self.prefill else "auto",
            "model.numerics": "mixed" if self.prefill and self.ranks > 1 else "exact",  # of several degrees
            **{f"{role}.tensor_parallel_size": ranks for role, ranks in degrees.items() if self.ranks > 1},
        }


SHAPES = {"1P+1D": Shape(1, 1), "2P+2D": Shape(2, 2), "colocated": Shape(0, 1)}
RANKED = {"TP 1-2": Shape(1, 1, 1, 2), "TP 2-1": Shape(1, 1, 2, 1), "colocated TP 2": Shape(0, 1, 1, 2)}
if ENGINE.name == "vllm":
    SHAPES |= RANKED
_APART = {"deepseek-v2", "deepseek-v3", "granite4", "mamba2", "qwen3-next"}
"""Their pages have other sizes; tests/vllm_runner/test_latents.py and test_states.py have their clusters."""
FAMILIES = (
    *checkpoints.FAMILIES,
    *(sorted(checkpoints.VLLM_RECIPES.keys() - _APART) if ENGINE.name == "vllm" else ()),
)


@dataclass(frozen=True)
class Part:
    """A process that can be killed: one of the cluster, of the name `owner`, or one that it or its vLLM has made."""

    kind: str
    owner: str
    process: psutil.Process

    def __str__(self) -> str:
        return f"{self.kind} of {self.owner}" if self.kind in ("vLLM", "rank") else self.owner


class Chaos:
    """Kills, stops and restarts processes. Where there are two decode workers it always leaves one that runs. A worker
    may have a process of vLLM and that its ranks: it must end when one of them dies. Every other kill is of the kind
    that has been killed the least, so that none is left out."""

    def __init__(self, cluster: LocalCluster, shape: Shape, rng: random.Random) -> None:
        self._cluster = cluster
        self._shape = shape
        self._rng = rng
        self._names = sorted(name for name in cluster.pids if not name.startswith("router"))
        self._decoders = [name for name in self._names if name.startswith("decode")]
        self._stopped: dict[str, tuple[float, psutil.Process]] = {}  # name → when to wake which of its processes
        self.faults: Counter[str] = Counter()
        self.kills: Counter[str] = Counter(dict.fromkeys(shape.kinds, 0))  # by kind

    def act(self, now: float) -> None:
        for name, (wake, process) in list(self._stopped.items()):
            if wake <= now:
                del self._stopped[name]
                process.resume()
        if self._rng.random() < SPARED and not any(map(self._serves, self._decoders)):
            return
        parts = [part for name in self._names if self._may_fall(name) for part in self._parts(name)]
        if not parts:
            return
        if self._rng.random() < 0.3:
            part = self._rng.choice(parts)
            part.process.suspend()
            self._stopped[part.owner] = (now + self._rng.uniform(0.2, 4.0), part.process)
            self.faults[f"stop {part}"] += 1
            return
        if self._rng.random() < 0.5:
            least = min(self.kills[part.kind] for part in parts)
            parts = [part for part in parts if self.kills[part.kind] == least]
        part = self._rng.choice(parts)
        part.process.kill()
        owner = part.owner
        eventually(lambda: owner not in self._cluster.pids, f"the end of {owner} without its {part.kind}", ENDS)
        self._cluster.start(owner)
        self.faults[f"kill {part}"] += 1
        self.kills[part.kind] += 1

    @property
    def has_killed_every_kind(self) -> bool:
        return all(self.kills.values())

    def settle(self) -> None:
        for _, process in self._stopped.values():
            process.resume()
        self._stopped.clear()

    def _may_fall(self, name: str) -> bool:
        if name in self._stopped:
            return False
        others = set(self._decoders) - {name}
        return name not in self._decoders or not others or any(map(self._serves, others))

    def _parts(self, name: str) -> list[Part]:
        """The process of that name, its vLLM, and the ranks of that. A worker that starts lacks some of them."""
        assert name in self._cluster.pids, f"{name} has ended by itself; its log says why"
        process = psutil.Process(self._cluster.pids[name])
        parts = [Part(name.partition("-")[0], name, process)]
        if ENGINE.name != "vllm" or name.startswith("store"):
            return parts
        for vllm in process.children():
            parts.append(Part("vLLM", name, vllm))
            if (ranks := self._shape.ranks_of(name)) > 1:
                rank_processes = _ranks(vllm)
                assert len(rank_processes) <= ranks, f"{name} has {rank_processes} for {ranks} ranks"
                parts += [Part("rank", name, each) for each in rank_processes]
        return parts

    def _serves(self, name: str) -> bool:
        if name in self._stopped:
            return False
        with Client(self._cluster.address, self._cluster.operator) as client:
            return any(p.name == name and p.state == "live" for p in client.status(timeout=60.0).processes)


def _ranks(vllm: psutil.Process) -> list[psutil.Process]:
    """The ranks of a process of vLLM, which are forked from it. Its resource tracker is none: the worker goes on
    without it. Nor is a command that vLLM runs to learn of the machine."""
    try:
        forked = [each for each in vllm.children() if each.exe() == vllm.exe()]
        return [each for each in forked if "resource_tracker" not in " ".join([each.name(), *each.cmdline()])]
    except psutil.NoSuchProcess:  # it or a rank has ended meanwhile
        return []


def prompts(seed: int) -> list[tuple[int, ...]]:
    """24 different ones."""
    return list(dict.fromkeys(tuple(each) for each in workload.prompts(seed=seed) if len(each) < 800))[:24]


def _exact() -> bool:
    """Whether a token has the same bits by every path."""
    return ENGINE.name == "native" and build.can_compile()


def streams_of(seed: int) -> list[Stream]:
    """Of each prompt one that is greedy, one that is drawn, and one of either kind that repeats itself."""
    return [
        stream
        for number, prompt in enumerate(prompts(seed))
        for stream in (Stream(prompt), Stream(prompt, len(prompt)), Stream(prompt, number % 2 or None, repeats=True))
    ]


def expected_of(path: Path, seed: int, folder: Path) -> dict[Stream, list[int]]:
    """Streams, and the tokens of each without proposals. Where torch computes they are greedy, and neither tokens nor
    experts nearly tie in them."""
    if _exact():
        return undisturbed(path, folder, streams_of(seed), OUTPUT, **{"model.speculation": "off"})
    model = checkpoints.reference(path)
    expected: dict[Stream, list[int]] = {}
    for prompt in prompts(seed):
        tokens, gaps = model.generate(prompt, OUTPUT)
        if min(gaps) > SURE and model.expert_gap([*prompt, *tokens]) > SURE:
            expected[Stream(prompt)] = tokens
    assert len(expected) > 4
    return expected


def soak(
    seconds: float,
    seed: int,
    folder: Path,
    path: Path,
    expected: Mapping[Stream, list[int]],
    shape: Shape = SHAPES["2P+2D"],
    streams: int = STREAMS,
    faults: int = 0,
    more: Mapping[str, object] = {},
    *,
    count_wrong: bool = False,
) -> dict[str, object]:
    """Run it until there were so many faults, too. Raises AssertionError at the first lost token. At the first wrong
    one as well, unless these are to be counted. `more`: settings."""
    rng = random.Random(seed)
    turns = cycle(rng.sample(list(expected), len(expected)))
    settings = workload.settings(path, shape.prefill, shape.decode, **QUICK, **PATIENT, **shape.settings, **more)
    done = cached = attempts = wrong = 0
    ended_streams: set[Stream] = set()
    with LocalCluster(settings, folder, patience=PATIENCE) as cluster, ThreadPoolExecutor(streams) as pool:
        chaos = Chaos(cluster, shape, rng)
        running: dict[Future[Generated], Stream] = {}
        start = time.monotonic()
        next_fault = start + 1.0
        goes_on = True
        while goes_on or running:
            now = time.monotonic()
            goes_on = now - start < seconds or not chaos.has_killed_every_kind or chaos.faults.total() < faults
            assert now - start < 2 * seconds + 2 * PATIENCE, f"it does not end; killed so far: {chaos.kills}"
            while goes_on and len(running) < streams:
                stream = next(turns)
                running[pool.submit(stream.ask, cluster.address, OUTPUT, PATIENCE)] = stream
            if not goes_on:
                chaos.settle()
            elif now >= next_fault:
                chaos.act(now)
                next_fault = time.monotonic() + rng.uniform(*BETWEEN_FAULTS)
            finished, _ = wait(running, timeout=0.1, return_when=FIRST_COMPLETED)
            for future in finished:
                stream = running.pop(future)
                answer = future.result()
                tokens, right = answer.token_ids, expected[stream]
                if tokens != right:
                    details = {**asdict(stream), "tokens": tokens, "right": right, "work": repr(answer.work)}
                    (folder / "wrong.json").write_text(json.dumps(details))
                    wrong += 1
                assert count_wrong or not wrong, f"a prompt of {len(stream.prompt)}: {tokens}, not {right}"
                ended_streams.add(stream)
                done += 1
                cached += answer.usage.cached_tokens
                attempts += answer.work.attempts
        lasted = time.monotonic() - start
        eventually(lambda: at_rest(cluster), what="everything freed")
        decoders = [name for name in cluster.pids if name.startswith("decode")]
        verified = sum(metric(cluster, name, "spec_decode_num_draft_tokens_total") for name in decoders)
    return {
        "seed": seed,
        "seconds": round(lasted),
        "requests": done,
        "streams": len(ended_streams),
        "wrong": wrong,
        "tokens": done * OUTPUT,
        "attempts": attempts,
        "proposals_verified": verified,  # by the last process of each decode worker
        "cached_tokens": cached,
        "kills": dict(chaos.kills),
        "stops": sum(count for what, count in chaos.faults.items() if what.startswith("stop")),
        "faults": dict(sorted(chaos.faults.items())),
    }


def families(seconds: float, seed: int, folder: Path, only: Sequence[str] = ("*",)) -> Iterator[dict[str, object]]:
    """Soak each family on each shape, so long in all. `only`: patterns of those that are meant, as family/shape."""
    every = [(family, name) for family in FAMILIES for name in SHAPES]
    chosen = [(family, name) for family, name in every if any(fnmatch(f"{family}/{name}", each) for each in only)]
    for family in FAMILIES:
        names = [name for each, name in chosen if each == family]
        if not names:
            continue
        path = checkpoints.make(family, folder / family)
        expected = expected_of(path, seed, folder / f"{family}-reference")
        heads = checkpoints.config(family).num_key_value_heads
        for name in names:
            shape = SHAPES[name]
            if heads % shape.ranks:
                yield {"family": family, "shape": name, "skipped": f"{shape.ranks} ranks can't share {heads} KV heads"}
                continue
            try:
                result = soak(
                    seconds / len(chosen), seed, folder / f"{family}-{name}", path, expected, shape, CROWD,
                    more=PROPOSALS if _exact() else {},
                )  # fmt: skip
            except BaseException as error:
                error.add_note(f"{family} on {name}, seed {seed}")
                raise
            yield {"family": family, "shape": name, **result}
