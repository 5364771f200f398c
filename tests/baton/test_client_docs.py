"""Every example of docs/python-client.md runs against a real router."""

import asyncio
import re
from pathlib import Path

import pytest

from tests.baton.test_client_at_router import connected, router

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "python-client.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


async def test_every_example_of_the_page_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with router(tmp_path) as running, connected(running):
        assert len(EXAMPLES) == 5
        for example in EXAMPLES:
            code = example.replace("127.0.0.1:50051", running.addresses.grpc)
            code = code.replace("127.0.0.1:8000", running.addresses.api)
            assert code != example
            await asyncio.to_thread(exec, compile(code, str(PAGE), "exec"), {})
            assert capsys.readouterr().out or "except" in example
