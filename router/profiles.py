"""Traces of what a worker or store does: one at a time in a cluster. Pure."""

# pyright: strict

from baton.errors import ProcessNotFound, TraceConflict, shown
from baton.messages import StartTrace, StopTrace
from router.events import ProfileProcess
from router.members import ClusterMembership, MemberRecord
from router.outbox import Outbox


class Profiles:
    """Starts and ends traces. The members know the process that makes one."""

    def __init__(self, members: ClusterMembership, outbox: Outbox) -> None:
        self._members = members
        self._out = outbox

    def tracing(self, process: str) -> tuple[str, str]:
        """The mark of the trace that this worker or store makes, and its node. Raises ProcessNotFound, and
        TraceConflict when it makes none."""
        member = self._traceable(process)
        if not member.tracing:
            raise TraceConflict(
                f"{member.peer.name} makes no trace, so none can be stopped; it may have ended by itself"
            )
        return member.tracing, member.peer.node

    def start(self, order: ProfileProcess) -> None:
        """Have a worker or store make a trace. Raises ProcessNotFound, and TraceConflict while one is made."""
        member = self._traceable(order.process)
        if (busy := self._members.tracing()) is not None:
            name = busy.peer.name
            raise TraceConflict(
                f"{name} makes a trace already ({name}-{busy.tracing}.json), and a cluster makes one at a time; wait "
                f"until it has ended, or end it with `baton profile {name} --stop`"
            )
        member.traces(order.mark, self._out.send(member.incarnation, StartTrace(order.mark, order.steps)))

    def stop(self, process: str) -> None:
        """Have a trace end. Raises as `tracing`."""
        mark, _ = self.tracing(process)
        self._out.send(self._traceable(process).incarnation, StopTrace(mark))

    def _traceable(self, name: str) -> MemberRecord:
        """The live worker or store of that name."""
        member = self._members.named(name)
        if member is None:
            raise ProcessNotFound(
                f"no worker or store of the name {shown(name)!r} is live; `baton status` lists those that are"
            )
        return member
