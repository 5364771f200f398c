"""A store whose disk's threads and whose connections go on when a caller says so."""

import itertools
from collections.abc import Sequence
from typing import Any

from baton.config import StoreConfig
from baton.messages import Peer
from kvstore.disk.orders import DiskOrder
from kvstore.server.events import StoreCommand, StoreEvent
from kvstore.server.state import StoreState
from simulator.store_shell import StoreShell
from simulator.transport import SimulatedTransport
from tests.support.fake_disk import DiskThreads, FakeDisk, Finished, Read, Write
from tests.support.held_agenda import HeldAgenda
from tests.support.wires import Wires

HEARTBEAT = 0.25  # seconds between the heartbeats of two stores
SILENCE = 3.0  # seconds without one until a store counts as gone


class HeldStore(StoreShell):
    """One store process after the other, on one disk."""

    incarnation = ""

    def __init__(self, agenda: HeldAgenda, wires: Wires, name: str, disk: FakeDisk) -> None:
        self.agenda, self.wires, self.name, self.disk = agenda, wires, name, disk
        self.files: dict[bytes, Any] = {}  # on disk, by key

    def start(self, incarnation: str, config: StoreConfig, admit_after: int, memory: Any) -> None:
        """A new process with an empty arena. What the threads of an earlier one have not done never happens."""
        self.agenda.drop("disk", self.incarnation)
        self.incarnation = incarnation
        self.disk.restart()
        self.threads = DiskThreads(self.files, memory)
        self._orders = itertools.count()
        me = Peer("store", f"store-{self.name}", self.name, incarnation, 1)
        self.begin(
            StoreState(me, config, self.disk, admit_after, HEARTBEAT, SILENCE),
            SimulatedTransport(incarnation, memory, self.hear_thread, self.wires.post),
        )

    @property
    def now(self) -> float:
        return self.agenda.now

    def decide(self, event: StoreEvent) -> Sequence[StoreCommand]:
        commands = super().decide(event)
        self.state.validate()
        return commands

    def order_disk(self, order: DiskOrder) -> None:
        assert isinstance(order, Write | Read)
        self.agenda.hold(("disk", self.incarnation, next(self._orders)), self.work_on_disk, order)

    def work_on_disk(self, order: Write | Read, ok: bool = True) -> None:
        """The disk's threads carry out an order, or fail to. They may take any order next."""
        self.hear_thread(self.threads.carry_out(order, ok))

    def hear_thread(self, event: Finished | Any) -> None:
        """Take an event of the disk's threads or of the transport's."""
        self.handle(event)
