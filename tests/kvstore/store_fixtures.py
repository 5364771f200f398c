"""What the store's tests share."""

from baton.config import ArenaBytes, StoreConfig
from baton.messages import Namespace, Peer
from baton.store_protocol import Attach, Attached, EndLease, Reserve, Reserved, Seal, Sealed, StoreCall, StoreReply
from kvstore.events.changes import CacheChange
from kvstore.server.events import CallReceived, Connected, SendReply, StoreCommand, StoreEvent
from kvstore.server.state import StoreState
from tests.kvstore.chains import key, keys, parent
from tests.support.fake_disk import FakeDisk

NAMESPACE = Namespace(bytes(16), "test", "float32", 16, 1, form="split", kv_heads=1)
STORE = Peer("store", "store-0", "node", "store-0-1", 1)


def store_config(slots: int, hold_seconds: float, share: float) -> StoreConfig:
    """Of a store whose pages have 100 bytes."""
    return StoreConfig(
        host_cache_bytes=ArenaBytes(slots * 100), lease_ms=int(hold_seconds * 1_000), writer_share=share, load_share=1.0
    )


class Rig:
    """A store's state with workers that say one thing at a time. Every step is validated."""

    def __init__(
        self, slots: int = 8, hold_seconds: float = 10.0, share: float = 1.0, admit_after: int = 1_000
    ) -> None:
        self.disk = FakeDisk()
        self.state = StoreState(STORE, store_config(slots, hold_seconds, share), self.disk, admit_after, 0.25, 3.0)
        self.now = 0.0
        self._connections = 0

    def do(self, event: StoreEvent) -> list[StoreCommand]:
        commands = self.state.handle(event, self.now)
        self.state.validate()
        return commands

    def connect(self, pid: int) -> int:
        self._connections += 1
        self.do(Connected(self._connections, pid))
        return self._connections

    def attach(self, pid: int, incarnation: str = "i", namespace: Namespace = NAMESPACE, page_bytes: int = 100) -> int:
        connection = self.connect(pid)
        answer = self.say(connection, Attach(Peer("decode", "w", "node", incarnation, pid), namespace, page_bytes))
        assert isinstance(answer[-1], Attached)
        return connection

    def say(self, connection: int, call: StoreCall) -> list[StoreReply]:
        """What the caller hears at once."""
        return self.tell(connection, call).get(connection, [])

    def tell(self, connection: int, call: StoreCall) -> dict[int, list[StoreReply]]:
        """What anybody hears at once, by connection."""
        return replies(self.do(CallReceived(connection, call)))

    def write(self, connection: int, lease: int, chain: str, start: int = 0, hold: bool = False) -> None:
        """Reserve and seal the pages of a chain, and forget the lease unless it is to hold them."""
        (reserved,) = self.say(connection, Reserve(lease, parent(chain, start), b"".join(keys(chain, start))))
        assert isinstance(reserved, Reserved), reserved
        count = len(chain) - start
        assert Sealed(lease, 0, count) in self.say(connection, Seal(lease, 0, tuple(range(count)), hold))
        if not hold:
            self.say(connection, EndLease(lease))

    def has(self, chain: str) -> bool:
        """Whether the last page of a chain can be found."""
        return any(run.keys.endswith(key(chain)) or key(chain) in run.keys for run in self.state.snapshot())

    def changes(self) -> list[CacheChange]:
        return [change for medium, changes in self.state.drain_events() for change in changes if medium == "CPU"]


def replies(commands: list[StoreCommand]) -> dict[int, list[StoreReply]]:
    heard: dict[int, list[StoreReply]] = {}
    for command in commands:
        if isinstance(command, SendReply):
            heard.setdefault(command.connection, []).append(command.reply)
    return heard
