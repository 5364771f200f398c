"""Code of how many files a chat runs through, from its bytes to the router's state: docs/architecture.md names them."""

import re
import sys
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from router.generation_request import GenerationRequest
from router.state import RouterState
from tests.router.test_api import TEMPLATE, door

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
OURS = tuple(f"{ROOT}/{folder}/" for folder in ("baton", "kvstore", "router"))


async def test_a_chat_runs_through_twenty_files_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle, arrived, files = RouterState.handle, ContextVar("arrived", default=False), set[str]()

    def called(frame: FrameType, event: str, _: Any) -> None:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if function == "data_received" and file.endswith("router/frontend/api/server.py"):
            arrived.set(True)  # and so it is in every task that begins there
        if event == "call" and arrived.get() and file.startswith(OURS):
            files.add(file)

    def handled(state: RouterState, event: Any, now: float) -> Any:
        if isinstance(event, GenerationRequest):
            sys.setprofile(None)
        return handle(state, event, now)

    monkeypatch.setattr(RouterState, "handle", handled)
    async with door(tmp_path, template=TEMPLATE) as client:
        for profile, text in ((None, "the first chat fills caches"), (called, "the second one")):
            sys.setprofile(profile)
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
            assert (await client.post("/v1/chat/completions", body))[0] == 200
    page = (ROOT / "docs" / "architecture.md").read_text()
    way = page.partition(" files runs on\n")[2].partition("The first chat")[0]
    named = {Path(name).name for name in re.findall(r"`([\w/]+\.py)`", way)}
    assert len(files) <= 20
    assert {Path(file).name for file in files} | {"fast_encoder.py"} == named  # that one is not on every machine
