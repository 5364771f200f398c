"""A router state whose clients check what they get."""

from __future__ import annotations

from collections.abc import Sequence

from router.events import RequestEnded, RouterCommand, RouterEvent
from router.generation_request import GenerationRequest
from simulator.router_shell import RouterShell
from tests.support.wait_graph import assert_no_cycle


class CheckedRouter(RouterShell):
    """A router, and what each of its clients has sent and got. Its state is valid after every event."""

    submitted: dict[str, GenerationRequest]
    emitted: dict[str, list[int]]
    ended: dict[str, RequestEnded]

    def no_clients(self) -> None:
        """Begin without clients."""
        self.submitted, self.emitted, self.ended = {}, {}, {}

    def tell(self, event: RouterEvent) -> Sequence[RouterCommand]:
        commands = super().tell(event)
        self.state.validate()
        assert_no_cycle(self.state.waits())
        return commands

    def submit(self, event: GenerationRequest) -> None:
        self.submitted[event.name] = event
        self.emitted[event.name] = []
        self.tell(event)

    def output(self, request: str) -> Sequence[int]:
        """Return all tokens that a request is to get."""
        raise NotImplementedError

    def emit(self, request: str, tokens: Sequence[int]) -> None:
        assert request not in self.ended, "tokens after the end"
        got = self.emitted[request]
        got += tokens
        assert got == list(self.output(request)[: len(got)])

    def end_request(self, end: RequestEnded) -> None:
        assert end.request not in self.ended, f"{end.request} ended twice"
        self.ended[end.request] = end
