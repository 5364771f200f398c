"""`baton pin`: what it reads, what it asks, and what it says."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from baton.client import AsyncClient
from baton.errors import InvalidRequest, PinNotFound
from baton.operator_api import NewPin, OperatorCall, Pin, PinPrefix, Unpin
from deploy.cli import app
from deploy.commands import pin


class Router:
    """Pins whatever has at least three tokens, and remembers it."""

    def __init__(self) -> None:
        self.calls: list[PinPrefix] = []
        self.pins: dict[str, Pin] = {}

    def answer(self, call: OperatorCall[Any]) -> Any:
        match call:
            case PinPrefix():
                self.calls.append(call)
                tokens = len(call.token_ids or call.text or "")
                if tokens < 3:
                    raise InvalidRequest(f"{tokens} tokens are no page")
                name = call.id or f"made-{len(self.calls)}"
                pin = self.pins[name] = Pin(name, "", "a", tokens, 1, 2**20, call.ttl_ms or 3_600_000)
                return NewPin(pin, tokens, 0)
            case Unpin():
                if self.pins.pop(call.id, None) is None:
                    raise PinNotFound(f"there is no pin {call.id!r}")
                return None
            case _:
                return list(self.pins.values())


@pytest.fixture
def router() -> Router:
    return Router()


@pytest.fixture
def address(router: Router, monkeypatch: pytest.MonkeyPatch) -> str:
    async def ask(client: AsyncClient, call: OperatorCall[Any], timeout: float | None) -> Any:
        return router.answer(call)

    monkeypatch.setattr(AsyncClient, "ask", ask)
    return "127.0.0.1:1"


def call(address: str, *arguments: str | Path, stdin: str = "") -> Result:
    result = CliRunner().invoke(app, ["pin", "--operator", address, *map(str, arguments)], input=stdin)
    assert "Traceback" not in result.output
    return result


def lines(*prefixes: object) -> str:
    return "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in prefixes)


def test_a_file_of_prefixes(router: Router, address: str, tmp_path: Path) -> None:
    file = tmp_path / "prefixes.jsonl"
    file.write_text(
        lines({"text": "You are a\u2028helper", "id": "helper"}, "", {"token_ids": [1, 2, 3], "ttl": "15m"})
    )
    result = call(address, file, "--ttl", "2h")
    assert result.exit_code == 0, result.output
    assert [(r.text, r.token_ids, r.id, r.ttl_ms) for r in router.calls] == [
        ("You are a\u2028helper", None, "helper", 7_200_000),
        (None, [1, 2, 3], "", 900_000),
    ]
    first, second, last = result.stdout.splitlines()
    assert first == "helper  16 tokens, 16 computed, 1 pages, 1.0 MiB on a for 2 h 0 min"
    assert second.startswith("made-2  3 tokens")
    assert last == "2 prefixes are pinned, 2 pages, 2.0 MiB"


def test_a_bad_line_is_named_and_the_others_go_on(router: Router, address: str, tmp_path: Path) -> None:
    file = tmp_path / "prefixes.jsonl"
    file.write_text(lines({"text": "first"}, "no JSON", [1], {"text": "x", "token_ids": [1]}, {"txt": "x"}, {}))
    with file.open("a") as more:
        more.write(
            lines({"token_ids": [-1]}, {"text": 5}, {"text": "x", "ttl": "soon"}, {"text": "y"}, {"text": "last"})
        )
    result = call(address, file)
    assert result.exit_code == 1
    problems = result.stderr.splitlines()
    assert [line.partition(" ")[0] for line in problems] == [f"{file}:{number}" for number in range(2, 11)]
    for line, problem in zip(
        problems,
        ["not JSON", "no prefix", "either", "'txt'", "either", "can't be sent", "can't be sent", "'soon'", "no page"],
        strict=True,
    ):
        assert problem in line
    assert sorted(call.text or "" for call in router.calls) == ["first", "last", "y"]
    assert result.stdout.splitlines()[-1] == "2 prefixes are pinned, 2 pages, 2.0 MiB; 9 failed"


def test_a_text_file_is_one_prefix(router: Router, address: str, tmp_path: Path) -> None:
    file = tmp_path / "system.txt"
    file.write_text("Line one.\nLine two.\n")
    assert call(address, file).exit_code == 0
    (request,) = router.calls
    assert request.text == "Line one.\nLine two.\n"
    assert request.ttl_ms is None


def test_standard_input_and_json(address: str) -> None:
    result = call(address, "-", "--json", stdin=lines({"text": "abcd", "id": "p"}, {"text": "a"}))
    assert result.exit_code == 1
    good, bad = json.loads(result.stdout)["pinned"]
    assert (good["line"], good["id"], good["tokens"], good["tokens_computed"]) == (1, "p", 4, 4)
    assert bad == {"line": 2, "error": {"reason": "invalid_request", "message": "1 tokens are no page"}}


def test_listing_and_removing(router: Router, address: str) -> None:
    assert call(address, "--list").stdout.strip() == "nothing is pinned"
    call(address, "-", stdin=lines({"text": "abcd", "id": "p"}, {"text": "abcd", "id": "q"}))
    assert [pin["id"] for pin in json.loads(call(address, "--list", "--json").stdout)["pins"]] == ["p", "q"]
    assert "1 h 0 min" in call(address, "--list").stdout
    assert call(address, "--remove", "p", "--remove", "q").stdout == "removed p, q\n"
    assert not router.pins
    result = call(address, "--remove", "p", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"]["reason"] == "pin_not_found"


@pytest.mark.parametrize("flags", [[], ["x.jsonl", "--list"], ["--list", "--remove", "p"]])
def test_one_thing_at_a_time(flags: list[str], address: str) -> None:
    result = call(address, *flags)
    assert result.exit_code == 1
    assert "or --list, or --remove" in result.stderr


def test_files_that_hold_no_prefix(address: str, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    for name, says in [("empty.txt", "no prefix"), ("bytes.jsonl", "UTF-8"), ("none.jsonl", "can't read")]:
        result = call(address, tmp_path / name)
        assert result.exit_code == 1
        assert says in result.stderr


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [("90", 90_000), ("90s", 90_000), ("1.5h", 5_400_000), ("15m", 900_000), ("2d", 172_800_000), ("250ms", 250)],
)
def test_durations(text: str, milliseconds: int) -> None:
    assert pin.parse_duration_ms(text) == milliseconds


@pytest.mark.parametrize("text", ["", "soon", "-1s", "1w", "1h30m", "nan"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(InvalidRequest, match="no duration"):
        pin.parse_duration_ms(text)
