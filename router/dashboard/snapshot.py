"""The snapshot that the page shows, as it goes out in JSON: the cluster at one instant, and the last requests."""

# pyright: strict

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import nlargest
from itertools import islice

from msgspec import Struct

from baton.messages import Medium, StepSample
from baton.timeline import Timeline
from kvstore.prefix_map.prefix_map import MEDIA
from kvstore.prefix_map.survey import PrefixNode, PrefixPicture
from router.dashboard.notices import Notice
from router.dashboard.samples import Sample
from router.events import Cancelled, Failed, Finished
from router.requests.explain import RequestRecord
from router.requests.lifecycle import PageCounts
from router.state import ProcessView, RouterState, RouterStats

RECORDS = 1_000
"""Records of requests that a snapshot looks through."""

_NEWEST, _TROUBLED, _SLOWEST = 24, 12, 12  # of these, that it has
_PROCESSES = 200
_NOTICES = 40
_SAMPLES = 12  # a page that missed more than these asks for all
_LARGEST = 2**53  # a larger whole number is none in JavaScript
_TEXT = 200  # characters of a text that comes from elsewhere


class TierView(Struct, frozen=True):
    """How fast a tier below a store's arena brings pages up, bytes per second and milliseconds until the first."""

    tier: str
    latency_ms: float
    bytes_per_second: float
    measured: bool


class ProcessCard(Struct, frozen=True):
    """One process. `pages` is how many it holds by tier, as far as the router knows; none: not looked at yet."""

    name: str
    role: str
    node: str
    pid: int
    state: str  # live, draining, or why it is gone
    heartbeat_age_ms: int
    running: int
    waiting: int
    tokens_queued: int
    pages_free: int
    pages_total: int
    prefill_rate: float  # tokens per second; 0: not measured
    attempts: int
    becoming: str
    moved: PageCounts
    tiers: Sequence[TierView]
    pages: Mapping[Medium, int] | None
    step: StepSample | None  # the last that it told


class Holding(Struct, frozen=True):
    """The holders of a node of the prefix picture: by process, its tiers, the fastest first."""

    fastest: Medium | None
    holders: Mapping[str, Sequence[Medium]]


class PrefixView(Struct, frozen=True):
    """The prefix map as a picture. A node's `mask` is an index into `holdings` here."""

    nodes: Sequence[PrefixNode]
    holdings: Sequence[Holding]
    runs: int
    drawn: int


class RequestRow(Struct, frozen=True):
    """One request. Times are milliseconds from its receipt; none: not yet. `tags`: newest, troubled, slowest."""

    name: str  # the cluster's name, by which it is explained
    request_id: str
    tenant: str
    state: str
    outcome: str
    age_ms: int
    priority: int
    prompt_tokens: int
    cached_tokens: int | None
    completion_tokens: int
    attempts: int
    prefill_worker: str
    decode_worker: str
    waits_because: str
    predicted_ttft_ms: float | None
    tpot_ms: float | None
    hops: Mapping[str, float]
    tags: Sequence[str]


class NoticeRow(Struct, frozen=True):
    """One notice."""

    number: int
    age_ms: int
    level: str
    kind: str
    text: str
    request: str
    more: int


class QueueView(Struct, frozen=True):
    """Requests that wait in the router and that run, and what the roles' workers could do."""

    waiting: Mapping[int, int]  # by level of priority
    queued: int
    running: int
    prefill_utilization: float | None
    decode_utilization: float | None
    advised: str  # the role that one more worker should have; "": none


class Totals(Struct, frozen=True):
    """Counts since the router's start."""

    finished: int
    failed: int
    cancelled: int
    attempts: int
    placed_split: int
    placed_local: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    pages_known: int
    pins: int


class RouterCard(Struct, frozen=True):
    """The router that made the snapshot."""

    name: str
    node: str
    incarnation: str
    version: str
    cluster: str
    model: str
    uptime_s: int
    page_size: int  # tokens
    page_bytes: int  # 0: no worker has told
    max_context: int
    routers: Sequence[str]  # names of all of the cluster, this one among them


class Snapshot(Struct, frozen=True):
    """What the page polls. `sequence` grows by one each second."""

    sequence: int
    at_ms: int  # Unix time
    router: RouterCard
    unready: str  # why no request can be served; "": one can
    processes: Sequence[ProcessCard]
    processes_omitted: int
    queue: QueueView
    totals: Totals
    columns: Sequence[str]  # of samples
    samples: Sequence[Sample]  # the last
    requests: Sequence[RequestRow]
    notices: Sequence[NoticeRow]
    prefixes: PrefixView | None  # none: not looked at yet


class History(Struct, frozen=True):
    """What the page asks for when it opens."""

    columns: Sequence[str]
    samples: Sequence[Sample]


def samples_of(kept: Sequence[Sample]) -> list[Sample]:
    """The samples that a snapshot repeats."""
    return [*kept][-_SAMPLES:]


def process_cards(
    views: Sequence[ProcessView], stats: RouterStats, tiers: Mapping[str, Mapping[Medium, int]] | None
) -> list[ProcessCard]:
    """The processes but for the router. `tiers`: pages by incarnation and tier."""
    return [
        ProcessCard(
            name=view.peer.name,
            role=view.peer.role,
            node=view.peer.node,
            pid=view.peer.pid,
            state=view.gone or ("draining" if view.draining else "live"),
            heartbeat_age_ms=int(max(0.0, view.heartbeat_age) * 1_000),
            running=_whole(view.load.running),
            waiting=_whole(view.load.waiting),
            tokens_queued=_whole(view.load.tokens_queued),
            pages_free=_whole(view.load.pages_free),
            pages_total=_whole(view.load.pages_total),
            prefill_rate=round(view.load.prefill_rate, 1),
            attempts=view.attempts,
            becoming=view.changing_to or "",
            moved=_moved(stats.pages.get(view.peer.name)),
            tiers=[
                TierView(speed.tier, round(speed.latency * 1_000, 3), round(speed.bytes_per_second), speed.measured)
                for speed in view.load.tiers
            ],
            pages=None if tiers is None or view.gone else tiers.get(view.peer.incarnation, {}),
            step=view.load.steps[-1] if view.load.steps else None,
        )
        for view in views[:_PROCESSES]
    ]


def prefix_view(picture: PrefixPicture, state: RouterState, names: Mapping[str, str]) -> PrefixView:
    """The picture with its holders named. `names`: of processes, by incarnation."""
    index: dict[int, int] = {}
    holdings: list[Holding] = []
    nodes: list[PrefixNode] = []
    for node in picture.nodes:
        if node.mask not in index:
            index[node.mask] = len(holdings)
            tiers = {
                names[holder]: media
                for holder, media in state.kv_index.holders_of(node.mask).items()
                if holder in names
            }
            fastest: Medium | None = next(
                (medium for medium in MEDIA if any(medium in held for held in tiers.values())), None
            )
            holdings.append(Holding(fastest, tiers))
        nodes.append(
            PrefixNode(node.parent, node.depth, node.length, node.chains, node.pages, index[node.mask], node.merged)
        )
    return PrefixView(nodes, holdings, picture.runs, picture.drawn)


def request_rows(records: Sequence[RequestRecord], now: float) -> list[RequestRow]:
    """The newest of these records, which come newest first, those that had trouble, and those whose first token came
    last."""
    tags: dict[str, list[str]] = {}
    timed = [
        (line.first_token - line.received, at)
        for at, record in enumerate(records)
        if (line := record.timeline).first_token is not None
    ]
    _tag(tags, "newest", records[:_NEWEST])
    _tag(tags, "troubled", islice(filter(_troubled, records), _TROUBLED))
    _tag(tags, "slowest", (records[at] for _, at in nlargest(_SLOWEST, timed)))
    return [_row(record, tags[record.name], now) for record in records if record.name in tags]


def _tag(tags: dict[str, list[str]], tag: str, records: Iterable[RequestRecord]) -> None:
    for record in records:
        tags.setdefault(record.name, []).append(tag)


_TROUBLE = (Failed, Cancelled)


def _troubled(record: RequestRecord) -> bool:
    return record.attempts_begun > 1 or isinstance(record.outcome, _TROUBLE)


def _row(record: RequestRecord, tags: Sequence[str], now: float) -> RequestRow:
    account, line = record.account, record.timeline
    usage, last = account.usage, record.attempts[-1] if record.attempts else None
    predicted = record.attempts[0].predicted_ttft if record.attempts else None
    match record.outcome:
        case Finished(reason=reason):
            state, outcome = "finished", reason
        case Failed(error=error):
            state, outcome = "failed", f"{error.reason}: {error}"
        case Cancelled(why=why):
            state, outcome = "cancelled", why
        case None:
            state, outcome = "running" if record.running else "queued", ""
    return RequestRow(
        name=record.name,
        request_id=record.request_id,
        tenant=record.tenant,
        state=state,
        outcome=outcome[:_TEXT],
        age_ms=int((now - line.received) * 1_000),
        priority=record.priority,
        prompt_tokens=usage.prompt,
        cached_tokens=None if line.first_token is None else usage.cached,
        completion_tokens=usage.completion,
        attempts=record.attempts_begun,
        prefill_worker=last.prefill if last else "",
        decode_worker=last.decode if last else "",
        waits_because=record.waits[:_TEXT],
        predicted_ttft_ms=None if predicted is None else round(predicted * 1_000, 2),
        tpot_ms=None if (tpot := line.tpot(usage.completion)) is None else round(tpot * 1_000, 2),
        hops=_hops(line),
        tags=tags,
    )


_HOPS = ("placed", "accepted", "prefill_sent", "prefilled", "started", "first_token", "ended")


def _hops(line: Timeline) -> dict[str, float]:
    found = ((hop, line.between("received", hop)) for hop in _HOPS)
    return {hop: round(seconds * 1_000, 2) for hop, seconds in found if seconds is not None}


def notice_rows(notices: Sequence[Notice], now: float) -> list[NoticeRow]:
    return [
        NoticeRow(one.number, int((now - one.at) * 1_000), one.level, one.kind, one.text, one.request, one.more)
        for one in notices[:_NOTICES]
    ]


def queue_view(stats: RouterStats) -> QueueView:
    use = stats.utilization
    return QueueView(
        waiting=stats.waiting,
        queued=stats.queued,
        running=stats.running,
        prefill_utilization=_share(use.prefill) if use else None,
        decode_utilization=_share(use.decode) if use else None,
        advised=stats.advice.role if stats.advice else "",
    )


def totals_of(stats: RouterStats) -> Totals:
    return Totals(
        finished=sum(stats.finished.values()),
        failed=sum(stats.failed.values()),
        cancelled=stats.cancelled,
        attempts=stats.attempts,
        placed_split=stats.placed_split,
        placed_local=stats.placed_local,
        prompt_tokens=stats.prompt_tokens,
        cached_tokens=stats.cached_tokens,
        generated_tokens=stats.generated_tokens,
        pages_known=stats.kv_index.pages,
        pins=sum(stats.pins.values()),
    )


def _share(value: float) -> float:
    """A utilization as JSON can have it: a side without workers is infinitely busy."""
    return round(min(value, 99.0), 3)


def _whole(value: int) -> int:
    return min(value, _LARGEST)


def _moved(counts: PageCounts | None) -> PageCounts:
    if counts is None:
        return PageCounts()
    return PageCounts(
        *map(_whole, (counts.stored, counts.hits, counts.fetched, counts.fetched_across, counts.on_device))
    )
