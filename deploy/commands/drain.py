"""`baton drain` and `baton role`: wait until a worker is empty, or has its new role."""

from __future__ import annotations

import time

from baton.client import Client, is_up
from baton.errors import ProcessNotFound
from baton.messages import WorkerRole
from baton.v1 import cluster_pb2

_POLL = 0.1


def until_empty(client: Client, worker: cluster_pb2.Process, patience: float) -> cluster_pb2.Process:
    """Wait until the router has no attempt on the worker, at most `patience` seconds; return its last status.

    Raises ProcessNotFound if the worker has gone.
    """
    end = time.monotonic() + patience
    while worker.attempts and time.monotonic() < end:
        time.sleep(_POLL)
        listed = (process for process in client.status().processes if process.incarnation == worker.incarnation)
        if (found := next(listed, None)) is None:
            raise ProcessNotFound(f"{worker.name} has gone")
        worker = found
    return worker


def until_changed(client: Client, worker: str, role: WorkerRole, patience: float) -> tuple[cluster_pb2.Process, bool]:
    """Wait until the worker has `role`; return its last status, and whether it has the role.

    Ends early if the change of role is cancelled, and after `patience` seconds. Raises ProcessNotFound if the worker
    has gone.
    """
    wanted = cluster_pb2.ROLE_PREFILL if role == "prefill" else cluster_pb2.ROLE_DECODE
    end = time.monotonic() + patience
    while True:
        found = next((process for process in client.status().processes if process.name == worker), None)
        if found is None or not is_up(found):
            raise ProcessNotFound(f"{worker} has gone; its successor has the role that it is configured with")
        if found.role == wanted or not found.becoming or time.monotonic() >= end:
            return found, found.role == wanted
        time.sleep(_POLL)
