"""/v1/files and /v1/batches at a real router, with OpenAI's own client."""

import asyncio
import contextlib
import json
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import openai
import pytest
from typer.testing import CliRunner

from baton import api_keys
from baton.api_keys import Identity
from deploy.cli import app
from tests.router.served import Served, served, settings_for
from tests.router.test_api import PROMPT, SEED, TEMPLATE, text_of
from tests.support.eventually import eventually_async

pytestmark = pytest.mark.slow


def line(custom_id: str, **more: Any) -> dict[str, Any]:
    body = {"model": "small", "prompt": PROMPT, "max_tokens": 12, "seed": SEED}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body | more}


def jsonl(lines: list[Any]) -> bytes:
    return b"\n".join(json.dumps(one).encode() for one in lines)


@contextlib.asynccontextmanager
async def router(folder: Path, workers: int = 1, **api: Any) -> AsyncIterator[Served]:
    config = settings_for(folder)
    config = msgspec.structs.replace(config, api=msgspec.structs.replace(config.api, **api))
    (Path(config.model.path) / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    async with served(config) as running:
        for number in range(workers):
            running.start("decode", f"decode-{number}")
        yield running


def client(running: Served, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://{running.addresses.api}/v1", api_key=key, max_retries=0)


async def started(door: openai.AsyncOpenAI, lines: list[Any], **more: Any) -> Any:
    file = await door.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    endpoint: Any = "/v1/completions"
    return await door.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more)


async def ended(door: openai.AsyncOpenAI, batch: Any) -> Any:
    async def done() -> bool:
        nonlocal batch
        batch = await door.batches.retrieve(batch.id)
        return batch.status in ("completed", "failed", "expired", "cancelled")

    await eventually_async(done, what="the batch has ended")
    return batch


async def lines_of(door: openai.AsyncOpenAI, file: str) -> list[Any]:
    return [json.loads(one) for one in (await door.files.content(file)).text.splitlines()]


async def test_a_batch_from_upload_to_results(tmp_path: Path) -> None:
    lines = [line(f"id-{number}", seed=number) for number in range(40)]
    wrong = [line("long", max_tokens=10**6), "no object", line("elsewhere") | {"url": "/v1/chat/completions"}]
    async with router(tmp_path) as running, client(running) as door:
        batch = await started(door, [*lines, *wrong], metadata={"of": "test"})
        assert (batch.status, batch.metadata) == ("validating", {"of": "test"})
        batch = await ended(door, batch)
        assert (batch.status, batch.errors) == ("completed", None)
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (43, 40, 3)
        results = {one["custom_id"]: one for one in await lines_of(door, batch.output_file_id)}
        assert len(results) == 40
        for number in range(40):
            choice = results[f"id-{number}"]["response"]["body"]["choices"][0]
            assert choice["text"] == text_of(seed=number)
        errors = await lines_of(door, batch.error_file_id)
        assert sorted(one["id"] for one in errors) == ["batch_req_41", "batch_req_42", "batch_req_43"]
        assert next(one for one in errors if one["custom_id"] == "long")["response"]["status_code"] == 400
        assert [one.id for one in (await door.batches.list()).data] == [batch.id]
        files = [one async for one in await door.files.list()]
        assert {one.purpose for one in files} == {"batch", "batch_output"}
        assert (await door.files.retrieve(batch.input_file_id)).filename == "in.jsonl"
        with pytest.raises(openai.BadRequestError, match="can't be cancelled"):
            await door.batches.cancel(batch.id)
        for file in files:
            assert (await door.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await door.files.content(batch.output_file_id)


@pytest.mark.technique("Batches that fill gaps")
async def test_a_batch_outlives_its_router_and_no_line_is_served_twice(tmp_path: Path) -> None:
    lines = [line(f"id-{number}", seed=number) for number in range(60)]
    async with router(tmp_path, workers=0) as running, client(running) as door:
        batch = await started(door, lines)

        async def under_way() -> bool:
            return (await door.batches.retrieve(batch.id)).status == "in_progress"

        await eventually_async(under_way)
    async with router(tmp_path) as running, client(running) as door:

        async def some() -> bool:
            return (await door.batches.retrieve(batch.id)).request_counts.completed > 0

        await eventually_async(some)
    async with router(tmp_path) as running, client(running) as door:
        batch = await ended(door, batch)
        results = await lines_of(door, batch.output_file_id)
        assert sorted(one["custom_id"] for one in results) == sorted(f"id-{number}" for number in range(60))


async def test_a_cancelled_batch_keeps_what_it_has(tmp_path: Path) -> None:
    async with router(tmp_path, workers=0) as running, client(running) as door:
        batch = await started(door, [line("a")])
        cancelling = await door.batches.cancel(batch.id)
        assert cancelling.status in ("cancelling", "cancelled")
        batch = await ended(door, batch)
        assert (batch.status, batch.output_file_id) == ("cancelled", None)


async def test_tenants_see_their_own_and_keep_the_limits_of_their_key(tmp_path: Path) -> None:
    keys = tmp_path / "api-keys.json"
    limits = {"max_prompt_tokens": 5, "max_body_bytes": 20_000, "max_streams": 1}
    ann = api_keys.add_key(keys, Identity(name="ann", tenant="a", **limits), "now")
    bob = api_keys.add_key(keys, Identity(name="bob", tenant="b"), "now")
    async with router(tmp_path) as running, client(running, ann) as first, client(running, bob) as second:
        batch = await started(first, [line("long"), line("short", prompt=PROMPT[:5])])
        for call in (second.batches.retrieve, second.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                await call(batch.id)
        with pytest.raises(openai.NotFoundError):
            await second.files.content(batch.input_file_id)
        with pytest.raises(openai.NotFoundError):
            await second.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"
            )
        assert not (await second.batches.list()).data
        batch = await ended(first, batch)
        assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)
        (error,) = await lines_of(first, batch.error_file_id)
        assert error["custom_id"] == "long"
        with pytest.raises(openai.APIStatusError, match="20000 bytes"):
            await started(first, [line(f"{number}") for number in range(500)])


async def test_a_batch_whose_key_is_gone_fails(tmp_path: Path) -> None:
    keys = tmp_path / "api-keys.json"
    secrets = [api_keys.add_key(keys, Identity(name=name, tenant="a"), "now") for name in ("ann", "ben")]
    async with router(tmp_path, workers=0) as running, client(running, secrets[0]) as door:
        batch = await started(door, [line("a")])
        api_keys.remove(keys, "ann")
    async with router(tmp_path) as running, client(running, secrets[1]) as door:
        batch = await ended(door, batch)
        assert (batch.status, batch.errors.data[0].code) == ("failed", "permission_denied")


async def test_what_does_not_fit_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    async with router(tmp_path, batch_bytes=100_000) as running, client(running) as door:
        content = jsonl([line(f"{number}") for number in range(200)])
        assert 30_000 < len(content) < 50_000
        await door.files.create(file=("in.jsonl", content), purpose="batch")
        for size in (2, 60):
            with pytest.raises(openai.RateLimitError, match="batch_bytes"):
                await door.files.create(file=("in.jsonl", content * size), purpose="batch")
        assert len((await door.files.list()).data) == 1
        folder = next((tmp_path / "batches" / "tenants").iterdir()) / "files"
        assert len(list(folder.iterdir())) == 2


async def test_a_folder_that_can_not_be_used_is_told_without_a_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with router(tmp_path) as running, client(running) as door:
        (tmp_path / "batches").write_text("")
        for call in (door.files.create(file=("in.jsonl", b"{}"), purpose="batch"), started(door, [])):
            with pytest.raises(openai.InternalServerError, match="can't be kept here: Not a directory") as refused:
                await call
            assert refused.value.status_code == 503
        assert any("files and batches of clients can't be kept" in record.message for record in caplog.records)
        assert not any(record.exc_info for record in caplog.records)


async def test_what_a_power_cut_has_damaged_holds_no_other_batch_up(tmp_path: Path) -> None:
    """Of one batch there is a mark alone, of the next an empty file, and of the third results that are none."""
    async with router(tmp_path, workers=0) as running, client(running) as door:
        damaged = [await started(door, [line("a")]) for _ in range(3)]
        file = await door.files.create(file=("jä.jsonl", jsonl([line("b")])), purpose="batch")
        assert file.filename == "jä.jsonl"
    (tenant,) = (tmp_path / "batches" / "tenants").iterdir()
    (tenant / "batches" / f"{damaged[0].id}.json").unlink()
    (tenant / "batches" / f"{damaged[1].id}.json").write_bytes(b"")
    stored = json.loads((tenant / "batches" / f"{damaged[2].id}.json").read_bytes())
    (tenant / "files" / stored["output"]).write_bytes(b"broken\n")
    async with router(tmp_path) as running, client(running) as door:
        batch = await door.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        assert (await ended(door, batch)).status == "completed"
        assert {one.id for one in (await door.batches.list()).data} == {batch.id, damaged[2].id}
        batch = await ended(door, damaged[2])
        assert (batch.status, batch.errors.data[0].code) == ("failed", "storage")


async def test_wrong_calls_are_refused(tmp_path: Path) -> None:
    async with router(tmp_path, workers=0) as running, client(running) as door, aiohttp.ClientSession() as http:
        url = f"http://{running.addresses.api}/v1"
        for purpose in ("assistants", "fine-tune"):
            with pytest.raises(openai.BadRequestError, match="purpose"):
                await door.files.create(file=("in.jsonl", b"{}"), purpose=purpose)  # type: ignore[arg-type]
        for body, kind in (
            (b"{}", "application/json"),
            (b"", "multipart/form-data; boundary=x"),
            (b"--x\r\nbroken", "multipart/form-data; boundary=x"),
        ):
            async with http.post(f"{url}/files", data=body, headers={"Content-Type": kind}) as answer:
                assert answer.status == 400, await answer.text()
                assert "form" in (await answer.json())["error"]["message"]
        async with http.put(f"{url}/files", data=b"") as answer:
            assert (answer.status, {*answer.headers["Allow"].split(", ")}) == (405, {"GET", "HEAD", "POST"})
        file = await door.files.create(file=("in.jsonl", b"{}"), purpose="batch")
        for fields, message in (
            ({"endpoint": "/v1/embeddings"}, "endpoint"), ({"completion_window": "1h"}, "24h"),
            ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ):  # fmt: skip
            body = {"input_file_id": file.id, "endpoint": "/v1/completions"} | fields
            async with http.post(f"{url}/batches", json=body) as answer:
                assert (answer.status, message in await answer.text()) == (400, True)
        for path in (
            "files/file-../../secret",
            "files/file-000000000000000000000000",
            "batches/batch_x",
            "files/%2e%2e",
        ):
            async with http.get(f"{url}/{path}") as answer:
                assert answer.status == 404
        empty = await door.files.create(file=("in.jsonl", b""), purpose="batch")
        batch = await door.batches.create(input_file_id=empty.id, endpoint="/v1/completions", completion_window="24h")
        batch = await ended(door, batch)
        assert (batch.status, batch.errors.data[0].code) == ("failed", "invalid_request")


async def test_run_batch_goes_on_and_each_line_has_a_result(tmp_path: Path) -> None:
    lines = [line(f"id-{number}", seed=number) for number in range(30)]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(jsonl([*lines, line("long", max_tokens=10**6), "no object"]))
    async with router(tmp_path) as running:
        arguments = ["run-batch", "-i", source, "-o", output, "--url", running.addresses.api, "--json"]

        async def summary() -> Any:
            done = await asyncio.to_thread(CliRunner().invoke, app, list(map(str, arguments)))
            assert done.exit_code == 0, done.output
            return json.loads(done.stdout)

        first = await summary()
        assert (first["completed"], first["failed"], first["earlier"]) == (30, 2, 0)
        whole = output.read_bytes()
        output.write_bytes(whole[: len(whole) // 2])
        earlier = whole[: len(whole) // 2].count(b"\n")
        second = await summary()
        assert (second["completed"], second["failed"], second["earlier"]) == (30, 2, earlier)
        results = {one["custom_id"]: one for one in map(json.loads, output.read_text().splitlines())}
        for number in range(30):
            assert results[f"id-{number}"]["response"]["body"]["choices"][0]["text"] == text_of(seed=number)
        assert results["long"]["response"]["status_code"] == 400
        assert "line 32" in results[None]["error"]["message"]


async def test_run_batch_without_a_key_ends_and_no_line_has_a_result(tmp_path: Path) -> None:
    api_keys.add_key(tmp_path / "api-keys.json", Identity(name="ann", tenant="a"), "now")
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(jsonl([line("a"), line("b")]))
    async with router(tmp_path, workers=0) as running:
        arguments = ["run-batch", "-i", str(source), "-o", str(output), "--url", running.addresses.api]
        done = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    assert (done.exit_code, "set BATON_API_KEY" in done.stderr, output.read_bytes()) == (1, True, b"")


async def test_the_example_runs(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / "batch.py"
    async with router(tmp_path) as running:
        url = f"http://{running.addresses.api}/v1"
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(script), url, stdout=PIPE, env=os.environ | {"OPENAI_API_KEY": "none"}
        )
        printed = (await process.communicate())[0].decode()
        assert process.returncode == 0
        assert printed.startswith("completed ")
        for name in ("capital", "colour", "sum"):
            assert f"\n{name} {{'object': 'chat.completion'" in printed
