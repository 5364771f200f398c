"""What placement may see of the cluster: live workers with what they have been given, live stores, the time. Workers
that drain are not seen.

A `View` is read by whoever places (`router.placement.Placer`) and changed by nobody there. Pure.
"""

# pyright: strict

from __future__ import annotations

from baton.config import Config
from router.peers import Member, Members

_OUTPUT = 256.0  # tokens that a request is expected to generate, until some have ended
_WEIGHT = 0.02  # of the newest


class View:
    """The live processes, as the router knows them at `now`."""

    def __init__(self, config: Config, members: Members) -> None:
        self.config = config
        self.members = members
        self.now = 0.0  # seconds
        self._output = _OUTPUT

    def output(self, most: int) -> float:
        """How many tokens a request that may generate `most` more is expected to."""
        return min(most, self._output)

    def finished(self, tokens: int) -> None:
        """A request's whole output had so many tokens."""
        self._output += _WEIGHT * (tokens - self._output)

    @property
    def decoders(self) -> list[Member]:
        return self.members.open("decode")

    @property
    def prefillers(self) -> list[Member]:
        return self.members.open("prefill")

    @property
    def stores(self) -> list[Member]:
        return self.members.of("store")
