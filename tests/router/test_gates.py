"""Web pages of other sites, names that point to loopback, and CORS, at a real router's HTTP port."""

import asyncio
import json
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from baton import api_keys
from baton.api_keys import Identity
from baton.config import Config, load
from baton.errors import ConfigError
from tests.router.served import served, settings_for, until_ready
from tests.support.eventually import eventually_async

pytestmark = pytest.mark.slow

BODY = json.dumps({"prompt": [20, 21, 22], "max_tokens": 3, "seed": 4, "stream": True})
EVIL = "http://evil.example"
PAGE = "https://chat.example"
FOLLOWED = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}


def settings(folder: Path, **api: Any) -> Config:
    config = settings_for(folder)
    return msgspec.structs.replace(config, api=msgspec.structs.replace(config.api, **api))


def statuses(config: Config, *requests: tuple[str, str, Mapping[str, str]]) -> list[int]:
    """Send requests, each with its method, path and headers, and return their statuses."""

    async def test() -> list[int]:
        async with served(config) as router, aiohttp.ClientSession() as http:
            router.start("decode", "decode-0")
            url = f"http://{router.addresses.api}"
            if not config.api.allowed_hosts:
                await until_ready(http, router.addresses.api, headers={"Host": "localhost"})
            codes: list[int] = []
            for method, path, headers in requests:
                data = BODY if method == "POST" else None
                async with http.request(method, url + path, data=data, headers=headers) as answer:
                    await answer.read()
                    codes.append(answer.status)
            return codes

    return asyncio.run(asyncio.wait_for(test(), 60))


def posts(config: Config, *headers: Mapping[str, str]) -> list[int]:
    return statuses(config, *(("POST", "/v1/completions", each) for each in headers))


def test_only_a_name_of_this_machine_may_stand_in_host(tmp_path: Path) -> None:
    ours = ["localhost", "localhost:9000", "LOCALHOST", "chat.localhost:8000", "127.0.0.1", "127.1.2.3:80", "gpubox"]
    ours += ["[::1]:8000", socket.gethostname(), "0.0.0.0:8000", "localhost.:8000"]
    others = ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "192.0.2.7"]
    others += ["192.0.2.7:8000", "[2001:db8::1]:8000", "evil.example:127.0.0.1", "[::1].evil.example", "a b"]
    codes = posts(settings(tmp_path), *({"Host": host} for host in (*ours, *others)))
    assert dict(zip([*ours, *others], codes, strict=True)) == dict.fromkeys(ours, 200) | dict.fromkeys(others, 403)


def test_allowed_hosts_hold_always_and_other_rules_only_without_keys(tmp_path: Path) -> None:
    proxied, strange = {"Host": "llm.example"}, {"Host": "evil.example"}
    assert posts(settings(tmp_path, allowed_hosts=["llm.example"]), proxied, strange, {}) == [200, 403, 200]
    assert posts(settings(tmp_path, allowed_hosts=["*"]), strange) == [200]
    # Where other machines reach the port, any name may be its own.
    assert posts(settings(tmp_path, host="0.0.0.0", insecure=True), strange, {"Origin": EVIL}) == [200, 403]
    key = {"x-api-key": api_keys.add_key(tmp_path / "api-keys.json", Identity(name="one", tenant="acme"), "")}
    assert posts(settings(tmp_path), strange, key | strange, key | {"Origin": EVIL}) == [401, 200, 200]
    assert posts(settings(tmp_path, allowed_hosts=["llm.example"]), key | proxied, key | strange) == [200, 403]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/models", "/metrics", "/health", "/x"])
def test_pages_of_other_sites_are_refused_on_every_path(tmp_path: Path, path: str) -> None:
    marks: list[Mapping[str, str]] = [
        {"Origin": EVIL}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"},
        {"Origin": EVIL, "Content-Type": "text/plain"}, {"Origin": "http://localhost:3000", "Host": "localhost:8000"},
        {"Origin": "http://evil.example:8000", "Host": "localhost:8000"}, {"Origin": "http://[", "Host": "localhost"},
        {"Origin": EVIL, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors", "Sec-Fetch-Dest": "empty"},
    ]  # fmt: skip
    for method in ("GET", "POST", "OPTIONS"):
        assert statuses(settings(tmp_path), *((method, path, mark) for mark in marks)) == [403] * len(marks)


def test_what_no_other_site_sends_is_served(tmp_path: Path) -> None:
    config = settings(tmp_path)
    # curl -d; a page of this server, also through a tunnel; behind a proxy that renames the host; an address typed.
    same: list[Mapping[str, str]] = [
        {"Content-Type": "application/x-www-form-urlencoded"}, {"Host": "localhost:9", "Origin": "http://localhost:9"},
        {"Host": "localhost", "Origin": "http://localhost:80"}, {"Host": "localhost", "Origin": "https://localhost"},
        {"Host": "localhost:8000", "Origin": "https://app.example", "Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "none"},
    ]  # fmt: skip
    assert posts(config, *same) == [200] * len(same)
    link = {"Sec-Fetch-Site": "cross-site", **FOLLOWED}
    paths = ("/dashboard", "/dashboard/static/main.js", "/live")
    assert statuses(config, *(("GET", path, link) for path in paths)) == [200, 200, 200]
    assert posts(config, link | {"Origin": EVIL}) == [403]  # a form


async def test_pages_of_allowed_origins_may_read_every_answer(tmp_path: Path) -> None:
    key = api_keys.add_key(tmp_path / "api-keys.json", Identity(name="one", tenant="acme"), "")
    async with served(settings(tmp_path, allowed_origins=[PAGE])) as router, aiohttp.ClientSession() as http:
        router.start("decode", "decode-0")
        url = f"http://{router.addresses.api}/v1/completions"
        preflight = {
            "Origin": PAGE,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization, content-type, x-stainless-lang",
        }
        async with http.options(url, headers=preflight) as answer:
            assert answer.status == 200
            assert answer.headers["access-control-allow-origin"] == PAGE
            assert "POST" in answer.headers["access-control-allow-methods"]
            assert "x-stainless-lang" in answer.headers["access-control-allow-headers"]
        async with http.options(url, headers=preflight | {"Origin": EVIL}) as answer:
            assert answer.status == 400
            assert "access-control-allow-origin" not in answer.headers
        who = {"Authorization": f"Bearer {key}"}
        page = {"Origin": PAGE, "Sec-Fetch-Site": "cross-site"}

        async def served_now() -> bool:
            async with http.post(url, data=BODY, headers=page | who) as answer:
                assert answer.headers["access-control-allow-origin"] == PAGE  # also of a 503
                assert "baton-reason" in answer.headers["access-control-expose-headers"]
                return answer.status == 200 and (await answer.read()).endswith(b"data: [DONE]\n\n")

        await eventually_async(served_now)
        for body, more, status in ((BODY, {}, 401), ("{", who, 400), (" " * 10**6, who, 413)):
            async with http.post(url, data=body, headers=page | more) as answer:
                assert answer.status == status
                assert answer.headers["access-control-allow-origin"] == PAGE
        async with http.post(url, data=BODY, headers={"Origin": EVIL} | who) as answer:
            assert "access-control-allow-origin" not in answer.headers


def test_without_keys_allowed_origins_are_the_only_other_sites(tmp_path: Path) -> None:
    config = settings(tmp_path, allowed_origins=[PAGE, "http://localhost:3000"])
    page, dev = {"Origin": PAGE, "Sec-Fetch-Site": "cross-site"}, {"Origin": "http://localhost:3000"}
    assert posts(config, page, dev, {"Origin": EVIL}, {"Sec-Fetch-Site": "cross-site"}) == [200, 200, 403, 403]
    assert posts(settings(tmp_path, allowed_origins=["*"]), page, {"Origin": EVIL}) == [200, 200]


async def test_the_metrics_port_on_loopback_is_for_this_machines_names(tmp_path: Path) -> None:
    async with served(settings(tmp_path)) as router, aiohttp.ClientSession() as http:
        for host, status in (("localhost:9", 200), ("127.0.0.1", 200), ("evil.example", 403)):
            async with http.get(f"http://{router.addresses.http}/metrics", headers={"Host": host}) as answer:
                assert answer.status == status


def test_origins_that_no_browser_sends_and_hosts_that_are_none_are_config_errors() -> None:
    origins = ["chat.example", "https://chat.example/", "HTTPS://Chat.example", "https://a@b", ""]
    hosts = ["llm.example:8000", "https://llm.example", "LLM.example", ""]
    for field, wrong in (("api.allowed_origins", origins), ("api.allowed_hosts", hosts)):
        for each in wrong:
            with pytest.raises(ConfigError, match=re.escape(field)):
                load(None, {field: [each]})


def test_both_settings_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("api: {allowed_origins: [https://chat.example, '*'], allowed_hosts: [llm.example, localhost]}\n")
    assert load(file).api.allowed_hosts == ["llm.example", "localhost"]
