"""Sockets that speak messages over ZMQ, and the only importer of zmq. (The local store link is `baton.unix`.)

- `links`: between the router and all other processes: `Listener`, `RouterSocket`, `HeartbeatSender`
- `events`: KV events, and missed batches again: `Publisher`, `Subscriber`, `ReplayServer`, `ReplayClient`
- `poller`: waits for links and plain file descriptors together: `Poller`
- `sockets`: what all of them have in common: `use_keys`
- `keys`: the cluster's key pair: `ClusterKeys`
- `guard`: access to an encrypted socket: `refused`

Sockets bind to loopback unless told otherwise, and all of them are encrypted. Nothing is unpickled: every frame goes
through a typed decoder, and what does not decode is counted and dropped.
"""

from baton.wire.events import Publisher, ReplayClient, ReplayServer, Subscriber
from baton.wire.guard import refused
from baton.wire.keys import ClusterKeys
from baton.wire.links import HeartbeatSender, Listener, RouterSocket
from baton.wire.poller import Poller
from baton.wire.sockets import MAX_MESSAGE_BYTES, operator_key, use_keys

__all__ = [
    "MAX_MESSAGE_BYTES",
    "ClusterKeys",
    "HeartbeatSender",
    "Listener",
    "Poller",
    "Publisher",
    "ReplayClient",
    "ReplayServer",
    "RouterSocket",
    "Subscriber",
    "operator_key",
    "refused",
    "use_keys",
]
