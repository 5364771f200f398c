"""A shell around a store's real state, without sockets: `kvstore.service`, but it handles an event when it arrives.

What a reply, a router and a disk are, a subclass says. The simulator's have durations. The tests' wait until a test
lets them go on.
"""

# pyright: strict

from collections import deque
from collections.abc import Sequence

from baton.messages import FromStore
from baton.store_protocol import StoreReply
from kvstore.arena.shared_slots import LeaveRing
from kvstore.disk.orders import DiskOrder
from kvstore.server import events
from kvstore.server.state import StoreState
from kvstore.transport.interface import PeerOrder
from simulator.transport import SimulatedTransport, SlotMemory


class StoreShell:
    """A store process, but for what its subclass says."""

    state: StoreState
    transport: SimulatedTransport

    def begin(self, state: StoreState, transport: SimulatedTransport) -> None:
        """Begin a new process, which knows nothing of an earlier one."""
        self.state, self.transport = state, transport
        self._arrived: deque[events.StoreEvent] = deque()
        self.handling = False

    @property
    def now(self) -> float:
        raise NotImplementedError

    @property
    def arena(self) -> SlotMemory:
        """What this node's workers map."""
        return self.transport.memory

    def handle(self, event: events.StoreEvent) -> None:
        """Handle an event and all that follow from it at once."""
        self._arrived.append(event)
        if self.handling:
            return
        self.handling = True
        try:
            while self._arrived:
                while self._arrived:
                    self.take_event(self._arrived.popleft())
                self.transport.flush()
        finally:
            self.handling = False

    def take_event(self, event: events.StoreEvent) -> Sequence[events.StoreCommand]:
        """Handle just this event. Return the commands, which are carried out."""
        commands = self.decide(event)
        for command in commands:
            self._carry_out(command)
        return commands

    def decide(self, event: events.StoreEvent) -> Sequence[events.StoreCommand]:
        """Tell the state, and return its commands."""
        return self.state.handle(event, self.now)

    def _carry_out(self, command: events.StoreCommand) -> None:
        match command:
            case events.SendReply(connection=connection, reply=reply):
                self.reply(connection, reply)
            case events.CloseConnection(connection=connection):
                self.close_connection(connection)
            case events.TellRouter(message=message, router=router):
                self.tell_router(message, router)
            case events.DivideArena():
                self.divide_arena()
            case LeaveRing():
                self.leave_ring(command)
            case DiskOrder():
                self.order_disk(command)
            case order:
                self.order_transport(order)

    # --- what a subclass says ---------------------------------------------------------------------------------------

    def reply(self, connection: int, reply: StoreReply) -> None:
        raise NotImplementedError

    def close_connection(self, connection: int) -> None:
        raise AssertionError(f"the store dropped the well-behaved worker of connection {connection}")

    def tell_router(self, message: FromStore, router: str) -> None:
        raise NotImplementedError

    def divide_arena(self) -> None:
        """Divide the arena. Most have no bytes to divide."""

    def leave_ring(self, left: LeaveRing) -> None:
        raise NotImplementedError

    def order_disk(self, order: DiskOrder) -> None:
        raise NotImplementedError

    def order_transport(self, order: PeerOrder) -> None:
        self.transport.carry_out(order)
