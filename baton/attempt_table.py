"""The attempts of one worker, and the routers that own them.

A request has at most one attempt here: the newest. A router decides about the attempts that it has ordered itself, and
about no other. An attempt ends with a Cancel, with a heartbeat of its router that does not list it, and with its
router. Pure.
"""

# pyright: strict

from collections.abc import Iterator, Mapping, ValuesView
from typing import Generic, Protocol, TypeAlias, TypeVar

from baton.errors import MalformedMessage
from baton.membership import RouterLost
from baton.messages import AttemptHeld, AttemptName, Cancel, RouterHeartbeat


class OwnedAttempt(Protocol):
    """What a worker keeps of an attempt."""

    @property
    def name(self) -> AttemptName: ...
    @property
    def owner(self) -> str:
        """Incarnation of the router that ordered it."""
        ...

    def held(self) -> AttemptHeld:
        """As the heartbeats list it."""
        ...


A = TypeVar("A", bound=OwnedAttempt)
EndOfAttempts: TypeAlias = Cancel | RouterHeartbeat | RouterLost


class AttemptTable(Mapping[str, A], Generic[A]):
    """One attempt for each request, by the request's name, in the order in which they came."""

    def __init__(self) -> None:
        self._attempts: dict[str, A] = {}

    def __getitem__(self, request: str) -> A:
        return self._attempts[request]

    def __iter__(self) -> Iterator[str]:
        return iter(self._attempts)

    def __len__(self) -> int:
        return len(self._attempts)

    def values(self) -> ValuesView[A]:
        return self._attempts.values()

    def add(self, attempt: A) -> None:
        assert attempt.name.request not in self._attempts, attempt.name
        self._attempts[attempt.name.request] = attempt

    def remove(self, attempt: A) -> None:
        del self._attempts[attempt.name.request]

    def before(self, name: AttemptName, router: str) -> A | None:
        """The attempt at that request that is here now. Raises MalformedMessage if another router has ordered it."""
        attempt = self._attempts.get(name.request)
        if attempt is not None and attempt.owner != router:
            raise MalformedMessage(f"request {name.request!r} is another router's")
        return attempt

    def find(self, name: AttemptName, router: str) -> A | None:
        """The attempt of that name, if this router has ordered it."""
        attempt = self._attempts.get(name.request)
        return attempt if attempt is not None and attempt.name == name and attempt.owner == router else None

    def owned_by(self, router: str) -> list[A]:
        return [attempt for attempt in self._attempts.values() if attempt.owner == router]

    def held_for(self, router: str) -> tuple[AttemptHeld, ...]:
        """The router's attempts, for a heartbeat to it."""
        return tuple(attempt.held() for attempt in self.owned_by(router))

    def ended_by(self, event: EndOfAttempts, router: str) -> list[A]:
        """The attempts that this message from a router, or its loss, ends."""
        match event:
            case Cancel(request=request, attempt=attempt):
                entry = self.find(AttemptName(request, attempt), router)
                return [] if entry is None else [entry]
            case RouterHeartbeat(attempts=listed):
                keep = frozenset(listed)
                return [attempt for attempt in self.owned_by(router) if attempt.name not in keep]
            case RouterLost(router=owner):
                return self.owned_by(owner)
