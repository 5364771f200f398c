"""Sends a plan to a router over gRPC and notes when each token comes back. One event loop, one channel."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import grpc
import grpc.aio

from baton.v1 import generation_pb2, generation_pb2_grpc
from deploy.load.figures import Outcome
from deploy.load.workload import Planned


async def open_loop(address: str, plan: Sequence[Planned], timeout: float) -> list[Outcome]:
    """Send each request when it is due, however many are under way."""
    async with grpc.aio.insecure_channel(address) as channel:
        sender = _Sender(channel, timeout)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(sender.send_when_due(request)) for request in plan]
        return [task.result() for task in tasks]


async def closed_loop(address: str, plan: Sequence[Planned], concurrency: int, timeout: float) -> list[Outcome]:
    """Keep `concurrency` requests under way; the next is sent when one ends."""
    outcomes: list[Outcome] = []
    waiting = iter(plan)
    async with grpc.aio.insecure_channel(address) as channel:
        sender = _Sender(channel, timeout)

        async def client() -> None:
            for request in waiting:
                outcomes.append(await sender.send(request, sender.now()))

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(client())
    return outcomes


class _Sender:
    """Sends requests; its clock starts with it."""

    def __init__(self, channel: grpc.aio.Channel, timeout: float) -> None:
        self._stub = generation_pb2_grpc.GenerationStub(channel)
        self._timeout = timeout
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start

    async def send_when_due(self, request: Planned) -> Outcome:
        await asyncio.sleep(request.at - self.now())
        return await self.send(request, request.at)

    async def send(self, request: Planned, due: float) -> Outcome:
        message = generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=request.prompt),
            max_tokens=request.output,
            temperature=0,
            ignore_eos=True,
        )
        sent = self.now()
        tokens: list[float] = []
        finished = generation_pb2.Finished()
        try:
            async for response in self._stub.Generate(message, timeout=self._timeout):
                tokens += [self.now()] * len(response.delta.token_ids)
                if response.HasField("finished"):
                    finished = response.finished
        except grpc.aio.AioRpcError as error:
            return Outcome(due, sent, self.now(), tuple(tokens), failed=_reason(error))
        ended = self.now()
        reason = "" if finished.finish_reason else "no end"  # a stream that ends without `finished` is broken
        usage, work = finished.usage, finished.work
        return Outcome(
            due, sent, ended, tuple(tokens), reason, usage.prompt_tokens, usage.cached_tokens,
            split=bool(work.prefill_worker), attempts=max(1, work.attempts),
        )  # fmt: skip


def _reason(error: grpc.aio.AioRpcError) -> str:
    """The router's own word for it, else the status."""
    reason = dict(error.trailing_metadata() or ()).get("baton-reason")
    return str(reason or error.code().name.lower())
