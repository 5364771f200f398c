"""The process that vLLM runs in: it does what its worker orders, one thing after the other, and ends with it.

With vLLM's second model runner, a step is launched while the one before it runs, and a thread answers them (`Answers`).
On a GPU a second thread takes the orders to copy pages (`Beside`), as does one in each rank: no step waits for them.
"""

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import TypeVar

from baton.errors import BatonError, DeviceLost
from engine.cuda.errors import device_errors
from engine.vllm_runner import messages
from engine.vllm_runner.device_memory import lacks_of_memory
from engine.vllm_runner.layers import STATE_WINDOW
from engine.vllm_runner.ranks import CopyingRanks, RankLost, Ranks, die_with_parent
from kvstore.layout import LATENT, STATES

Result = TypeVar("Result")

log = logging.getLogger(__name__)

_PATIENCE = 600.0  # seconds, as for any order


class Fence:
    """Counts what one thread has done. Another one waits here before it does what must come later."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = threading.Condition()

    def advance(self) -> None:
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def reach(self, count: int) -> None:
        """Wait until so much has been done. Raises DeviceLost if it is not in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._count >= count, _PATIENCE):
                raise DeviceLost(f"a copy waits for duplicates: {self._count} of {count} have been made")


class Child:
    """A model in vLLM's executor."""

    def __init__(self, order: messages.Load) -> None:
        import torch

        from engine.vllm_runner.bring_up import NULL_BLOCKS, bring_up, lora_requests
        from engine.vllm_runner.steps import Steps

        torch.set_num_threads(max(1, order.threads // order.stage_ranks))
        self._null, self._exact_rows = NULL_BLOCKS, order.companion
        self._duplicates = Fence()
        with lacks_of_memory():
            self._config, executor, self._context, self._windows = bring_up(order)
        self._ranks = self._copiers = Ranks(executor, order.ranks, order.deadline, order.stages)
        shapes = self._ranks.call("baton_prepare")
        self._layers = [shape["num_layers"] for shape in shapes[:: order.stage_ranks]]  # by stage
        self.shape = {**shapes[0], "num_layers": sum(self._layers)}
        self._states = STATE_WINDOW in self._windows
        page_size = order.page_size if self._states else 0
        self._steps = Steps(
            self._ranks, lora_requests(order), self._windows, companion=order.companion, state_page=page_size,
            states_only=self.shape["form"] == STATES, drafts=self._config.num_speculative_tokens,
        )  # fmt: skip

    @property
    def has_ranks(self) -> bool:
        return self._ranks.size > 1

    def loaded(self) -> messages.Loaded:
        model = self._config.model_config
        shape = {name: self.shape[name] for name in ("num_layers", "num_kv_heads", "head_dim", "dtype", "form")}
        pages = self._config.cache_config.num_gpu_blocks - self._null
        if shape["form"] != LATENT:
            shape["num_kv_heads"] *= self._ranks.size // self._ranks.stages
        return messages.Loaded(
            num_pages=pages, **shape, computed_in=str(model.dtype).removeprefix("torch."),
            vocab_size=model.get_vocab_size(), max_positions=self._context, process_ids=self._ranks.process_ids,
            copies_beside=self.shape["beside"], window_groups=len(self._windows) - 1, window=max(self._windows),
            states=self._states, verifies=self.shape["verifies"] and self._exact_rows and not self._states,
        )  # fmt: skip

    @property
    def launches_ahead(self) -> bool:
        """A step may be launched before the one before it has ended."""
        return self._config.use_v2_model_runner

    def launch(self, order: messages.Step) -> Callable[[], messages.Drawn]:
        """Begin a step. Return what waits for its end."""
        started = self._steps.launch(order)
        return lambda: self._steps.collect(started)

    def copy_beside(self) -> None:
        """The orders to attach and copy come on another thread than all others from now on."""
        if self.has_ranks:
            self._copiers = CopyingRanks(self._ranks)

    def attach(self, order: messages.Attach, fd: int) -> messages.Copied:
        """Takes over `fd`."""
        try:
            path = f"/proc/{os.getpid()}/fd/{fd}"
            self._copiers.call("baton_attach", path, order.slots, order.page_bytes, self._layers)
        finally:
            os.close(fd)
        return messages.Copied()

    def carry_out(
        self,
        order: messages.Step
        | messages.AddAdapter
        | messages.RemoveAdapter
        | messages.Duplicate
        | messages.Out
        | messages.In,
    ) -> messages.Answer | None:
        began = time.perf_counter()
        match order:
            case messages.Step():
                return self.launch(order)()
            case messages.AddAdapter(number=number, name=name, path=path):
                self._steps.add_adapter(number, name, path)
                return messages.Copied()
            case messages.RemoveAdapter(number=number, gone=gone):
                self._steps.remove_adapter(number, gone)
                return messages.Copied()
            case messages.Duplicate(source=source, dest=dest):
                self._ranks.call("baton_duplicate", source + self._null, dest + self._null)
                self._duplicates.advance()
                return None
            case messages.Out(pages=pages, slots=slots):
                blocks = [page + self._null for page in pages]
                sums = self._copiers.checksums("baton_out", blocks, slots)
                if self._ranks.stages > 1:  # a head is whole once all stages have copied their layers of it
                    sums = self._copiers.checksums("baton_hash", slots)
                return messages.Copied(checksums=sums, seconds=time.perf_counter() - began)
            case messages.In(slots=slots, pages=pages, checksums=checksums):
                self._duplicates.reach(order.after)
                blocks = [page + self._null for page in pages]
                actual = self._copiers.checksums("baton_in", slots, blocks, bool(checksums))
                intact = [one == right for one, right in zip(actual, checksums, strict=True)] if checksums else None
                return messages.Copied(intact=intact or [True] * len(slots), seconds=time.perf_counter() - began)


def main(fd: int) -> None:
    """Serve the worker at the other end of the socket `fd` until it closes."""
    die_with_parent()
    os.umask(0o077)  # shared memory and sockets of the ranks are this user's alone
    serve(Connection(fd))


class Answers:
    """Answers steps in their order, on a thread, while the next one is launched."""

    def __init__(self, link: Connection) -> None:
        self._link = link
        self._thread = ThreadPoolExecutor(1, "answers")
        self._awaited: deque[Future[None]] = deque()

    def give(self, order: messages.Step, launched: Callable[[], messages.Answer] | messages.Failed) -> None:
        """Send that it failed, or what the step gives in the end, once all earlier answers have been sent."""
        self._awaited.append(self._thread.submit(self._give, order, launched))

    def wait(self, most: int = 0) -> None:
        """Wait until at most so many answers are still to come. End this process if one is not in time."""
        while len(self._awaited) > most:
            try:
                self._awaited.popleft().result(_PATIENCE)
            except TimeoutError:
                log.error("a step has not ended within %.0f s", _PATIENCE)
                os._exit(1)

    def _give(self, order: messages.Step, launched: Callable[[], messages.Answer] | messages.Failed) -> None:
        answer = launched if isinstance(launched, messages.Failed) else _attempt(order, launched)
        self._link.send_bytes(messages.encode(answer))


def _attempt(order: messages.Order, make: Callable[[], Result]) -> Result | messages.Failed:
    """Return what `make` returns, or that it failed. Where all is lost, end this process."""
    try:
        with device_errors():
            return make()
    except (RankLost, DeviceLost):
        log.exception("a rank or the device is lost, and with it all")
        os._exit(1)
    except Exception as error:  # one bad order must not end the others; the worker hears of it
        log.exception("an order failed")
        if isinstance(order, messages.Duplicate):
            raise  # it has no answer: the worker hears of it by this process's end
        return messages.Failed(error.reason if isinstance(error, BatonError) else type(error).__name__, str(error))


def serve(link: Connection, child: Child | None = None) -> None:
    """Carry out the orders that come by `link` until it closes. The first one loads the child, if there is none yet."""
    answers = Answers(link)

    def carry_out() -> messages.Answer | None:
        nonlocal child
        if isinstance(order, messages.Load):
            child = Child(order)
            return child.loaded()
        assert child is not None, "the first order is to load"
        if isinstance(order, messages.Beside):
            other = Connection(recv_handle(link))
            child.copy_beside()
            threading.Thread(target=serve, args=(other, child), name="copies", daemon=True).start()
            return messages.Copied()
        if isinstance(order, messages.Attach):
            return child.attach(order, recv_handle(link))
        return child.carry_out(order)

    while True:
        try:
            order = messages.decode_order(link.recv_bytes())
        except EOFError:
            if child is not None and child.has_ranks:
                os._exit(0)  # an orderly end of vLLM's processes takes seconds; the kernel ends them now
            return
        if isinstance(order, messages.Step) and child is not None and child.launches_ahead:
            answers.wait(1)  # vLLM has buffers for two steps
            answers.give(order, _attempt(order, partial(child.launch, order)))
            continue
        answers.wait()
        if (answer := _attempt(order, carry_out)) is not None:
            link.send_bytes(messages.encode(answer))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    main(int(sys.argv[1]))
