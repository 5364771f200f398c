"""What placement may see of the cluster: live workers with what they have been given, live stores, the time.

A `View` is read by whoever places (`router.placement.Placer`) and changed by nobody there. Pure.
"""

# pyright: strict

from __future__ import annotations

from baton.config import Config
from router.peers import Member, Members


class View:
    """The live processes, as the router knows them at `now`."""

    def __init__(self, config: Config, members: Members) -> None:
        self.config = config
        self.members = members
        self.now = 0.0  # seconds

    @property
    def decoders(self) -> list[Member]:
        return self.members.of("decode")

    @property
    def prefillers(self) -> list[Member]:
        return self.members.of("prefill")

    @property
    def stores(self) -> list[Member]:
        return self.members.of("store")
