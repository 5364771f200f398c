"""The metrics port against strangers: idle, slow and many connections, and no descriptors left."""

import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from baton import metrics_server
from baton.metrics import Metrics
from baton.metrics_server import MAX_CONNECTIONS, Answer, MetricsServer
from baton.ports import listen
from tests.support.eventually import eventually

pytestmark = pytest.mark.slow

PATIENCE = 60.0


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    server = MetricsServer(listen("127.0.0.1"), lambda _: Answer(b"page\n"))
    yield server
    server.close()


def connect(server: MetricsServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)


def scrape(server: MetricsServer) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=PATIENCE) as answer:
        body: bytes = answer.read()
        return body


def ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def threads() -> int:
    return sum("process_request" in thread.name for thread in threading.enumerate())


def test_the_oldest_connections_give_way(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "DEADLINE", PATIENCE)  # so that all stay for as long as they may
    with ExitStack() as stack:
        idle = [stack.enter_context(connect(server)) for _ in range(MAX_CONNECTIONS)]
        eventually(lambda: server.connections == MAX_CONNECTIONS, "the limit is reached")
        more = [stack.enter_context(connect(server)) for _ in range(MAX_CONNECTIONS // 2)]
        for connection in idle[: len(more)]:
            assert ended(connection)
        assert scrape(server) == b"page\n"
        assert ended(idle[len(more)])
        assert server.connections <= MAX_CONNECTIONS
        eventually(lambda: threads() <= MAX_CONNECTIONS, "the threads of those that were closed have ended")


def test_those_that_asked_give_way_last_and_threads_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "DEADLINE", 2 * PATIENCE)  # so that only others make them give way
    begun, go = threading.Semaphore(0), threading.Event()

    def answer(_: object) -> Answer:
        begun.release()
        assert go.wait(PATIENCE)
        return Answer(b"page\n")

    server = MetricsServer(listen("127.0.0.1"), answer)
    with ExitStack() as stack:
        stack.callback(server.close)

        def ask() -> socket.socket:
            asking = stack.enter_context(connect(server))
            asking.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert begun.acquire(timeout=PATIENCE)
            return asking

        first = ask()
        silent = [stack.enter_context(connect(server)) for _ in range(MAX_CONNECTIONS + 1)]
        assert all(ended(each) for each in silent[:2])
        clients = [ask() for _ in range(2 * MAX_CONNECTIONS - 1)]
        assert ended(first)
        assert ended(clients[0])
        assert threads() == 2 * MAX_CONNECTIONS
        with connect(server) as refused:
            assert ended(refused)
        go.set()
        assert clients[-1].recv(100).startswith(b"HTTP/1.0 200 ")
        eventually(lambda: threads() <= MAX_CONNECTIONS, "the threads of those that were closed have ended")


def test_a_head_is_bounded(server: MetricsServer) -> None:
    for head in (
        b"GET /" + b"x" * 16_384,
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 101,
        b"GET / HTTP/1.1\r\nX: " + b"y" * 16_384,
    ):
        with connect(server) as connection:
            connection.sendall(head)
            assert connection.recv(65_536).split()[1] == b"431"


def test_a_name_that_another_site_may_own_gets_no_page(server: MetricsServer) -> None:
    for host, status in ((b"localhost:1", b"200"), (b"[::1]", b"200"), (b"evil.example:1", b"403")):
        with connect(server) as connection:
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: %s\r\n\r\n" % host)
            assert connection.recv(65_536).split()[1] == status


def test_idle_and_slow_connections_end_by_themselves(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "DEADLINE", 0.5)
    with connect(server) as idle, connect(server) as slow:
        stopped = threading.Event()

        def trickle() -> None:
            """One byte now and then: no read of the server waits for long."""
            for byte in b"GET /metrics HTTP/1.1\r\nX: " + b"y" * 100_000:
                if stopped.wait(0.01):
                    return
                try:
                    slow.send(bytes([byte]))
                except OSError:
                    return

        thread = threading.Thread(target=trickle)
        thread.start()
        assert ended(idle)
        assert ended(slow)
        stopped.set()
        thread.join()
    eventually(lambda: not server.connections, "both have ended")
    eventually(lambda: not threads(), "their threads have ended")
    assert scrape(server) == b"page\n"


def test_rubbish_writes_nothing(server: MetricsServer, capfd: pytest.CaptureFixture[str]) -> None:
    for rubbish in (
        b"\xff" * 100_000,
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"PUT / HTTP/1.1\r\n\r\n",
    ):
        with connect(server) as connection:
            try:
                connection.sendall(rubbish)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65_536):
                    pass
            except TimeoutError:
                raise
            except OSError:  # reset, or no longer connected when `shutdown` is called
                pass
    eventually(lambda: not server.connections, "all have ended")
    assert scrape(server) == b"page\n"
    assert capfd.readouterr() == ("", "")


def test_a_page_is_rendered_twice_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, now, rendered = Metrics(), [10.0], 0
    text = metrics.text

    def render() -> bytes:
        nonlocal rendered
        rendered += 1
        return text()

    monkeypatch.setattr(metrics, "text", render)
    monkeypatch.setattr("baton.metrics.time.monotonic", lambda: now[0])
    for _ in range(100):
        metrics.page()
    assert rendered == 1
    metrics.publish({"num_requests_running": 3})
    now[0] += 1.0
    assert b"baton_num_requests_running 3.0" in metrics.page()
    assert rendered == 2


WITHOUT_DESCRIPTORS = """
import os, resource, socket, time, urllib.request
from baton.metrics_server import Answer, MetricsServer
from baton.ports import listen
server = MetricsServer(listen("127.0.0.1"), lambda _: Answer(b"page"))
address = ("127.0.0.1", server.port)
clients = [socket.socket() for _ in range(3)]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
held = []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
for client in clients:
    client.connect(address)  # taken by the kernel; the server has no descriptor for it
before = time.process_time()
time.sleep(1.5)
assert time.process_time() - before < 1.0, "a busy loop"
for descriptor in held:
    os.close(descriptor)
assert urllib.request.urlopen("http://127.0.0.1:%d/" % server.port, timeout=60).read() == b"page"
server.close()
"""


def test_no_descriptor_left_means_not_now() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_DESCRIPTORS], check=True, timeout=2 * PATIENCE, capture_output=True, text=True
    )
    assert done.stderr.count("\n") <= 1  # one line, on the standard handler
