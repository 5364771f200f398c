"""The process that vLLM runs in: it does what its worker orders, one thing after the other, and ends with it."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

import msgspec

from baton.errors import BatonError
from engine.vllm_runner import messages
from engine.vllm_runner.messages import Answer, Attach, Copied, Duplicate, Failed, In, Load, Loaded, Order, Out, Step
from kvstore.checksum import join_checksums

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


class Child:
    """A model in vLLM's executor."""

    def __init__(self, order: Load) -> None:
        import torch

        from engine.vllm_runner.bring_up import NULL_BLOCKS, bring_up, lora_requests
        from engine.vllm_runner.steps import Steps

        torch.set_num_threads(order.threads)
        self._null = NULL_BLOCKS
        self._config, self._executor = bring_up(order)
        self._worker: Any = self._executor.driver_worker.worker
        self.shape = self._worker.baton_prepare()
        self._steps = Steps(self._executor, lora_requests(order))

    def loaded(self) -> Loaded:
        model = self._config.model_config
        shape = {name: self.shape[name] for name in ("num_layers", "num_kv_heads", "head_dim", "dtype", "form")}
        pages = self._config.cache_config.num_gpu_blocks - self._null
        return Loaded(num_pages=pages, **shape, vocab_size=model.get_vocab_size(), max_positions=model.max_model_len)

    def attach(self, order: Attach, fd: int) -> Copied:
        """Takes over `fd`."""
        try:
            self._worker.baton_attach(f"/proc/{os.getpid()}/fd/{fd}", order.slots, order.page_bytes)
        finally:
            os.close(fd)
        return Copied()

    def carry_out(self, order: Step | Duplicate | Out | In) -> Answer | None:
        """Return the answer, if there is one to this kind of order."""
        match order:
            case Step():
                return self._steps.run(order)
            case Duplicate(source=source, dest=dest):
                self._worker.baton_duplicate(source + self._null, dest + self._null)
                return None
            case Out(pages=pages, slots=slots):
                heads = self._worker.baton_out([page + self._null for page in pages], slots)
                return Copied(checksums=[join_checksums(each) for each in heads])
            case In(slots=slots, pages=pages, checksums=checksums):
                blocks = [page + self._null for page in pages]
                heads = self._worker.baton_in(slots, blocks, bool(checksums))
                if not checksums:
                    return Copied(intact=[True] * len(slots))
                return Copied(
                    intact=[join_checksums(each) == right for each, right in zip(heads, checksums, strict=True)]
                )


def main(fd: int) -> None:
    """Serve the worker at the other end of the socket `fd` until it closes."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    link = Connection(fd)
    orders: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(messages.Order)
    child: Child | None = None
    answer: Answer | None
    while True:
        try:
            order = orders.decode(link.recv_bytes())
        except EOFError:
            return
        try:
            if isinstance(order, Load):
                child = Child(order)
                answer = child.loaded()
            elif child is None:
                raise AssertionError("the first order is to load")
            elif isinstance(order, Attach):
                answer = child.attach(order, recv_handle(link))
            else:
                answer = child.carry_out(order)
        except Exception as error:  # one bad order must not end the others; the worker hears of it
            log.exception("an order failed")
            if isinstance(order, Duplicate):
                raise  # it has no answer: the worker hears of it by this process's end
            answer = Failed(error.reason if isinstance(error, BatonError) else type(error).__name__, str(error))
        if answer is not None:
            link.send_bytes(msgspec.msgpack.encode(answer))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    main(int(sys.argv[1]))
