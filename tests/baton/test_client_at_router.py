"""The Python client at a real router, whose workers' output is known beforehand."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import trustme

from baton import api_keys, errors
from baton.api_keys import Identity
from baton.client import AsyncClient, Client, ClientTls, is_up
from baton.config import TlsConfig
from router.frontend.detokenizer import Tokenizer
from tests.router import tokenizers
from tests.router.model import EOS, expected
from tests.router.served import Served, served, settings_for
from tests.support.eventually import eventually_async

pytestmark = pytest.mark.slow

PROMPT, SEED = list(range(20, 40)), 4
TEMPLATE = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
TOKENIZER = Tokenizer(tokenizers.byte_level())


@contextlib.asynccontextmanager
async def router(folder: Path, workers: int = 1) -> AsyncIterator[Served]:
    config = settings_for(folder)
    (Path(config.model.path) / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    async with served(config) as running:
        for number in range(workers):
            running.start("decode", f"decode-{number}")
        if workers:
            async with connected(running) as client:
                await eventually_async(client.serving, what="the cluster serves")
        yield running


def connected(running: Served) -> AsyncClient:
    addresses = running.addresses
    return AsyncClient(addresses.grpc, addresses.operator, http=addresses.api)


async def test_several_prompts_with_parameters_of_each(tmp_path: Path) -> None:
    async with router(tmp_path) as running, connected(running) as client:
        prompts = [PROMPT[:size] for size in range(5, 20)]
        params = [{"seed": seed, "n": 1 + seed % 2} for seed in range(15)]
        results = await client.generate(prompts, params, max_tokens=6)
        for seed, (prompt, outputs) in enumerate(zip(prompts, results, strict=True)):
            assert [result.token_ids for result in outputs] == [
                expected(seed + sample, len(prompt), 6)[0] for sample in range(1 + seed % 2)
            ]
        with pytest.raises(errors.InvalidRequest, match="15 prompts and 2 params"):
            await client.generate(prompts, params[:2])
        with pytest.raises(errors.ContextTooLong):
            await client.generate(["a", "b"], [{}, {"max_tokens": 10**6}])

        def blocking() -> list[str]:
            with Client(running.addresses.grpc) as own:
                return [result.text for (result,) in own.generate(["a", "b"], {"seed": SEED}, max_tokens=4)]

        assert len(await asyncio.to_thread(blocking)) == 2


async def test_generate_chat_status_and_explain(tmp_path: Path) -> None:
    async with router(tmp_path) as running, connected(running) as client:
        tokens, reason = expected(SEED, len(PROMPT), 12)
        stream = client.generate(PROMPT, seed=SEED, max_tokens=12, request_id="mine", timeout=30)
        deltas = [delta async for delta in stream]
        result = await stream.result()
        assert [token for delta in deltas for token in delta.token_ids] == result.token_ids == tokens
        assert result.text == TOKENIZER.decode([token for token in tokens if token != EOS])
        assert (result.finish_reason, result.request_id, result.seed) == (reason, "mine", SEED)
        assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (len(PROMPT), len(tokens))
        assert result.work.decode_workers == ("decode-0",)
        assert result.timing.first_token is not None
        assert result.timing.finished is not None
        assert result.timing.first_token <= result.timing.finished

        several = await client.generate(PROMPT, seed=SEED, max_tokens=12, n=3).results()
        assert [one.index for one in several] == [0, 1, 2]
        assert [one.token_ids for one in several] == [expected(SEED + i, len(PROMPT), 12)[0] for i in range(3)]

        chat = client.chat("Hello", seed=SEED, max_completion_tokens=12, timeout=30)
        content = "".join([delta.content async for delta in chat])
        answer = await chat.result()
        prompt = len(TOKENIZER.encode("[user]Hello", special_tokens=False))
        tokens, reason = expected(SEED, prompt, 12)
        assert content == answer.content == TOKENIZER.decode([token for token in tokens if token != EOS])
        assert (answer.finish_reason, answer.usage.prompt_tokens) == (reason, prompt)
        assert "first_token" in answer.metrics["hops_ms"]

        status = await client.status()
        assert {process.name for process in status.processes if is_up(process)} == {"router", "decode-0"}
        assert (await client.explain("mine")).request.completion_tokens == result.usage.completion_tokens
        assert "mine" in [one.request_id for one in await client.requests()]


async def test_errors_are_the_routers_own(tmp_path: Path) -> None:
    async with router(tmp_path) as running, connected(running) as client:
        with pytest.raises(errors.InvalidRequest, match="temperature is -1"):
            await client.generate(PROMPT, temperature=-1.0).result()
        with pytest.raises(errors.ModelMismatch, match="other"):
            await client.generate(PROMPT, model="other").result()
        with pytest.raises(errors.ModelMismatch, match="other"):
            await client.chat("Hello", model="other").result()
        with pytest.raises(errors.InvalidRequest, match="temperature is -1"):
            await client.chat("Hello", temperature=-1.0).result()
        with pytest.raises(errors.RequestNotFound):
            await client.explain("none")


async def test_without_workers_there_is_no_answer(tmp_path: Path) -> None:
    async with router(tmp_path, workers=0) as running, connected(running) as client:
        assert await client.answers()
        assert not await client.serving()
        with pytest.raises(errors.Unavailable):
            await client.chat("Hello", timeout=10).result()


@pytest.mark.parametrize("door", ["generate", "chat"])
async def test_a_cancelled_request_leaves_nothing_behind(tmp_path: Path, door: str) -> None:
    async with router(tmp_path) as running, connected(running) as client:
        running.step_seconds = 0.02
        stream = client.generate(PROMPT, ignore_eos=True) if door == "generate" else client.chat("Hi", ignore_eos=True)
        async with stream:
            assert await stream.read() is not None
            assert (await client.status()).counts.running == 1

        async def cancelled() -> bool:
            counts = (await client.status()).counts
            return (counts.running, counts.cancelled) == (0, 1)

        await eventually_async(cancelled, what="the request is cancelled")
        if door == "generate":
            with pytest.raises(errors.RequestCancelled):
                await stream.read()


async def test_both_doors_over_tls_with_a_certificate_and_a_key(tmp_path: Path) -> None:
    authority = trustme.CA()
    for name in ("server", "client"):
        shown = authority.issue_cert("127.0.0.1")
        shown.private_key_and_cert_chain_pem.write_to_path(tmp_path / f"{name}.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    server, own, trusted = (str(tmp_path / f"{name}.pem") for name in ("server", "client", "ca"))
    key = api_keys.add_key(tmp_path / "api-keys.json", Identity(name="one", tenant="acme"), "")
    tls = TlsConfig(cert_file=server, key_file=server, client_ca_file=trusted)
    async with served(msgspec.structs.replace(settings_for(tmp_path), tls=tls)) as running:
        running.start("decode", "decode-0")
        address, http = running.addresses.grpc, running.addresses.api
        shown = ClientTls(trusted, own, own)
        async with (
            AsyncClient(address, http=http, api_key=key, tls=shown) as client,
            AsyncClient(address, http=http, tls=shown) as keyless,
            AsyncClient(address, http=http, api_key=key, tls=trusted) as nameless,
        ):
            await eventually_async(client.serving, what="the cluster serves")
            assert len((await client.generate(PROMPT, max_tokens=3, ignore_eos=True).result()).token_ids) == 3
            for door in (keyless.generate, keyless.chat):
                with pytest.raises(errors.Unauthenticated):
                    await door("Hello", timeout=10).result()
            for door in (nameless.generate, nameless.chat):
                with pytest.raises(errors.Unavailable):
                    await door("Hello", timeout=10).result()


async def test_the_blocking_client_does_the_same(tmp_path: Path) -> None:
    def work(client: Client) -> None:
        tokens, _ = expected(SEED, len(PROMPT), 12)
        with client:
            one, two = (client.generate(PROMPT, seed=SEED, max_tokens=12) for _ in range(2))  # both at a time
            assert [token for delta in one for token in delta.token_ids] == tokens
            assert two.result().token_ids == tokens
            assert client.chat("Hello", max_completion_tokens=3, ignore_eos=True).result().usage.completion_tokens == 3
            assert client.status().counts.finished == 3
            with pytest.raises(errors.ModelMismatch):
                next(client.generate(PROMPT, model="other"))

    async with router(tmp_path) as running:
        addresses = running.addresses
        client = Client(addresses.grpc, addresses.operator, http=addresses.api)
        await asyncio.to_thread(work, client)
