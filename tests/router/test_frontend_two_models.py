"""Two models behind one router's doors: each request goes to the workers of the model that it names."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.addresses import ServiceAddresses
from baton.config import Config, FurtherModel, ModelConfig
from tests.router.model import NAMESPACE
from tests.router.served import Served, model_folder, served, settings_for
from tests.router.test_api import Door, completion, ready
from tests.support.eventually import becomes, eventually_async

pytestmark = pytest.mark.slow

LARGE = msgspec.structs.replace(NAMESPACE, model=b"l" * 16)


def two_models(folder: Path) -> Config:
    """The configuration of a router that serves "small" and "large"."""
    large = ModelConfig(path=str(model_folder(folder / "large")), served_model_name=("large", "big"))
    return msgspec.structs.replace(settings_for(folder), models=(FurtherModel(model=large, prefill=0),))


@contextlib.asynccontextmanager
async def doors(config: Config) -> AsyncIterator[tuple[Door, Served]]:
    """A client of a router of `two_models`, with a worker for "small"; and what starts workers of "large"."""
    async with served(config) as router, aiohttp.ClientSession() as http:
        addresses = router.addresses
        further = Served(ServiceAddresses(addresses.grpc, addresses.further[0], addresses.http))
        further.cluster.namespace = LARGE
        work = asyncio.create_task(further.work())
        router.start("decode", "decode-0")
        client = Door(router, http)
        await eventually_async(lambda: ready(client))
        try:
            yield client, further
        finally:
            work.cancel()
            further.close()


async def test_a_request_waits_for_a_worker_of_its_own_model(tmp_path: Path) -> None:
    async with doors(two_models(tmp_path)) as (client, further):
        waiting = asyncio.create_task(client.complete(model="big"))
        answers = [await client.complete(model=name) for name in ("", "small")]
        assert [answer["model"] for answer in answers] == ["small"] * 2
        assert not waiting.done(), "a worker of the other model took it"
        worker = further.start("decode", "decode-m1-0")
        assert (await waiting)["model"] == "large"
        assert waiting.result()["choices"][0]["text"] == answers[0]["choices"][0]["text"]  # of stub workers
        assert waiting.result()["system_fingerprint"] != answers[0]["system_fingerprint"]
        further.kill(worker)
        assert (await client.complete(model="small"))["model"] == "small"


async def test_a_worker_of_another_model_is_refused_at_the_port_of_this_one(tmp_path: Path) -> None:
    async with doors(two_models(tmp_path)) as (client, further):
        client.router.cluster.namespace = LARGE
        strange = client.router.start("decode", "decode-1")
        await eventually_async(lambda: strange.membership.rejected is not None, "the refusal")
        assert "namespace.model" in str(strange.membership.rejected)
        assert not strange.sequences
        assert not further.cluster.processes


async def test_models_are_listed_and_measured_by_name(tmp_path: Path) -> None:
    async with doors(two_models(tmp_path)) as (client, further):
        further.start("decode", "decode-m1-0")
        for name in ("small", "large", "large"):
            await client.complete(model=name)
        _, models = await client.get("/v1/models")
        assert [card["id"] for card in models["data"]] == ["small", "large", "big"]
        assert (await client.get("/v1/models/big"))[1]["root"] == "large"
        assert (await client.get("/v1/models/huge"))[0] == 404
        status, answer, _ = await client.post("/v1/completions", completion(model="huge"))
        assert (status, answer["error"]["message"]) == (
            404, "model 'huge' is not served here; this cluster serves 'small', 'large'",
        )  # fmt: skip
        status, tokens, _ = await client.post("/tokenize", {"model": "big", "prompt": "text"})
        assert (status, tokens["count"] > 0) == (200, True)

        async def finished() -> dict[str, float]:
            async with client.http.get(f"{client.url}/metrics") as page:
                families = {family.name: family for family in text_string_to_metric_families(await page.text())}
            counts: dict[str, float] = {}
            for sample in families["baton_request_success"].samples:
                model = sample.labels["model_name"]
                counts[model] = counts.get(model, 0) + sample.value
            assert {each.labels["model_name"] for each in families["vllm:num_requests_running"].samples} == {*counts}
            return counts

        await becomes(finished, {"small": 1, "large": 2}, "the counts of both")
