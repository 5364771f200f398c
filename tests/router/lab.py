"""A router state with peers that say exactly what a test lets them say."""

from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec

from baton import config as settings
from baton import messages as msg
from baton.clock import Tick
from baton.errors import BatonError
from kvstore.keys import namespace_root, page_keys
from router import events
from router.generation_request import GenerationRequest
from router.placement.policy import PlacementPolicy
from router.queueing.admission import ModelLimits
from router.state import RouterState
from simulator.router_shell import RouterShell
from tests.router.model import CONFIG, CONTEXT, NAMESPACE, PAGE, ROUTER, VOCAB, card, load_of, submit
from tests.support.wait_graph import assert_no_cycle

Commands: TypeAlias = Sequence[events.RouterCommand]
M = TypeVar("M", bound=msg.Message)


class Lab(RouterShell):
    """Time stands still unless a test moves it. The router's state is valid after every event."""

    now = 100.0

    def __init__(self, config: settings.Config = CONFIG, placer: PlacementPolicy | None = None) -> None:
        self.config = config
        super().__init__(ROUTER, RouterState(ROUTER, config, ModelLimits(VOCAB, CONTEXT), placer))
        self.log: list[events.RouterCommand] = []
        self.requests: dict[str, GenerationRequest] = {}
        self.outputs: dict[str, list[int]] = {}
        self.ends: dict[str, events.RequestEnded] = {}

    def tell(self, event: events.RouterEvent) -> Commands:
        if isinstance(event, GenerationRequest):
            self.requests[event.name], self.outputs[event.name] = event, []
        commands = super().tell(event)
        self.state.validate()
        assert_no_cycle(self.state.waits())
        self.log += commands
        return commands

    def post(self, envelope: msg.Envelope[Any]) -> None:
        """Keep it from its peer: it is in the log."""

    def emit(self, request: str, tokens: Sequence[int]) -> None:
        assert request not in self.ends, "tokens after the end"
        self.outputs[request] += tokens

    def end_request(self, end: events.RequestEnded) -> None:
        assert end.request not in self.ends, f"{end.request} ended twice"
        self.ends[end.request] = end

    # --- peers ---

    def hello(self, role: Any, name: str, node: str = "a", incarnation: str = "", **more: Any) -> Commands:
        incarnation = incarnation or f"{name}.1"
        more = {"events": f"tcp://{name}"} | more
        model: msg.ModelCard | None = more.pop("model", None if role == "store" else card())
        peer = msg.Peer(role, name, node, incarnation, 7)
        commands = self.tell(
            events.MessageReceived(msg.Envelope(incarnation, "", 1, msg.Hello(peer, model=model, **more)))
        )
        if role != "store" and any(
            isinstance(each, events.SendMessage) and isinstance(each.message, msg.Welcome) for each in commands
        ):
            self.report(incarnation, load_of(peer))
        return commands

    def join(self, role: Any, name: str, node: str = "a", incarnation: str = "", **more: Any) -> str:
        self.hello(role, name, node, incarnation, **more)
        return incarnation or f"{name}.1"

    def colocated(self, decoders: int = 1) -> list[str]:
        return [self.join("decode", f"decode-{i}") for i in range(decoders)]

    def busy(self) -> tuple[str, str]:
        """Of two decode workers the one that has request "r": its incarnation and its name."""
        self.colocated(2)
        self.submit("r")
        worker = self.to(self.decode)
        return worker, worker.removesuffix(".1")

    def split(self) -> tuple[str, str, str]:
        """A decode worker, a prefill worker and a store, all of one node."""
        return self.join("decode", "decode-0"), self.join("prefill", "prefill-0"), self.join("store", "store-0")

    def split_over_nodes(self) -> tuple[str, str, str, str]:
        """A decode worker of node b, a prefill worker of node a, and the stores of a and b, which serve each other."""
        decode, prefill = self.join("decode", "decode-0", "b"), self.join("prefill", "prefill-0", "a")
        stores = [self.join("store", f"store-{node}", node, data=f"tcp://{node}:1") for node in "ab"]
        return decode, prefill, stores[0], stores[1]

    def leaves(self, incarnation: str) -> None:
        """Have a process leave at once: it sends a Hello of an unknown protocol version."""
        (peer,) = [view.peer for view in self.state.processes(self.now) if view.peer.incarnation == incarnation]
        self.tell(events.MessageReceived(msg.Envelope(incarnation, "", 1, msg.Hello(peer, protocol=99))))

    def say(self, sender: str, message: Any, addressee: str = ROUTER.incarnation) -> Commands:
        return self.tell(events.MessageReceived(msg.Envelope(sender, addressee, 1, message)))

    def beat(
        self, sender: str, *held: msg.AttemptHeld, heard: int | None = None, age: int = 0, loop: int = 0
    ) -> Commands:
        """A heartbeat that lists exactly this; by default its sender has heard everything. `age`, `loop`: milliseconds
        since its step began, and since its loop turned."""
        heard = self.counts[sender] if heard is None else heard
        (load,) = [view.load for view in self.state.processes(self.now) if view.peer.incarnation == sender]
        return self.say(sender, msg.Heartbeat(heard, load, step_age_ms=age, loop_age_ms=loop, attempts=held))

    def holds(self, sender: str, order: GenerationRequest, pages: int, medium: Any = "CPU", sequence: int = 0) -> None:
        """Let the prefix map know that `sender` has the first pages of a request's prompt."""
        root = namespace_root(NAMESPACE, order.tenant)
        keys = page_keys(root, order.tokens[: pages * PAGE * 4], PAGE)
        self.tell(
            events.KvSnapshot(sender, msg.Snapshot(sequence, (msg.PageSegment(b"", keys, medium),) if keys else ()))
        )

    def report(self, sender: str, load: msg.LoadReport) -> None:
        """A heartbeat of a process that has no work."""
        self.say(sender, msg.Heartbeat(self.counts[sender], load))

    # --- requests ---

    def submit(self, name: str = "r", prompt: int = 10, max_tokens: int | None = 6, **more: Any) -> GenerationRequest:
        order = submit(name, prompt, max_tokens, received=self.now, **more)
        self.tell(order)
        return order

    def accepted(self, prompt: int = 10, **more: Any) -> GenerationRequest:
        """Submit a request that its decode worker accepts."""
        order = self.submit(prompt=prompt, **more)
        self.say(self.to(self.decode), msg.Accepted(order.name, 1))
        return order

    def tokens(self, sender: str, request: str, attempt: int, position: int, *tokens: int, **more: Any) -> Commands:
        return self.say(sender, msg.Tokens(1, (msg.Delta(request, attempt, position, tokens, **more),)))

    # --- time ---

    def advance(self, seconds: float, *, paused: bool = False) -> Commands:
        self.now += seconds
        return self.tell(Tick(seconds if paused else 0.0))

    # --- what was said ---

    def sent(self, kind: type[M], to: str | None = None) -> list[M]:
        """Every message of that kind so far (to that peer)."""
        sends = [command for command in self.log if isinstance(command, events.SendMessage)]
        return [s.message for s in sends if isinstance(s.message, kind) and to in (None, s.incarnation)]

    def to(self, message: msg.Message) -> str:
        """Return the incarnation that a message was sent to."""
        return next(c.incarnation for c in self.log if isinstance(c, events.SendMessage) and c.message is message)

    @property
    def decode(self) -> msg.Decode:
        return self.sent(msg.Decode)[-1]

    @property
    def prefill(self) -> msg.Prefill:
        return self.sent(msg.Prefill)[-1]

    def gone(self) -> dict[str, str | None]:
        """Why each process has gone; of live ones None."""
        return {view.peer.name: view.gone for view in self.state.processes(self.now)}

    def notes(self) -> list[str]:
        return [command.text for command in self.log if isinstance(command, events.Log)]

    def emitted(self, request: str = "r") -> list[int]:
        return self.outputs[request]

    def end(self, request: str = "r") -> events.RequestEnded:
        return self.ends[request]

    def error(self, request: str = "r") -> BatonError:
        outcome = self.end(request).outcome
        assert isinstance(outcome, events.Failed)
        return outcome.error

    def alive(self, request: str = "r") -> bool:
        return request not in self.ends

    def cancelled(self, peer: str, request: str = "r") -> list[int]:
        """Attempts that the peer was told to forget."""
        return [c.attempt for c in self.sent(msg.Cancel, peer) if c.request == request]


def held(request: str, attempt: int, position: int, *, ended: bool = False, short: bool = False) -> msg.AttemptHeld:
    return msg.AttemptHeld(request, attempt, position, ended, incomplete=short)


def named(request: str, attempt: int) -> msg.AttemptName:
    return msg.AttemptName(request, attempt)


def lab_with(placer: PlacementPolicy | None = None, **router: Any) -> Lab:
    """A lab with these settings of its router."""
    return Lab(msgspec.structs.replace(CONFIG, router=msgspec.structs.replace(CONFIG.router, **router)), placer)
