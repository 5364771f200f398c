"""The other routers of the cluster: what each of them knows, so that any router's operator is told of all.

Clients share one port among all routers, so no client knows which router has its request. Each router is asked at its
operator's address, which follows from its name. One that does not answer is left out.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TypeVar

from msgspec import structs

from baton import operator_port
from baton.client import AsyncClient
from baton.config import Config
from baton.errors import BatonError, RequestNotFound, Unavailable
from baton.logs import RateLimitedLog
from baton.operator_address import router_names
from baton.operator_api import Bottleneck, Counts, OperatorCall, Status

log = RateLimitedLog(logging.getLogger(__name__))

A = TypeVar("A")

_SECONDS = 1.0  # for one answer


class OtherRouters:
    """Asks the other routers. A cluster of one router has none."""

    def __init__(self, config: Config, me: str, key: str | None) -> None:
        """`key`: an operator's, for ports on loopback."""
        self._config = config
        self._key = key or ""
        self.names = [name for name in router_names(config.cluster.routers) if name != me]

    @property
    def targets(self) -> list[str]:
        """Their operator's addresses, as they are now: a socket moves if its folder is removed."""
        return [*map(self._target, self.names)]

    async def ask_all(self, call: OperatorCall[A]) -> list[A]:
        """Return the answers of those that have one."""
        answers = await asyncio.gather(*(self.ask(name, call) for name in self.names), return_exceptions=True)
        replies: list[A] = []
        for name, answer in zip(self.names, answers, strict=True):
            if isinstance(answer, Unavailable):
                log.warning("%s does not answer: %s", name, answer)
            elif not isinstance(answer, BaseException):
                replies.append(answer)
            elif not isinstance(answer, BatonError):
                raise answer
        return replies

    async def ask(self, name: str, call: OperatorCall[A]) -> A:
        """Return one router's own answer. Raises BatonError."""
        if name not in self.names:
            raise RequestNotFound(f"there is no router {name!r} here; the others are {self.names}")
        async with AsyncClient(operator=self._target(name), api_key=self._key, one_router=True) as client:
            return await client.ask(call, _SECONDS)

    def _target(self, name: str) -> str:
        return operator_port.target_of(self._config.router.operator, self._config.cluster.name, name)


def joined(mine: Status, other: Status) -> Status:
    """Return a status with another router's added: that router itself, its requests, its attempts on each worker."""
    first, *rest = mine.processes
    attempts = {process.incarnation: process.attempts for process in other.processes[1:]}
    rest = [structs.replace(one, attempts=one.attempts + attempts.get(one.incarnation, 0)) for one in rest]
    sums = {name: count + getattr(other.counts, name) for name, count in structs.asdict(mine.counts).items()}
    use, more = mine.bottleneck, other.bottleneck
    if use and more:
        # Each tells the use that its own requests make. What one worker more would do can't be added.
        use = Bottleneck(use.prefill + more.prefill, use.decode + more.decode)
    processes = [first, other.processes[0], *rest]
    return structs.replace(mine, processes=processes, counts=Counts(**sums), bottleneck=use)
