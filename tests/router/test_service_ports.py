"""A router whose fixed ports are held by connections of other programs, or whose address is none of this machine."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from baton import ports
from baton.config import Config, FurtherModel, ModelConfig
from baton.errors import StartupError
from tests.router.served import model_folder, served, settings_for
from tests.support.eventually import eventually_async
from tests.support.outgoing import outgoing


def at(folder: Path, setting: str, port: int) -> Config:
    if setting == "port":
        config = settings_for(folder)
        return msgspec.structs.replace(config, api=msgspec.structs.replace(config.api, port=port))
    if setting == "models.large.internal_port":
        large = ModelConfig(path=str(model_folder(folder / "large")))
        return msgspec.structs.replace(settings_for(folder), models=(FurtherModel(model=large, internal_port=port),))
    return settings_for(folder, **{setting: port})


@pytest.mark.parametrize("setting", ["grpc_port", "internal_port", "http_port", "port", "models.large.internal_port"])
async def test_a_router_waits_for_a_port_that_a_connection_holds(
    tmp_path: Path, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = list[str]()
    holder = ports._holder

    def look(door: ports.FixedPort) -> ports._Holder:
        result = holder(door)
        looks.append(result.kind)
        assert door.setting.endswith(setting)
        return result

    monkeypatch.setattr(ports, "_holder", look)
    with outgoing() as connection:

        async def start() -> None:
            async with served(at(tmp_path, setting, connection.port)) as router:
                addresses = router.addresses
                doors = (addresses.grpc, addresses.internal, addresses.http, addresses.api, *addresses.further)
                assert any(address.endswith(f"127.0.0.1:{connection.port}") for address in doors)

        starting = asyncio.create_task(start())
        await eventually_async(lambda: looks or starting.done(), "the router waits")
        connection.reset()
        await starting
        assert set(looks) == {"connection"}


@pytest.mark.parametrize("section", ["router", "api"])
async def test_a_host_of_elsewhere_is_named_at_once(tmp_path: Path, section: str) -> None:
    config = settings_for(tmp_path)
    config = msgspec.structs.replace(config, api=msgspec.structs.replace(config.api, insecure=True))
    config = msgspec.structs.replace(
        config, **{section: msgspec.structs.replace(getattr(config, section), host="192.0.2.1")}
    )
    with pytest.raises(StartupError, match=r"host is 192\.0\.2\.1, which is no address of this machine"):
        async with served(config):
            pass
