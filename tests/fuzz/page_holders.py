"""Holders of pages that a router follows: they join with sockets of their own for KV events and snapshots, and send
anything there.

The router joins them as it joins stores of other nodes and workers without room, so it places nothing on them. What
they hold is of keys of their own. At the end of a case the router must still follow a holder that does as it should.
"""

import random
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import zmq

from baton import messages as msg
from baton.client import Client
from baton.wire import ClusterKeys
from kvstore.events.changes import packed_digest
from tests.fuzz import links, values, wire_messages
from tests.fuzz.case import Case
from tests.fuzz.links import RouterLink

_HOLDERS = 6  # names, so that a new holder replaces an old one
_MOST = 2**16  # bytes of one message
_MEDIA = ("GPU", "CPU", "DISK", "TAPE")


class PageHolders:
    """Stores and workers that tell of pages."""

    threads = 2

    def __init__(self, endpoint: str, keys: str, card: str, operator: str) -> None:
        self._endpoint, self._keys = endpoint, ClusterKeys.read_file(Path(keys))
        self._card = msgspec.structs.replace(msgspec.json.decode(card, type=msg.ModelCard), pool_pages=0)
        self._client = Client(operator=operator)
        self._looks = ThreadPoolExecutor(self.threads)
        drawn = random.Random(2)
        self._chain = b"".join(drawn.randbytes(msg.KEY_BYTES) for _ in range(200))

    def run(self, case: Case) -> str:
        rng = case.rng
        # Of this thread alone: two holders of one name would replace each other without end.
        name = f"{threading.current_thread().name}-{rng.randrange(_HOLDERS)}"
        me = f"{name}.{secrets.token_hex(8)}"
        events, events_at = links.listening(zmq.PUB, self._keys)
        replay, replay_at = links.listening(zmq.ROUTER, self._keys)
        try:
            role: msg.Role = rng.choice(["store", "decode", "prefill"])
            peer = msg.Peer(role, name, f"node-{name}", me, 1)
            hello = msg.Hello(peer, model=None if role == "store" else self._card, events=events_at, replay=replay_at)
            with self._joined(case, hello) as link:
                asks = self._talk(case, link, events, replay)
            # What it has said of its last sequence can't be taken back, so it starts anew.
            until, followed = time.monotonic() + links.PATIENCE, False
            while not followed:
                peer = msgspec.structs.replace(peer, incarnation=f"{name}.{secrets.token_hex(8)}")
                with self._joined(case, msgspec.structs.replace(hello, peer=peer)) as link:
                    followed = self._is_followed(case, link, replay, until)
            return f"{role} followed" + ("" if asks else ", not asked before")
        finally:
            events.close(0)
            replay.close(0)

    @contextmanager
    def _joined(self, case: Case, hello: msg.Hello) -> Iterator[RouterLink]:
        """A process that the router has welcomed."""
        me = hello.peer.incarnation
        with links.opened(zmq.DEALER, self._endpoint, self._keys, me.encode()) as socket:
            link = RouterLink(socket, me)
            link.ask(
                case,
                lambda: wire_messages.sealed(me, "", link.next_sequence(), hello),
                lambda message: message["type"] == "Welcome",
            )
            yield link

    def _talk(self, case: Case, link: RouterLink, events: Any, replay: Any) -> bool:
        """Publish, and answer the router's questions, in any way. Return whether it has asked."""
        rng, asks = case.rng, False
        until = time.monotonic() + rng.choice([0.1, 0.3])
        while time.monotonic() < until:
            for _ in range(rng.choice([1, 5, 40])):
                events.send_multipart(self._batch(case, link.me), zmq.NOBLOCK)
            with suppress(zmq.ZMQError):
                while replay.poll(10):
                    identity, *_ = replay.recv_multipart(zmq.NOBLOCK)
                    asks = True
                    for frames in self._snapshot(case, link.me):
                        replay.send_multipart([identity, *frames], zmq.NOBLOCK)
            self._beat(link, rng.choice([0, 1, 2, 5, 2**40, 2**63 - 1]), rng.randrange(2**64))
        return asks

    def _beat(self, link: RouterLink, sequence: int, digest: int) -> None:
        beat = msg.Heartbeat(link.heard, msg.LoadReport(), events=sequence, digest=digest)
        link.say(wire_messages.sealed(link.me, link.router, link.next_sequence(), beat))

    # --- anything ----------------------------------------------------------------------------------------------------

    def _keys_of(self, rng: random.Random) -> bytes:
        """Packed keys: a stretch of a chain that all share, or of another one."""
        first, count = rng.randrange(190), rng.choice([0, 1, 2, 10, 100, 1_024])
        if rng.random() < 0.7:
            return self._chain[first * msg.KEY_BYTES : (first + count) * msg.KEY_BYTES]
        return rng.randbytes(count * msg.KEY_BYTES)

    def _parent(self, rng: random.Random) -> bytes:
        first = rng.randrange(200) * msg.KEY_BYTES
        return rng.choice(
            [b"", b"", self._chain[first : first + msg.KEY_BYTES], b"k" * 15, rng.randbytes(msg.KEY_BYTES)]
        )

    def _batch(self, case: Case, me: str) -> list[bytes]:
        """Topic, sequence and payload of a batch, or of what is none."""
        rng = case.rng
        events = [self._event(rng) for _ in range(rng.choice([0, 1, 3, 20]))]
        payload = _packed([1.0, events, 0])
        if rng.random() < 0.1:
            payload = values.damaged(rng, payload)
        topic = f"kv@{me}@m".encode() if rng.random() < 0.9 else values.data(rng, 90)
        sequence = rng.choice([0, 1, 2, 3, 4, 5, 6, 7, 2**32, 2**63, 2**64 - 1]).to_bytes(8, "big")
        frames = [topic, sequence, payload[:_MOST]]
        if rng.random() < 0.05:
            frames = [values.data(rng, 90)[: links.PART] for _ in range(rng.randrange(1, 6))]
        return [case.sending(frame) for frame in frames]

    def _event(self, rng: random.Random) -> Any:
        packed = self._keys_of(rng)
        keys: list[Any] = [packed[at : at + msg.KEY_BYTES] for at in range(0, len(packed), msg.KEY_BYTES)]
        if rng.random() < 0.05:
            keys = [values.anything(rng), *keys]
        match rng.randrange(5):
            case 0:
                return {"type": "AllBlocksCleared"}
            case 1:
                return {"type": "BlockRemoved", "block_hashes": keys, "medium": rng.choice(_MEDIA)}
            case 2 if rng.random() < 0.2:
                return values.anything(rng)
            case _:
                return {
                    "type": "BlockStored", "block_hashes": keys, "parent_block_hash": self._parent(rng) or None,
                    "token_ids": [], "block_size": 16, "lora_id": None, "medium": rng.choice(_MEDIA), "lora_name": None,
                }  # fmt: skip

    def _snapshot(self, case: Case, me: str) -> Sequence[list[bytes]]:
        """The parts of a snapshot, in order or not, each with the frames around it."""
        rng = case.rng
        topic, parts = f"kv@{me}@m".encode(), list[list[bytes]]()
        for part in range(rng.choice([1, 1, 2, 5])):
            runs = tuple(
                msg.PageSegment(self._parent(rng), self._keys_of(rng), rng.choice(["GPU", "CPU", "DISK"]))
                for _ in range(rng.choice([0, 1, 5]))
            )
            hints = {"runs": [runs, runs], "part": [part, part, 0], "sequence": [0, 0, 2**63 - 1], "last": [True]}
            raw = wire_messages.encoded(rng, msg.Snapshot, hints)[:_MOST]
            parts.append([case.sending(raw) for raw in ([b"", topic, raw] if rng.random() < 0.95 else [topic, raw])])
        if rng.random() < 0.2:
            rng.shuffle(parts)
        return parts

    # --- as it should ------------------------------------------------------------------------------------------------

    def _is_followed(self, case: Case, link: RouterLink, replay: Any, until: float) -> bool:
        """Tell of as many pages as no case before has, until the router knows of just these. Return whether it does: on
        a slow machine it may think that the holder is dead. Raises AssertionError when it is too late."""
        keys = case.rng.randbytes(3 * msg.KEY_BYTES)
        digest = packed_digest(keys, "CPU")
        raw = msgspec.msgpack.encode(msg.Snapshot(2**40, (msg.PageSegment(b"", keys, "CPU"),)))
        answers, known = 0, -1
        look = self._looks.submit(self._pages_known, link.me)  # on a slow machine longer than a holder may be silent
        while time.monotonic() < until:
            self._beat(link, 2**40, digest)
            with suppress(zmq.ZMQError):
                while replay.poll(20):
                    identity, *_ = replay.recv_multipart(zmq.NOBLOCK)
                    replay.send_multipart([identity, b"", f"kv@{link.me}@m".encode(), raw], zmq.NOBLOCK)
                    answers += 1
            list(link.receive(0.0))
            if look.done():
                known = look.result()
                if known in (3, -1):
                    return known == 3
                look = self._looks.submit(self._pages_known, link.me)
        raise AssertionError(
            f"the router does not follow {link.me} in time: it knows {known} pages, after {answers} snapshots"
        )

    def _pages_known(self, incarnation: str) -> int:
        """Of this holder; -1: the router knows no such process."""
        time.sleep(0.2)  # between two looks
        status = self._client.status(timeout=links.PATIENCE)
        return next((each.pages_known for each in status.processes if each.incarnation == incarnation), -1)


def _packed(tree: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(tree)
    except (OverflowError, UnicodeEncodeError, ValueError):  # MessagePack has no such number or text
        return b"\xc1"
