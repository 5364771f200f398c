"""Loading adapters over HTTP: for an operator's key alone, whatever other keys there are."""

from pathlib import Path

import pytest

from baton import api_keys
from baton.api_keys import Identity
from baton.client import AsyncClient
from baton.errors import PermissionDenied
from tests.router.test_api import door

pytestmark = pytest.mark.slow

BODY = {"lora_name": "poet", "lora_path": "/poet"}


async def test_without_keys_no_client_may(tmp_path: Path) -> None:
    async with door(tmp_path) as client, AsyncClient(operator=client.router.addresses.operator) as operator:
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            status, answer, _ = await client.post(path, BODY)
            assert status == 403
            assert "operator" in answer["error"]["message"]
        with pytest.raises(PermissionDenied, match="max_loras"):  # the operator's socket lets the call in
            await operator.load_adapter("poet", "/poet")
        assert await operator.adapters() == []


async def test_an_operators_key_may_and_another_may_not(tmp_path: Path) -> None:
    keys = tmp_path / "api-keys.json"
    tenant = api_keys.add_key(keys, Identity(name="ann", tenant="a"), "now")
    operator = api_keys.add_key(keys, Identity(name="ops", operator=True), "now")
    async with door(tmp_path, workers=0) as client:
        for key, message in (("none", "not known"), (tenant, "operators only"), (operator, "max_loras")):
            status, answer, _ = await client.post("/v1/load_lora_adapter", BODY, authorization=f"Bearer {key}")
            assert status == (401 if key == "none" else 403)
            assert message in answer["error"]["message"]
        status, answer, _ = await client.post(
            "/v1/unload_lora_adapter", {"lora_name": "poet"}, authorization=f"Bearer {operator}"
        )
        assert status == 404
        status, answer, _ = await client.post("/v1/load_lora_adapter", {}, authorization=f"Bearer {operator}")
        assert status == 400
