"""One process's links to two routers, over real sockets: each hears what is its own, and is lost alone."""

import asyncio

from baton import messages as msg
from baton.membership import RouterLost
from baton.router_links import RouterLinks, RouterMessage
from baton.wire import Listener
from tests.baton.test_wire import ME
from tests.support.virtual_clock import VirtualClock

SILENCE = 60.0


def router(name: str) -> tuple[msg.Peer, Listener]:
    me = msg.Peer("router", name, "n0", f"{name}.1", 1)
    return me, Listener("tcp://127.0.0.1:0", me)


async def hears(listener: Listener, kind: type[msg.Message]) -> msg.Message:
    while not isinstance(message := (await listener.receive()).message, kind):
        pass
    return message


async def heard(routers: RouterLinks, now: float, count: int) -> list[RouterMessage | RouterLost]:
    received: list[RouterMessage | RouterLost] = []
    while len(received) < count:
        received += routers.receive(now, 0.0)
        await asyncio.sleep(0.005)
    return received


async def test_two_routers_are_told_apart() -> None:
    (one, first), (two, second) = router("one"), router("two")
    endpoints = [first.endpoint, second.endpoint, first.endpoint]
    routers = RouterLinks(endpoints, msg.Hello(ME), msg.ToDecode, VirtualClock())
    try:
        assert len(routers.links) == 2
        assert not list(routers.receive(0.0, 0.0))
        for peer, listener, heartbeat_ms in ((one, first, 20), (two, second, 40)):
            await hears(listener, msg.Hello)
            listener.send(ME.incarnation, msg.Welcome(peer, heartbeat_ms, int(SILENCE * 1_000)))
            listener.send(ME.incarnation, msg.Cancel(peer.name, 1))
        received = await heard(routers, 1.0, 2)
        assert {(s.router, s.message.request) for s in received if isinstance(s, RouterMessage)} == {
            ("one.1", "one"),
            ("two.1", "two"),
        }
        assert routers.heartbeat == 0.02
        routers.say(msg.AttemptFailed("r", 1, "internal", "for two"), "two.1")
        routers.say(msg.AttemptFailed("r", 1, "internal", "for nobody"), "three.1")
        routers.tell_all(msg.WorkerDied("w", 1))
        assert await hears(second, msg.AttemptFailed) == msg.AttemptFailed("r", 1, "internal", "for two")
        for listener in (first, second):
            assert await hears(listener, msg.WorkerDied) == msg.WorkerDied("w", 1)
        routers.beat(
            lambda sequence, incarnation: msg.Heartbeat(sequence, msg.LoadReport(running=len(incarnation))), None
        )
        assert await hears(first, msg.Heartbeat) == msg.Heartbeat(2, msg.LoadReport(running=5))
        second.send(ME.incarnation, msg.Cancel("later", 1))
        assert await heard(routers, SILENCE, 1) == [RouterMessage("two.1", msg.Cancel("later", 1))]
        assert list(routers.receive(SILENCE + 2.0, 0.0)) == [RouterLost("one.1")]
    finally:
        routers.close()
        first.close()
        second.close()
