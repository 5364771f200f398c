"""Two tenants share no cached token on any tier. One tenant finds its own on each."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import openai
import pytest

from baton import api_keys
from baton.api_keys import Identity
from baton.v1 import generation_pb2, generation_pb2_grpc
from deploy.local import LocalCluster
from tests.support import checkpoints, workload
from tests.support.eventually import eventually
from tests.support.metrics_page import metric

PAGES = 20
PROMPT = PAGES * 16 + 1  # tokens: so many full pages, and the last token


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By tenant; "file" is where their hashes are."""
    path = tmp_path_factory.mktemp("keys") / "api-keys.json"
    by_tenant = {tenant: api_keys.add_key(path, Identity(name=tenant, tenant=tenant), "") for tenant in ("one", "two")}
    return {**by_tenant, "file": str(path)}


@pytest.fixture(scope="module")
def cluster(path: Path, tmp_path_factory: pytest.TempPathFactory, keys: dict[str, str]) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    disk = {"disk.path": str(folder / "disk"), "disk.admit_after": 1}
    settings = workload.settings(path, 1, 1, **disk, **{"api.keys_file": keys["file"]})
    with LocalCluster(settings, folder) as running:
        yield running


@pytest.fixture
def prompt() -> list[int]:
    return [random.randrange(3, checkpoints.VOCAB) for _ in range(PROMPT)]


@pytest.fixture
def cached(cluster: LocalCluster, keys: dict[str, str]) -> Callable[..., int]:
    """Sends a prompt as a tenant over either door; returns how many of its tokens were cached."""

    def over_http(prompt: list[int], tenant: str) -> int:
        with openai.OpenAI(base_url=f"http://{cluster.api_of('router')}/v1", api_key=keys[tenant]) as client:
            answer = client.completions.create(
                model=client.models.list().data[0].id, prompt=prompt, max_tokens=2, temperature=0
            )
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    def over_grpc(prompt: list[int], tenant: str) -> int:
        ids = generation_pb2.TokenIds(ids=prompt)
        request = generation_pb2.GenerateRequest(token_ids=ids, max_tokens=2, temperature=0)
        with grpc.insecure_channel(cluster.address) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            metadata = (("authorization", f"Bearer {keys[tenant]}"),)
            *_, last = stub.Generate(request, metadata=metadata, timeout=120)
        return last.finished.usage.cached_tokens

    def either(prompt: list[int], tenant: str, door: str = "http") -> int:
        return (over_http if door == "http" else over_grpc)(prompt, tenant)

    return either


def on_disk(cluster: LocalCluster) -> float:
    return metric(cluster, "store-0", "kv_pages", tier="disk", state="sealed")


def restart(cluster: LocalCluster, *names: str) -> None:
    for name in names:
        cluster.kill(name)
        cluster.start(name)
    cluster.wait_live(names)


@pytest.mark.parametrize("door", ["http", "grpc"])
@pytest.mark.parametrize("tier", ["device", "store", "disk"])
def test_tenants_share_no_cached_token(
    cluster: LocalCluster, cached: Callable[..., int], prompt: list[int], tier: str, door: str
) -> None:
    before = on_disk(cluster)
    assert cached(prompt, "one", door=door) == 0
    if tier == "disk":
        eventually(lambda: on_disk(cluster) >= before + PAGES, "pages on the disk")
        restart(cluster, "store-0")
    if tier != "device":
        restart(cluster, "prefill-0", "decode-0")
    assert cached(prompt, "two", door=door) == 0, "the other tenant finds nothing"
    tokens = eventually(lambda: cached(prompt, "one", door=door), f"cached tokens of its own from {tier}")
    assert tokens == PAGES * 16
