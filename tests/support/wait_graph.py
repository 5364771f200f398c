"""The wait-for graph across the states that a test drives: it never has a cycle."""

from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter

from baton.waits import WaitEdge, WaitNode


class WaitCycle(AssertionError):
    """Processes wait for each other in a circle, which only a deadline ends."""


def assert_no_cycle(waits: Iterable[WaitEdge]) -> None:
    """Raise WaitCycle if a waiter waits, through others, for itself."""
    graph: TopologicalSorter[WaitNode] = TopologicalSorter()
    for waiter, awaited in waits:
        graph.add(waiter, awaited)
    try:
        graph.prepare()
    except CycleError as error:
        # The sorter names predecessors first; read backwards, each node waits for the next.
        raise WaitCycle("\n  waits for ".join(map(repr, reversed(error.args[1])))) from None
