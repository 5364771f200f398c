"""Prompts that together take more slots than the arena has: each of them is prefilled, one after the other."""

import random

import pytest

from baton.clock import Tick
from baton.config import DecodeConfig, PrefillConfig
from baton.messages import AttemptFailed, Cancel, FetchIncomplete, Message, Prefilled, Started
from kvstore.server.head_of_line import HeadOfLine
from prefill_worker.scheduler import PrefillScheduler
from tests.decode_worker.test_scheduler_decisions import tokens_of
from tests.prefill_worker.test_scheduler_decisions import awaits, order
from tests.support.wait_graph import WaitCycle, assert_no_cycle
from tests.support.workers_and_stores import PAGE, Rig, RigWorker, reference

WINDOW = 4  # pages of one Reserve
STORE_MS = 10_000


def prefill(rig: Rig, max_num_seqs: int = 8, window: int = WINDOW) -> RigWorker:
    """A worker whose prompts of a few pages need several writes, as those of more than 1,024 pages do."""
    config = PrefillConfig(max_num_batched_tokens=16 * PAGE, store_timeout_ms=STORE_MS, max_num_seqs=max_num_seqs)
    worker = rig.worker("prefill", 64, config)
    worker.state._window = window
    return worker


def prompt(number: int, pages: int) -> list[int]:
    return [number] * (pages * PAGE + 1)


def ended(worker: RigWorker) -> list[Message]:
    return [message for message in worker.messages if isinstance(message, Prefilled | AttemptFailed)]


def run(rig: Rig, workers: list[RigWorker], prompts: int, rng: random.Random | None = None) -> list[Message]:
    """Let the workers take turns, one after the other or at random. As the router does, cancel a prompt once it is
    done. Return how each ended, in order."""
    result: list[Message] = []
    began = rig.now
    while len(result) < prompts:
        assert rig.now - began < 2 * STORE_MS / 1_000, "the prompts never end"
        for worker in workers if rng is None else rng.choices(workers, k=len(workers)):
            worker.handle(Tick())
            worker.turn()
            for message in ended(worker):
                assert isinstance(message, Prefilled | AttemptFailed)
                result.append(message)
                worker.messages.remove(message)
                worker.handle(Cancel(message.request, message.attempt))
        assert_no_cycle(rig.waits())
        rig.tick(0.02)
    return result


def assert_all_prefilled(rig: Rig, began: float, result: list[Message]) -> None:
    assert all(isinstance(message, Prefilled) for message in result), result
    assert rig.now - began < STORE_MS / 1_000, "a prompt waited for its deadline"
    stats = rig.store.stats(rig.now)
    assert (stats.reserved, stats.held, stats.leases) == (0, 0, 0)
    assert rig.store._line.waiting is None


def test_two_prompts_on_two_workers_that_together_exceed_the_arena() -> None:
    rig = Rig(10)
    workers = [prefill(rig), prefill(rig)]
    for number, worker in enumerate(workers):
        worker.handle(order(prompt(number, 8), f"r{number}"))
    assert_all_prefilled(rig, 0.0, run(rig, workers, 2))


def test_a_prompt_that_is_behind_and_keeps_its_leases_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefillScheduler, "_give_back", lambda self, job: [])
    with pytest.raises(WaitCycle):
        test_two_prompts_on_two_workers_that_together_exceed_the_arena()


def test_a_store_that_lets_every_prompt_hold_while_it_waits_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeadOfLine, "refused", lambda self, process, prompt, now: True)
    monkeypatch.setattr(HeadOfLine, "bars", lambda self, process, prompt, now: False)
    with pytest.raises(WaitCycle):
        test_two_prompts_on_two_workers_that_together_exceed_the_arena()


@pytest.mark.parametrize("decode_first", [True, False])
def test_two_nodes_that_hand_off_to_each_other_and_have_room_for_little_more_than_a_prompt(decode_first: bool) -> None:
    """Each arena has a finished prompt in it until the other node has got it, and that one's does not fit beside it."""
    rig = Rig(12, nodes=("a", "b"))
    there = {"a": "b", "b": "a"}
    prefills = {node: rig.worker("prefill", 64, PrefillConfig(store_timeout_ms=STORE_MS), node) for node in there}
    decodes = {node: rig.worker("decode", 64, DecodeConfig(fetch_timeout_ms=STORE_MS), node) for node in there}
    prompts = {"a": prompt(1, 8), "b": prompt(2, 8)}
    for order_decode in (decode_first, not decode_first):
        for node, other in there.items():
            if order_decode:
                sources = (rig.stores[other].source(8),)
                decodes[node].handle(awaits(prompts[node], 3, node, sources=sources))
            else:
                prefills[other].handle(order(prompts[node], node))
                rig.settle()
    while not all(Started(node, 1, fetched_pages=8) in decodes[node].messages for node in there):
        assert not [m for worker in decodes.values() for m in worker.messages if isinstance(m, FetchIncomplete)]
        assert rig.now < STORE_MS / 1_000, "the nodes wait for each other"
        for worker in (*prefills.values(), *decodes.values()):
            worker.handle(Tick())
        rig.settle()
        for node, other in there.items():
            if any(isinstance(message, Started) for message in decodes[node].messages):
                prefills[other].handle(Cancel(node, 1))
        rig.tick(0.25)
    for node in there:
        rig.settle()
        assert tokens_of(decodes[node].messages, node) == reference(prompts[node], 3)


@pytest.mark.parametrize("seed", range(20))
def test_prompts_of_many_shipments_in_any_order(seed: int) -> None:
    """None of three fits beside another. Turns come at random, so they meet in the store in many orders."""
    rng = random.Random(seed)
    rig = Rig(20)
    workers = [prefill(rig, max_num_seqs=2) for _ in range(3)]
    for number in range(6):
        workers[number % 3].handle(order(prompt(number, rng.randint(14, 19)), f"r{number}"))
    assert_all_prefilled(rig, 0.0, run(rig, workers, 6, rng))


def test_prompts_beyond_the_share_of_a_writer_pass_through_smaller_shipments() -> None:
    rig = Rig(24)  # a writer may reserve 12 slots
    workers = [prefill(rig, 2, window=1_024) for _ in range(2)]
    for number in range(4):
        workers[number % 2].handle(order(prompt(number, 20), f"r{number}"))
    assert_all_prefilled(rig, 0.0, run(rig, workers, 4))


@pytest.mark.parametrize("ending", ["cancelled", "killed", "stopped"])
def test_a_prompt_at_the_head_of_the_line_that_goes_lets_the_next_one_pass(ending: str) -> None:
    rig = Rig(12)
    holder, first, second = prefill(rig), prefill(rig), prefill(rig)
    holder.handle(order(prompt(0, 6), "held"))
    rig.settle()  # holds six slots until it is cancelled
    for number, worker in enumerate((first, second), 1):
        worker.handle(order(prompt(number, 8), f"r{number}"))
        rig.settle()
    assert rig.store._line.waiting is not None
    match ending:
        case "cancelled":
            first.handle(Cancel("r1", 1))
        case "killed":
            rig.kill(first)
        case _:
            pass  # its worker no longer asks: after `cluster.heartbeat_timeout_ms` its place is free
    if ending != "stopped":
        assert rig.store._line.waiting is None
    holder.handle(Cancel("held", 1))
    assert [type(message) for message in run(rig, [second], 1)] == [Prefilled]
