"""What the fuzzer of the store's socket takes for a finding, without a store."""

import socket
import threading
import time
from pathlib import Path

import msgspec

from baton.messages import Namespace
from baton.wire import ClusterKeys
from tests.fuzz import store_calls
from tests.fuzz.case import Case

LATE = 0.2  # seconds; a fuzzer that waited only as long as it had read before would give up after 0.01


def test_a_store_that_reads_late_is_no_finding(tmp_path: Path) -> None:
    ClusterKeys.read_or_make(tmp_path / "key")
    namespace = Namespace(b"m" * 16, "test", "float32", 16, 1, form="split", kv_heads=1)
    target = store_calls.StoreCalls("x", msgspec.json.encode(namespace).decode(), 64, str(tmp_path / "key"), "node")
    ours, store = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def read_late() -> None:
        time.sleep(LATE)
        while store.recv(2**16):
            pass

    with ours, store:
        reader = threading.Thread(target=read_late)
        reader.start()
        case = Case(1, "store", 1)
        store_calls._read(ours, 0.01)  # pyright: ignore[reportPrivateUsage]
        for _ in range(40):  # more than the kernel keeps for a peer
            assert target._send(case, ours, b"x" * 2**14)  # pyright: ignore[reportPrivateUsage]
        ours.shutdown(socket.SHUT_WR)
        reader.join(30)
