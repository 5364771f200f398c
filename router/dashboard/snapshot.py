"""The snapshot that the page shows, as it goes out in JSON: the cluster at one instant, and the last requests."""

# pyright: strict

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import nlargest
from itertools import islice

from msgspec import Struct, structs

from baton.messages import Medium
from baton.operator_api import Bottleneck, Counts, Process, RequestSummary
from kvstore.prefix_map.prefix_map import MEDIA
from kvstore.prefix_map.survey import PrefixNode, PrefixPicture
from router.dashboard.notices import Notice
from router.dashboard.operator_views import counts, hops, ms, process, request_summary
from router.dashboard.samples import Sample
from router.events import Cancelled, Failed
from router.requests.counts import PageCounts
from router.requests.explain import RequestRecord
from router.state import RouterState
from router.views import ProcessView, RouterStats

RECORDS = 1_000
"""Records of requests that a snapshot looks through."""

_NEWEST, _TROUBLED, _SLOWEST = 24, 12, 12  # of these, that it has
_PROCESSES = 200
_NOTICES = 40
_SAMPLES = 12  # a page that missed more than these asks for all
_TEXT = 200  # characters of a text that comes from elsewhere


class ProcessCard(Process, frozen=True, kw_only=True):
    """One process. `pages` is how many it holds by tier, as far as the router knows; none: not looked at yet."""

    moved: PageCounts
    pages: Mapping[Medium, int] | None


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


class RequestRow(RequestSummary, frozen=True, kw_only=True):
    """One request. `name` is the cluster's, by which it is explained. `tags`: newest, troubled, slowest."""

    predicted_ttft_ms: float | None = None
    hops: Mapping[str, float]  # milliseconds to each instant that was reached
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


class Totals(Counts, frozen=True, kw_only=True):
    """The router's counts, and what it knows of."""

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
    models: Sequence[str]  # the same of models


class Snapshot(Struct, frozen=True):
    """What the page polls. `sequence` grows by one each second."""

    sequence: int
    at_ms: int  # Unix time
    router: RouterCard
    unready: str  # why no request can be served; "": one can
    processes: Sequence[ProcessCard]
    processes_omitted: int
    waiting: Mapping[int, int]  # requests in the queue, by level of priority
    bottleneck: Bottleneck | None
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


def samples_of(samples: Sequence[Sample]) -> list[Sample]:
    """The samples that a snapshot repeats."""
    return [*samples][-_SAMPLES:]


def process_cards(
    views: Sequence[ProcessView], stats: RouterStats, tiers: Mapping[str, Mapping[Medium, int]] | None
) -> list[ProcessCard]:
    """The processes but for the router. `tiers`: pages by incarnation and tier."""
    return [
        ProcessCard(
            **structs.asdict(process(view)),
            moved=stats.counts.pages.get(view.peer.name) or PageCounts(),
            pages=None if tiers is None or view.gone else tiers.get(view.peer.incarnation, {}),
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
                for holder, media in state.kv_index.map.holders_of(node.mask).items()
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
    fields = structs.asdict(request_summary(record, now))
    fields |= {name: fields[name][:_TEXT] for name in ("outcome", "waits_because")}
    predicted = record.attempts[0].predicted_ttft if record.attempts else None
    return RequestRow(**fields, predicted_ttft_ms=ms(predicted), hops=hops(record.timeline), tags=tags)


def notice_rows(notices: Sequence[Notice], now: float) -> list[NoticeRow]:
    return [
        NoticeRow(one.number, int((now - one.at) * 1_000), one.level, one.kind, one.text, one.request, one.more)
        for one in notices[:_NOTICES]
    ]


def totals_of(stats: RouterStats) -> Totals:
    return Totals(**structs.asdict(counts(stats)), pages_known=stats.kv_index.pages, pins=sum(stats.pins.values()))
