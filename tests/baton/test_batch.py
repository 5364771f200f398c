"""The executor of batches, with a server that is a function."""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton import batch
from baton.batch import Answer, Results
from baton.errors import AttemptsExhausted, BatchConflict, InvalidRequest, Unavailable
from baton.messages import LOWEST_CLASS

BUSY = Answer(429, {"retry-after": "0"}, b"{}")


def line(custom_id: str = "a", url: str = "/v1/completions", **more: Any) -> bytes:
    return json.dumps(
        {"custom_id": custom_id, "method": "POST", "url": url, "body": {"prompt": custom_id}} | more
    ).encode()


def read(path: Path) -> list[Any]:
    return [json.loads(one) for one in path.read_text().splitlines()]


class Server:
    """Answers a request with its body. `refusals`: of each request first. `together`: answers so many at a time."""

    def __init__(self, *refusals: Answer, most: int | None = None, together: int = 1) -> None:
        self.refusals, self.most, self.barrier = refusals, most, asyncio.Barrier(together)
        self.bodies: dict[str, list[Any]] = {}
        self.under_way = self.peak = 0

    async def __call__(self, path: str, body: bytes, name: str) -> Answer:
        if self.most is not None and len(self.bodies) >= self.most:
            raise Unavailable("gone")
        calls = self.bodies.setdefault(name, [])
        calls.append(json.loads(body))
        self.under_way += 1
        self.peak = max(self.peak, self.under_way)
        await self.barrier.wait()
        self.under_way -= 1
        if len(calls) <= len(self.refusals):
            return self.refusals[len(calls) - 1]
        return Answer(200, {"x-request-id": name}, body)


async def served(path: Path, lines: list[bytes], server: Server, **more: Any) -> None:
    results = Results(path)
    try:
        await batch.run(io.BytesIO(b"\n".join(lines)), results, server, **more)
    finally:
        results.close()


async def test_each_line_gets_one_result_and_the_lowest_class(tmp_path: Path) -> None:
    output, server = tmp_path / "out", Server(together=7)
    lines = [line(f"id-{number}") for number in range(98)]
    await served(output, lines, server, at_once=7)
    results = read(output)
    assert sorted(one["custom_id"] for one in results) == sorted(f"id-{number}" for number in range(98))
    for one in results:
        assert one["error"] is None
        assert one["response"]["status_code"] == 200
        body = one["response"]["body"]
        assert body == {"prompt": one["custom_id"], "priority": LOWEST_CLASS, "stream": False}
    assert server.peak == 7


async def test_a_wrong_line_gets_its_error_and_no_other_line_suffers(tmp_path: Path) -> None:
    output = tmp_path / "out"
    lines = [
        line("good"), b"no json", b"", line("get", method="GET"), line("other", url="/v1/models"), line("good"),
        line("long", body={"prompt": "x" * 3_000}), b'{"custom_id": "no body"}', line("last"),
    ]  # fmt: skip
    await served(output, lines, Server(), max_line=2_000)
    messages = {one["id"]: one["error"] and one["error"]["message"] for one in read(output)}
    wrong = {"batch_req_2": "no request", "batch_req_4": "GET", "batch_req_5": "/v1/models", "batch_req_6": "another"}
    wrong |= {"batch_req_7": "2000 bytes", "batch_req_8": "no request"}
    assert messages.keys() == {*wrong, "batch_req_1", "batch_req_9"}
    for name, message in messages.items():
        assert (name in wrong) == (message is not None)
        assert message is None or (wrong[name] in message and f"line {name[10:]}" in message)


async def test_a_refused_request_is_sent_again_and_one_that_always_fails_is_not(tmp_path: Path) -> None:
    server = Server(BUSY, BUSY)
    await served(tmp_path / "out", [line()], server)
    assert len(server.bodies["batch_req_1"]) == 3
    server = Server(Answer(503, {"baton-reason": AttemptsExhausted.reason}, b'{"error": "no"}'))
    await served(tmp_path / "other", [line()], server)
    (result,) = read(tmp_path / "other")
    assert (result["response"]["status_code"], result["response"]["body"]) == (503, {"error": "no"})


async def test_lines_that_are_left_when_time_is_up_get_an_error(tmp_path: Path) -> None:
    class Busy(Server):
        async def __call__(self, path: str, body: bytes, name: str) -> Answer:
            return BUSY

    await served(tmp_path / "out", [line("a"), line("b")], Busy(), at_once=1, seconds=0.1)
    assert [one["error"]["code"] for one in read(tmp_path / "out")] == ["batch_expired"] * 2


@given(st.lists(st.booleans(), max_size=12), st.integers(0, 12), st.integers(0, 200))
def test_a_batch_that_is_cut_off_goes_on_where_it_was(
    tmp_path_factory: pytest.TempPathFactory, good: list[bool], served_first: int, cut: int
) -> None:
    """However many lines had a result, and wherever the last one was cut off."""
    output = tmp_path_factory.mktemp("batch") / "out"
    lines = [line(f"id-{number}") if fine else b"wrong" for number, fine in enumerate(good)]
    first, second = Server(most=served_first), Server()

    async def twice() -> None:
        try:
            await served(output, lines, first, at_once=3)
        except Unavailable:
            assert sum(good) > served_first
        content = output.read_bytes()
        rest = content[: max(0, len(content) - cut)]
        output.write_bytes(rest)
        await served(output, lines, second)
        whole = rest[: rest.rfind(b"\n") + 1]
        assert output.read_bytes().startswith(whole)
        done = {json.loads(one)["id"] for one in whole.splitlines()}
        assert not done & second.bodies.keys()

    asyncio.run(twice())
    names = [one["id"] for one in read(output)]
    assert sorted(names) == sorted(f"batch_req_{number}" for number in range(1, len(good) + 1))


async def test_results_of_another_input_or_another_process_are_left_alone(tmp_path: Path) -> None:
    output = tmp_path / "out"
    await served(output, [line("a")], Server())
    before = output.read_bytes()
    with pytest.raises(InvalidRequest, match="another input"):
        await served(output, [line("b")], Server())
    first = Results(output)
    with pytest.raises(BatchConflict):
        Results(output)
    first.close()
    assert output.read_bytes() == before
    (tmp_path / "letter").write_text("Dear all\n")
    with pytest.raises(InvalidRequest, match="no result"):
        Results(tmp_path / "letter")
    assert (tmp_path / "letter").read_text() == "Dear all\n"
    for text in ("Dear all", '{"id":"batch_req_1","custom_id":"a"}\nDear all', '{"id": 1}'):
        (tmp_path / "letter").write_text(text)
        with pytest.raises(InvalidRequest, match="no result"):
            Results(tmp_path / "letter")
        assert (tmp_path / "letter").read_text() == text
    output.write_bytes(before + bytes(9))
    Results(output).close()
    assert output.read_bytes() == before


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [({}, 1.0), ({"retry-after": "2.5"}, 2.5), ({"retry-after": "Fri, 27 Nov 2026 01:00:00 GMT"}, 1.0),
     ({"retry-after": "0"}, 0.1), ({"retry-after": "-1"}, 0.1), ({"retry-after": "1e9"}, 60.0)],
)  # fmt: skip
def test_a_refused_request_is_sent_again_after_a_pause_with_bounds(headers: dict[str, str], seconds: float):
    assert Answer(429, headers, b"").retry_after == seconds
