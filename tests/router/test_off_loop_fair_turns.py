"""Turns between tenants: order, bounds, and callers that leave while they wait."""

import asyncio
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from baton.errors import Overloaded
from router.frontend.off_loop import FairTurns


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.technique("Fair queueing of tenants")
async def test_a_backlog_delays_another_tenant_by_one_job() -> None:
    turns, order = FairTurns("x", 1, 100, 1_000), list[str]()

    async def job(tenant: str) -> None:
        leave = await turns.enter(tenant, 1)
        order.append(tenant)
        await asyncio.sleep(0)
        leave()

    await asyncio.gather(*(job("a") for _ in range(9)), job("b"), job("c"), job("b"))
    assert "".join(order) == "abcab" + "a" * 7


async def test_a_tenant_may_wait_with_so_much_and_no_other_tenant_counts() -> None:
    turns = FairTurns("a thread", 1, 3, 100)
    leave = await turns.enter("a", 1_000)
    with pytest.raises(Overloaded, match="1 jobs with 1000 bytes wait for a thread"):
        await turns.enter("a", 1)
    other = asyncio.create_task(turns.enter("b", 1_000))
    await settle()
    leave()
    (await other)()
    waiting = [asyncio.create_task(turns.enter("a", 10)) for _ in range(3)]
    await settle()
    with pytest.raises(Overloaded, match="3 jobs"):
        await turns.enter("a", 1)
    for task in waiting:
        (await task)()
    (await turns.enter("a", 1_000))()


@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.sampled_from(["enter", "leave", "cancel"]), st.sampled_from("abc"), st.integers(0, 5))),
)
@example(1, [*[("enter", "a", 0)] * 5, ("cancel", "a", 0), ("enter", "b", 1), ("cancel", "a", 4), ("leave", "a", 0)])
def test_no_place_is_lost_and_none_is_given_twice(places: int, steps: list[tuple[str, str, int]]) -> None:
    async def test() -> None:
        turns = FairTurns("x", places, 100, 1_000)
        tasks = list[asyncio.Task[Callable[[], None]]]()
        for step, tenant, which in steps:
            if step == "enter":
                tasks.append(asyncio.create_task(turns.enter(tenant, 1)))
            elif tasks and step == "cancel":
                tasks[which % len(tasks)].cancel()  # in the same moment a place may be given to it
            elif running := [task for task in tasks if task.done() and not task.cancelled()]:
                tasks.remove(task := running[which % len(running)])
                task.result()()
            if which % 2:
                await settle()
                tasks = [task for task in tasks if not task.cancelled()]
                running = [task for task in tasks if task.done()]
                assert len(running) == min(places, len(tasks))
        while tasks:
            await settle()
            tasks = [task for task in tasks if not task.cancelled()]
            for task in [task for task in tasks if task.done()]:
                tasks.remove(task)
                task.result()()
        leaves = [await turns.enter("d", 1) for _ in range(places)]
        for leave in leaves:
            leave()

    asyncio.run(asyncio.wait_for(test(), 30))
