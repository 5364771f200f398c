"""What is said about a cluster, and what is concluded from it."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from baton.addresses import ServiceAddresses, listening
from baton.client import Generated, Timing, TokenUsage, Work
from baton.config import Config, load
from baton.errors import CorruptWeights, StartupError, Unavailable
from deploy.commands import generate, show
from deploy.commands.progress import Progress
from deploy.control_plane.bring_up import why_failed
from deploy.control_plane.reports import ClusterOverview, Failure, SupervisedProcess
from deploy.local import LocalCluster
from deploy.placement.desired import ClusterScale
from deploy.processes import ProcessIdentity

ADDRESSES = ServiceAddresses("127.0.0.1:1001", "tcp://127.0.0.1:1002", "127.0.0.1:1003")


def overview(*views: SupervisedProcess) -> ClusterOverview:
    return ClusterOverview("baton", ProcessIdentity(1, 1), ClusterScale(1, 1), views, {"router": ADDRESSES})


def decode(condition: str, failure: Failure | None = None, restarts: int = 0) -> SupervisedProcess:
    return SupervisedProcess("decode-0", "decode", "here", condition, restarts=restarts, failure=failure)


def test_a_router_comes_back_at_its_addresses():
    pinned = ADDRESSES.pin(load(overrides={"router.grpc_port": 0, "router.internal_port": 0, "router.http_port": 0}))
    assert (pinned.router.grpc_port, pinned.router.internal_port, pinned.router.http_port) == (1001, 1002, 1003)
    assert ADDRESSES.endpoint_of(0) == "tcp://127.0.0.1:1002"


def test_routers_share_the_ports_for_clients_and_have_the_others_to_themselves():
    config = load(overrides={"router.grpc_port": 0, "api.port": 0, "router.operator": "127.0.0.1:0"})
    first = ServiceAddresses("127.0.0.1:1", "tcp://127.0.0.1:2", "127.0.0.1:3", "127.0.0.1:4", "127.0.0.1:5")
    other = ServiceAddresses("127.0.0.1:1", "tcp://127.0.0.1:12", "127.0.0.1:13", "unix:/x", "127.0.0.1:5")

    def ports(router: str, *known: ServiceAddresses) -> tuple[int, int, int, int, str]:
        settled = listening(config, router, dict(zip(("router", "router-1"), known, strict=False)))
        own = settled.router
        return own.grpc_port, settled.api.port, own.internal_port, own.http_port, own.operator

    assert ports("router") == (0, 0, config.router.internal_port, config.router.http_port, "127.0.0.1:0")
    assert ports("router", first) == (1, 5, 2, 3, "127.0.0.1:4")
    assert ports("router-1", first) == (1, 5, 0, 0, "127.0.0.1:4")
    assert ports("router-1", first, other) == (1, 5, 12, 13, "127.0.0.1:4")


def test_every_interface_means_nothing_elsewhere():
    everywhere = ServiceAddresses("0.0.0.0:1", "tcp://0.0.0.0:2", "0.0.0.0:3", "unix:/run/router.sock")
    there = ServiceAddresses("10.1.2.3:1", "tcp://10.1.2.3:2", "10.1.2.3:3", "unix:/run/router.sock")
    assert everywhere.reached_at("10.1.2.3") == there
    assert ADDRESSES.reached_at("10.1.2.3") == ADDRESSES
    everywhere = ServiceAddresses("[::]:1", "tcp://[::]:2", "[::]:3", "unix:/run/router.sock")
    there = ServiceAddresses("[fd00::2]:1", "tcp://[fd00::2]:2", "[fd00::2]:3", "unix:/run/router.sock")
    assert everywhere.reached_at("fd00::2") == there


def test_a_reason_ends_the_start_and_a_mere_death_does_not():
    error = why_failed(overview(decode("waiting", Failure("corrupt_weights", "cut short", "/l/decode-0.log"), 1)))
    assert isinstance(error, CorruptWeights)
    assert str(error) == "decode-0: cut short (log: /l/decode-0.log)"
    died = Failure("unavailable", "its process has gone")
    assert why_failed(overview(decode("joining", died, 1))) is None
    assert isinstance(why_failed(overview(decode("joining", died, 3))), Unavailable)
    assert why_failed(overview(decode("live", Failure("corrupt_weights", "before"), 1))) is None


def test_what_happened_before_a_change_is_not_its_failure():
    old = Failure("corrupt_weights", "cut short, a month ago")
    before = overview(decode("live", old, 3))
    assert why_failed(overview(decode("joining", old, 3)), before) is None
    assert why_failed(overview(decode("ending", old, 3)), before) is None
    new = Failure("corrupt_weights", "cut short again")
    assert isinstance(why_failed(overview(decode("waiting", new, 4)), before), CorruptWeights)
    died = Failure("unavailable", "its process has gone")
    assert why_failed(overview(decode("joining", died, 5)), before) is None
    assert isinstance(why_failed(overview(decode("joining", died, 6)), before), Unavailable)


def test_settled_means_everything_is_live():
    assert overview(decode("live")).settled
    assert not overview(decode("live"), decode("joining")).settled
    assert not overview().settled


def shown(**changes: Any) -> str:
    """What `baton status` prints of a cluster that is in trouble, but for the `changes`."""
    process = {"name": "decode-0", "role": "prefill", "state": "waiting", "node": "here", "pid": None, "restarts": 3}
    page = {
        "cluster": "baton",
        "model": "m[odel]",
        "serving": False,
        "problem": "it is broken",
        "routers": {"router": {"grpc": "127.0.0.1:1", "internal": "127.0.0.1:2", "http": "127.0.0.1:3"}},
        "log_dir": "/logs",
        "key_file": "",
        "ray": {"address": "127.0.0.1:6379", "mode": "disabled", "started_by_baton": False},
        "processes": [process | {"retry_in_s": 4.0, "last_failure": "cut [short]"}],
        "numerics": "native-2/12345678",
        "counts": {},
        "bottleneck": {"prefill": 0.9, "decode": 0.4, "advised": "prefill", "prefill_then": 0.45, "decode_then": 0.6},
    }
    console = Console(file=io.StringIO(), width=300, soft_wrap=True)
    show.cluster(console, page | changes)
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_status_tells_failures():
    text = shown()
    for part in ("does not serve", "m[odel]", "/logs", "no token", "cut [short]", "it is broken"):
        assert part in text
    assert "decode-0: serves as prefill worker, starts again in 4 s" in text
    assert "prefill 90%, decode 40%" in text
    assert "one prefill worker more: 45% and 60%" in text


def test_status_tells_the_class_of_numerics():
    assert "numerics native-2/12345678" in shown()
    workers = [
        {"name": name, "role": "decode", "state": "live", "pid": 1, "restarts": 0, "retry_in_s": 0.0, "node": "here"}
        | {"last_failure": "", "numerics": numerics}
        for name, numerics in (("decode-0", "torch-1/2"), ("decode-1", "native-2/1"), ("store-0", ""))
    ]
    assert "numerics mixed (native-2/1, torch-1/2): tokens may depend on" in shown(numerics="mixed", processes=workers)


def test_status_fits_80_columns_on_a_busy_cluster():
    load = {"running": 128, "waiting": 2_048, "pages_total": 1_048_576, "pages_free": 123_456}
    tier = {"pages": 1_048_576.0, "bytes": 1.1e12, "hits": 1e7, "loads": 1e7, "load_seconds": 1e7}
    tier |= {"evictions": 123_456_789.0, "regret_seconds": 12_345.67, "checksum_failures": 3.0}
    worker = {
        "state": "draining",
        "pid": 4_194_304,
        "restarts": 12,
        "retry_in_s": 0.0,
        "last_failure": "",
        "load": load,
    }
    worker |= {"attempts": 128, "becoming": "prefill"}
    workers = [worker | {"name": f"decode-{n}", "role": "prefill", "node": f"gpu-node-{n:03}"} for n in range(12)]
    store = worker | {"name": "store-10", "role": "store", "node": "gpu-node-000", "disk_up": False}
    counts = {"running": 128, "queued": 2_048, "finished": 12_345_678, "failed": 123, "cancelled": 234}
    counts |= dict.fromkeys(("prompt_tokens", "cached_tokens", "generated_tokens"), 123_456_789_012)
    text = shown(
        processes=[*workers, store | {"tiers": dict.fromkeys(("host", "disk", "remote"), tier)}], counts=counts
    )
    assert "decode-11: serves as prefill worker, draining, 128 left, then prefill" in text
    assert "store-10: 3 pages found damaged on host" in text
    assert [line for line in text.splitlines() if len(line) > 80] == []


def test_progress_tells_each_change_once():
    console = Console(file=io.StringIO(), width=200)
    with Progress(console) as progress:
        for _ in range(3):
            progress.watch(overview(decode("joining")))
            progress.watch(overview(decode("live")))
        progress.watch(overview())
    text = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert text.count("decode-0 has ended") == 1
    assert "decode-0 is live" in text


def test_what_generate_prints():
    usage, timing = TokenUsage(3, 1, 2), Timing(first_token=1.5)
    printed = generate.generated_as_json(Generated("ab", [1, 2], [], "length", usage, timing, Work(), "x", 7))
    assert printed["finish_reason"] == "length"
    assert printed["usage"] == {"prompt_tokens": 3, "cached_tokens": 1, "completion_tokens": 2}
    assert printed["timing"] == {"first_token": 1.5}


def test_local_clusters_never_share_a_store(tmp_path: Path):
    one, other = LocalCluster(Config(), tmp_path / "a"), LocalCluster(Config(), tmp_path / "b")
    assert one.config.cluster.name != other.config.cluster.name


def test_a_process_is_placed_only_on_a_node_that_there_is(tmp_path: Path):
    with pytest.raises(StartupError, match="no node c"):
        LocalCluster(Config(), tmp_path, nodes=["a", "b"], placed={"prefill-0": "c"})
