"""`baton drain`: wait until a worker that is given nothing new has nothing left."""

from __future__ import annotations

import time

from baton.errors import ProcessNotFound
from baton.v1 import cluster_pb2
from deploy.client import Client

_POLL = 0.1


def until_empty(client: Client, worker: cluster_pb2.Process, patience: float) -> cluster_pb2.Process:
    """How it is once the router has no attempt there, or after `patience` seconds. Raises ProcessNotFound when it has
    gone."""
    end = time.monotonic() + patience
    while worker.attempts and time.monotonic() < end:
        time.sleep(_POLL)
        listed = (process for process in client.status().processes if process.incarnation == worker.incarnation)
        if (found := next(listed, None)) is None:
            raise ProcessNotFound(f"{worker.name} has gone")
        worker = found
    return worker
