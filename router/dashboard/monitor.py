"""What the router tells the page's pure part, and the snapshot that comes of it."""

# pyright: strict

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import baton
from baton.config import Config
from baton.messages import Medium, Peer
from baton.operator_address import router_names
from kvstore.prefix_map.survey import PrefixPicture, Survey
from router.dashboard import snapshot as views
from router.dashboard.notices import Notices
from router.dashboard.operator_views import bottleneck
from router.dashboard.samples import COLUMNS, Samples
from router.dashboard.snapshot import History, PrefixView, RouterCard, Snapshot
from router.state import RouterState


@dataclass(frozen=True)
class _Prefixes:
    view: PrefixView
    pages: Mapping[str, Mapping[Medium, int]]  # by incarnation and tier


class DashboardMonitor:
    """Remembers for the page what the state forgets. `state` is read and never changed."""

    def __init__(self, me: Peer, config: Config, model: str, state: RouterState) -> None:
        self._me, self._config, self._model, self._state = me, config, model, state
        self.samples = Samples()
        self.notices = Notices()
        self._began: float | None = None
        self._prefixes: _Prefixes | None = None

    def sample(self, now: float, at_ms: int) -> None:
        """A second has passed. `at_ms`: now, as Unix time."""
        self._began = now if self._began is None else self._began
        self.samples.take_sample(self._state.stats(), now, at_ms)

    # --- what is shown -----------------------------------------------------------------------------------------------

    def survey(self) -> Survey:
        """Begin a look at the prefix map; `surveyed` takes what comes of it."""
        return self._state.kv_index.map.survey()

    def surveyed(self, survey: Survey, picture: PrefixPicture, now: float) -> None:
        """The look at the prefix map has ended."""
        names = {view.peer.incarnation: view.peer.name for view in self._state.processes(now)}
        pages: defaultdict[str, dict[Medium, int]] = defaultdict(dict)
        for mask, count in survey.pages.items():
            for holder, media in self._state.kv_index.map.holders_of(mask).items():
                for medium in media:
                    pages[holder][medium] = pages[holder].get(medium, 0) + count
        self._prefixes = _Prefixes(views.prefix_view(picture, self._state, names), dict(pages))

    def snapshot(self, now: float, at_ms: int, unready: str | None, models: Sequence[str]) -> Snapshot:
        """The cluster as it is now. `unready`: why no request can be served; none: one can. `models`: their names."""
        stats, processes, prefixes = self._state.stats(), self._state.processes(now), self._prefixes
        cards = views.process_cards(processes, stats, prefixes.pages if prefixes else None)
        card = self._state.card
        return Snapshot(
            sequence=self.samples.sequence,
            at_ms=at_ms,
            router=RouterCard(
                name=self._me.name,
                node=self._me.node,
                incarnation=self._me.incarnation,
                version=baton.__version__,
                cluster=self._config.cluster.name,
                model=self._model,
                uptime_s=int(now - self._began) if self._began is not None else 0,
                page_size=self._config.pages.page_size,
                page_bytes=card.page_bytes if card else 0,
                max_context=card.max_context if card else 0,
                routers=router_names(self._config.cluster.routers),
                models=models,
            ),
            unready=unready or "",
            processes=cards,
            processes_omitted=len(processes) - len(cards),
            waiting=stats.waiting,
            bottleneck=bottleneck(stats),
            totals=views.totals_of(stats),
            columns=COLUMNS,
            samples=views.samples_of(self.samples.newest),
            requests=views.request_rows(self._state.recent(views.RECORDS), now),
            notices=views.notice_rows(self.notices.last(views.RECORDS), now),
            prefixes=prefixes.view if prefixes else None,
        )

    def history(self) -> History:
        return History(COLUMNS, [*self.samples.newest])
