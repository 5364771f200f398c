"""Sockets that speak messages over ZMQ, and the only importer of zmq. (The local store link is `baton.unix`.)

`links`     the router and everybody else: `Listener`, `Link`, `Heart`
`events`    KV events: `Publisher`, `Subscriber`
`poller`    waits for links and plain file descriptors together: `Poller`
`sockets`   what all of them have in common

Sockets bind to loopback unless told otherwise. Nothing is unpickled: every frame goes through a typed decoder, and what
does not decode is counted and dropped.
"""

from baton.wire.events import Publisher, Subscriber
from baton.wire.links import Heart, Link, Listener
from baton.wire.poller import Poller
from baton.wire.sockets import MAX_MESSAGE_BYTES

__all__ = ["MAX_MESSAGE_BYTES", "Heart", "Link", "Listener", "Poller", "Publisher", "Subscriber"]
