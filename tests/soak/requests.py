"""Many requests of mixed length: afterwards every pool is empty, and how much memory each process came to take.

    .venv/bin/python -m tests.soak --minutes 0 --kills 0 --requests 10000

Device pools and arena are so small that pages are evicted and sequences preempted all the time. A third of the prompts
share prefixes, and every twentieth client goes away after its third token. Each of the others must get as many tokens
as it asked for; at the end nothing may run, wait or be held, by the word of the router and of every process's metrics.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from pathlib import Path

import grpc.aio

from bench.processes import Memory
from bench.streams import Router, Server
from deploy.load.workload import Lengths, Planned, Workload
from deploy.local import LocalCluster
from tests.support import checkpoints, workload
from tests.support.cluster import at_rest, process
from tests.support.eventually import eventually
from tests.support.metrics_page import nothing_held, samples, total
from tests.support.workload import PAGE_BYTES

AT_ONCE = 24  # requests
CANCELLED = 20  # one in so many
POOLS = {
    "store.host_cache_bytes": 512 * PAGE_BYTES,
    "prefill.kv_cache_bytes": 128 * PAGE_BYTES,
    "decode.kv_cache_bytes": 128 * PAGE_BYTES,
}


def mixed(count: int, seed: int) -> list[Planned]:
    """Prompts of 1 to some 1,000 tokens, most of them short; the same for the same seed."""
    outputs = Lengths.parse("lognormal:12:0.8:96")
    alone = Workload(Lengths.parse("lognormal:60:1.0:1000"), outputs, checkpoints.VOCAB)
    sharing = Workload(Lengths.parse("lognormal:24:1.0:400"), outputs, checkpoints.VOCAB, groups=8, prefix=160)
    third = count // 3
    result = [*alone.plan(count - third, seed), *sharing.plan(third, seed + 1)]
    return [result[(i * 7_919) % count] for i in range(count)] if count % 7_919 else result  # in another order


async def ask_all(server: Server, plan: Sequence[Planned]) -> Counter[str]:
    """Keep `AT_ONCE` requests under way; how many tokens there were, and how many requests were given up."""
    counts: Counter[str] = Counter()
    waiting = iter(enumerate(plan))

    async def client(numbered: Iterator[tuple[int, Planned]]) -> None:
        for number, request in numbered:
            patience = 3 if number % CANCELLED == 0 else request.output
            tokens = 0
            async with aclosing(server.generate(request.prompt, request.output)) as messages:
                async for brought in messages:
                    tokens += brought
                    if tokens >= patience and patience < request.output:
                        counts["cancelled"] += 1
                        break
                else:
                    assert tokens == request.output, f"{tokens} tokens of {request.output}"
            counts["tokens"] += tokens

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(client(waiting))
    return counts


async def _run(address: str, plan: Sequence[Planned]) -> Counter[str]:
    async with grpc.aio.insecure_channel(address) as channel:
        counts = await ask_all(Router(channel), plan)
        await asyncio.sleep(0.5)  # the calls that were cancelled end, before their loop does
    return counts


def device_pages_left(cluster: LocalCluster, worker: str) -> float:
    """Pages of a worker that are not free, cached ones counting as free."""
    return total(samples(cluster, worker), "kv_pages", tier="device", state="used")


def requests(count: int, seed: int, folder: Path, prefill: int, path: Path) -> dict[str, object]:
    """Send them to a cluster with so many prefill workers and one decode worker; raises AssertionError where a request
    lacks a token or a page stays held."""
    settings = workload.settings(path, prefill, 1, **POOLS)
    with LocalCluster(settings, folder) as cluster:
        workers = [name for name in cluster.pids if name.startswith(("prefill", "decode"))]
        counts = asyncio.run(_run(cluster.address, mixed(count, seed)))
        eventually(lambda: at_rest(cluster), what="everything freed, as the router knows it")
        eventually(lambda: not any(device_pages_left(cluster, name) for name in workers), what="empty device pools")
        eventually(lambda: nothing_held(cluster, "store-0"), what="an arena of which nothing is held")
        here = {name: samples(cluster, name) for name in cluster.pids}
        filled = {
            name: process_pages(cluster, name) * PAGE_BYTES / POOLS[f"{pool_of(name)}"]
            for name in [*workers, "store-0"]
        }
        assert all(0.99 <= share <= 1 for share in filled.values()), filled
        memory = {name: Memory.of(pid) for name, pid in sorted(cluster.pids.items())}
        return {
            "shape": f"{prefill}P+1D" if prefill else "1D",
            "seed": seed,
            "requests": count,
            **counts,
            "preemptions": sum(total(page, "num_preemptions_total") for page in here.values()),
            "evictions": total(here["store-0"], "page_evictions_total", tier="host"),
            "filled": {name: round(share, 4) for name, share in filled.items()},
            "memory_mib": {
                name: {field: round(getattr(one, field) / 2**20, 1) for field in one.__dataclass_fields__}
                for name, one in memory.items()
            },
        }


def pool_of(name: str) -> str:
    """The setting of a process's memory for pages."""
    role = name.rpartition("-")[0]
    return "store.host_cache_bytes" if role == "store" else f"{role}.kv_cache_bytes"


def process_pages(cluster: LocalCluster, name: str) -> int:
    status = process(cluster, name)
    return status.load.pages_total if status else 0
