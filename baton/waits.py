"""Edges of the wait-for graph, as each pure state knows them. Tests check that it has no cycle.

Nodes, with the incarnation of the process that has them:

    ("request", router, name)      a request, for its workers
    ("sequence", worker, name)     an attempt on a decode worker, for its leases, or for device pages of others
    ("prompt", worker, name)       an attempt on a prefill worker, for its leases, for another prompt, or for slots
    ("lease", worker, number)     for pages of the node's store
    ("page", store, key)           for the worker that writes it, or for the fetch that brings it
    ("promise", store, key)        the same page as another store awaits it; it may still have to be made here
    ("fetch", store, number)       for pages of another store
    ("line", store)                prompts that are behind, for the head of the line for slots
    ("slots", worker, place)       a prompt that waits for slots, for the prompts that have them
    ("place", worker, place)       a prompt, as the store knows it

A node without an edge waits for nothing but its own thread, device or disk, or for an answer on its way. Where any of
several producers would do, the edge leads to the nearest one, so a cycle is always a fault.
"""

# pyright: strict

from typing import TypeAlias

WaitNode: TypeAlias = tuple[str | int | bytes, ...]
WaitEdge: TypeAlias = tuple[WaitNode, WaitNode]
"""The waiter, and what it waits for."""
