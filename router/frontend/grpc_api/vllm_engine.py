"""vLLM's gRPC door: `vllm.grpc.engine.VllmEngine`, by which a gateway such as smg sees the whole cluster as one engine.

Owns which calls it may abort: those of the same client. Requests go the way of every other door. What only an operator
may do (flush, profile) is refused, and so is what the cluster does not have (embeddings, KV events with token ids).
"""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import io
import json
import zipfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

import baton
from baton.errors import ModelError, UnsupportedCall
from baton.messages import SamplingParams
from router.frontend.generation import GenerationService
from router.frontend.grpc_api.grpc_answers import LINGER, StreamedAnswer, typed
from router.frontend.grpc_api.vllm_messages import EngineRendering, model_info
from router.frontend.identity import caller
from router.frontend.request_parsing import checked_name
from router.frontend.served_model import ServedModel

_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "*.jinja",
    "*.model",
    "*.tiktoken",
)
"""Files that a gateway builds a tokenizer of. Weights and code are none of them."""
_CHUNK = 64 * 2**10
_INT32 = 2**31 - 1
_RECOMMENDED = ("temperature", "top_p", "top_k", "min_p")


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """The cluster as one engine."""

    def __init__(self, service: GenerationService, linger: float = LINGER) -> None:
        self._service = service
        self._driver = service.driver
        self._linger = linger
        self._started = service.clock.now()
        self._running: dict[tuple[str, str], list[EngineRendering]] = {}  # by client and request_id
        self._tokenizer: bytes | None = None
        self._zipping = asyncio.Lock()

    async def Generate(self, request: vllm.GenerateRequest, context: Any) -> None:  # noqa: N802 gRPC's name
        async with typed(context):
            name = checked_name(request.request_id)
            rendering = EngineRendering(request, self._service.model, _text_of(context.invocation_metadata()))
            running = self._running.setdefault((caller.get().name, name), [])
            running.append(rendering)
            try:
                await StreamedAnswer(self._service, rendering, context, self._linger).serve(name)
            finally:
                running.remove(rendering)
                if not running:
                    self._running.pop((caller.get().name, name), None)

    async def Abort(self, request: vllm.AbortRequest, context: Any) -> vllm.AbortResponse:  # noqa: N802
        for name in request.request_ids:
            for rendering in list(self._running.get((caller.get().name, name), ())):
                rendering.abort()
        return vllm.AbortResponse()

    async def HealthCheck(  # noqa: N802
        self, request: vllm.HealthCheckRequest, context: Any
    ) -> vllm.HealthCheckResponse:
        reason = self._driver.unready
        return vllm.HealthCheckResponse(healthy=reason is None, message=reason or "the cluster serves")

    async def GetModelInfo(  # noqa: N802
        self, request: vllm.GetModelInfoRequest, context: Any
    ) -> vllm.GetModelInfoResponse:
        async with typed(context):
            model = self._service.model
            settings = await asyncio.to_thread(_settings, model.folder)
            return model_info(model, self._driver.config.model.path, settings, _recommended(model.defaults))
        raise AssertionError("abort returned")

    async def GetServerInfo(  # noqa: N802
        self, request: vllm.GetServerInfoRequest, context: Any
    ) -> vllm.GetServerInfoResponse:
        driver, card = self._driver, self._driver.state.card
        stats = driver.state.stats()
        return vllm.GetServerInfoResponse(
            active_requests=stats.running + stats.queued,
            is_paused=False,
            uptime_seconds=self._service.clock.now() - self._started,
            server_type="baton",
            data_parallel_size=1,
            kv_cache_dtype=card.namespace.kv_dtype if card else "",
            block_size=driver.config.pages.page_size,
            constrained_decoding_start="first_token",
        )

    async def GetLoads(self, request: vllm.GetLoadsRequest, context: Any) -> vllm.GetLoadsResponse:  # noqa: N802
        load, page_size = self._driver.vllm_metrics.load, self._driver.config.pages.page_size
        used = load.pages_total - load.pages_free
        engine = vllm.SchedulerLoad(
            num_running_reqs=load.running,
            num_waiting_reqs=load.waiting,
            num_total_reqs=load.running + load.waiting,
            num_used_tokens=min(_INT32, used * page_size),
            max_total_num_tokens=min(_INT32, load.pages_total * page_size),
            token_usage=used / load.pages_total if load.pages_total else 0.0,
        )
        now = datetime.datetime.now(datetime.UTC).isoformat()
        return vllm.GetLoadsResponse(timestamp=now, version=baton.__version__, dp_rank_count=1, loads=[engine])

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        async with typed(context):
            async with self._zipping:
                if self._tokenizer is None:
                    self._tokenizer = await asyncio.to_thread(_zipped, self._service.model)
            data = self._tokenizer
            for start in range(0, len(data), _CHUNK):
                last = start + _CHUNK >= len(data)
                digest = hashlib.sha256(data).hexdigest() if last else ""
                yield common_pb2.GetTokenizerChunk(data=data[start : start + _CHUNK], sha256=digest)

    async def SubscribeKvEvents(self, request: Any, context: Any) -> NoReturn:  # noqa: N802
        # A gateway could not use them: they leave out the token ids, which are the users' prompts. Told that they are
        # not implemented, smg asks once. After any other status it asks every 5 s and logs a warning each time.
        await _refuse(context, "this engine is a cluster, whose own router knows which prefix is cached where")

    async def Embed(self, request: vllm.EmbedRequest, context: Any) -> NoReturn:  # noqa: N802
        await _refuse(context, "the model here generates text, and makes no embeddings")

    async def FlushCache(self, request: Any, context: Any) -> NoReturn:  # noqa: N802
        await _refuse(context, "clients can't flush the cluster's caches; restart its stores")

    async def StartProfile(self, request: Any, context: Any) -> NoReturn:  # noqa: N802
        await _refuse(context, "clients can't trace the cluster's processes; `baton profile` does")

    async def StopProfile(self, request: Any, context: Any) -> NoReturn:  # noqa: N802
        await _refuse(context, "clients can't trace the cluster's processes; `baton profile` does")


async def _refuse(context: Any, why: str) -> NoReturn:
    async with typed(context):
        raise UnsupportedCall(why)
    raise AssertionError("abort returned")


def _text_of(metadata: Any) -> dict[str, str]:
    return {key: value for key, value in metadata or () if isinstance(value, str)}


def _settings(folder: Path | None) -> Mapping[str, Any]:
    return json.loads((folder / "config.json").read_bytes()) if folder else {}


def _recommended(defaults: SamplingParams) -> str:
    """The sampling parameters that the model's authors recommend, as JSON; empty: none."""
    plain = SamplingParams()
    told = {name: value for name in _RECOMMENDED if (value := getattr(defaults, name)) != getattr(plain, name)}
    return json.dumps(told) if told else ""


def _zipped(model: ServedModel) -> bytes:
    """The tokenizer's files in a ZIP archive. Raises ModelError."""
    folder, made = model.folder, model.tokenizer_file
    files = sorted({file for name in _TOKENIZER for file in folder.glob(name) if file.is_file()}) if folder else []
    if not any(file.name.startswith(("tokenizer", "vocab")) for file in files):
        raise ModelError("this model has no tokenizer; send token ids")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            archive.write(file, file.name)
        if made is not None and made.parent != folder:
            archive.write(made, made.name)
    return buffer.getvalue()
