"""TLS at both doors of a real router, and the doors that may not open to other machines."""

import asyncio
import json
import os
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import msgspec
import pytest
import trustme

from baton import api_keys
from baton.api_keys import Identity, KeyRing
from baton.config import ApiConfig, Config, TlsConfig, load
from baton.doors import check_keys, server_tls
from baton.errors import ConfigError, StartupError
from baton.v1 import generation_pb2_grpc
from bench.processes import Memory
from router.frontend.api import server
from tests.router.served import collect, served, settings_for, until_ready
from tests.router.strangers import HOST, Stranger
from tests.router.test_identity import BODY, bearer, request
from tests.support.eventually import becomes, eventually_async

pytestmark = pytest.mark.slow

LOCKED = """\
-----BEGIN ENCRYPTED PRIVATE KEY-----
MIH0MF8GCSqGSIb3DQEFDTBSMDEGCSqGSIb3DQEFDDAkBBBXXwQB3XXfHaLIYOCM
idNcAgIIADAMBggqhkiG9w0CCQUAMB0GCWCGSAFlAwQBKgQQcvy9buhcEctcT1zw
8tt1swSBkPOs+2O5/aJ0c4ENL95OIWwcWDpwkXhj3JMus0rcMG31k3Hj/0/BLsOz
VEJQ6a7iP5ZJWsbJWjmPB3ORXrICdIByHM45hDL7qnZdCFCrNSRzg9iSV9mj2zSx
fsXahb/Bk1bbezKJ6fsFhoeTMSz/Br5MdkiCt2R3q1Y0CbyrRvRnPkU/iFuBcsvC
iLBPb0Camw==
-----END ENCRYPTED PRIVATE KEY-----
"""


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def tls(authority: trustme.CA, tmp_path: Path) -> TlsConfig:
    shown = authority.issue_cert("127.0.0.1")
    shown.private_key_pem.write_to_path(tmp_path / "key.pem")
    for part in shown.cert_chain_pems:
        part.write_to_path(tmp_path / "cert.pem", append=True)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    return TlsConfig(cert_file=str(tmp_path / "cert.pem"), key_file=str(tmp_path / "key.pem"))


def over_tls(folder: Path, tls: TlsConfig) -> Config:
    return msgspec.structs.replace(settings_for(folder), tls=tls)


async def test_both_doors_speak_tls_and_nothing_else(tmp_path: Path, tls: TlsConfig) -> None:
    key = api_keys.add_key(tmp_path / "api-keys.json", Identity(name="one", tenant="acme"), "")
    trusted = (tmp_path / "ca.pem").read_bytes()
    context = ssl.create_default_context(cadata=trusted.decode())
    credentials = grpc.ssl_channel_credentials(trusted)
    async with (
        served(over_tls(tmp_path, tls)) as router,
        aiohttp.ClientSession(headers={"x-api-key": key}) as http,
        grpc.aio.secure_channel(router.addresses.grpc, credentials) as channel,
        grpc.aio.insecure_channel(router.addresses.grpc) as plain,
    ):
        router.start("decode", "decode-0")
        url = f"https://{router.addresses.api}"
        await until_ready(http, router.addresses.api, "https", ssl=context)
        async with http.post(f"{url}/v1/completions", json={**BODY, "stream": True}, ssl=context) as answer:
            assert answer.status == 200
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        stub: Any = generation_pb2_grpc.GenerationStub(channel)
        _, tokens, _ = await collect(stub.Generate(request(), metadata=bearer(key)))
        assert len(tokens) == 12
        arguments = "generate --token-ids 20,21,22 --max-tokens 3 --seed 4 --json"
        command = [sys.executable, "-m", "deploy", *arguments.split()]
        command += ["--address", router.addresses.grpc, "--ca-file", str(tmp_path / "ca.pem")]
        with_key = {**os.environ, "BATON_API_KEY": key}
        result = await asyncio.to_thread(subprocess.run, command, env=with_key, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        assert len(json.loads(result.stdout)["token_ids"]) == 3
        without = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
        assert json.loads(without.stdout)["error"]["reason"] == "invalid_api_key"
        with pytest.raises(aiohttp.ClientError):
            await http.get(f"http://{router.addresses.api}/ready")
        with pytest.raises(aiohttp.ClientSSLError):
            await http.get(f"{url}/ready")  # an authority that this client does not know
        stranger: Any = generation_pb2_grpc.GenerationStub(plain)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stranger.Generate(request(), metadata=bearer(key), timeout=5))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_handshakes_that_do_not_end_are_bounded_in_number_and_time(
    tmp_path: Path, tls: TlsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each costs memory before its client has shown anything."""
    trusted = (tmp_path / "ca.pem").read_text()
    most = 16
    monkeypatch.setattr(server, "HANDSHAKES", most)
    hello = bytes.fromhex("16030100c8010000c40303")  # the beginning of a ClientHello
    context = ssl.create_default_context(cadata=trusted)
    async with served(over_tls(tmp_path, tls)) as router, aiohttp.ClientSession() as http:

        async def answered() -> bool:
            async with http.get(f"https://{router.addresses.api}/live", ssl=context) as answer:
                return answer.status == 200

        before = Memory.of(os.getpid()).anonymous
        strangers = [await Stranger.connect(router.addresses.api) for _ in range(20 * most)]
        for stranger in strangers[::2]:
            await stranger.send(hello)
        for stranger in strangers[:-most]:  # the oldest have been closed
            assert not (await stranger.rest()).raw
        assert Memory.of(os.getpid()).anonymous - before < 32 * 2**20
        assert await answered()
        monkeypatch.setattr(server, "HANDSHAKE_SECONDS", 0.5)
        late = [await Stranger.connect(router.addresses.api) for _ in range(most)]
        for stranger in (*strangers[-most:], *late):
            assert not (await stranger.rest()).raw
        assert await answered()


async def test_connections_over_tls_keep_to_the_same_bounds(
    tmp_path: Path, tls: TlsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusted = (tmp_path / "ca.pem").read_text()
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(server, "LINGER_SECONDS", 0.5)
    endless = b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n"
    large = b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Content-Length: 8000000\r\n\r\n"
    context = ssl.create_default_context(cadata=trusted)
    async with served(over_tls(tmp_path, tls)) as router:
        api = router.addresses.api
        before = Memory.of(os.getpid()).anonymous
        many = [await Stranger.connect(api, context) for _ in range(100)]
        assert Memory.of(os.getpid()).anonymous - before < 100 * 2 * 200 * 2**10  # both ends are in this process
        for stranger in many:
            assert not (await stranger.rest()).raw
        stranger = await Stranger.connect(api, context)
        await stranger.send(endless)
        sent = 0
        while await stranger.send(b"a: b\r\n" * 1_000) and sent < 100_000:
            sent += 1
        assert sent < 100_000
        assert (await stranger.rest()).statuses in ([431], [])
        stranger = await Stranger.connect(api, context)
        await stranger.send(large + b" " * 8_000_000)
        assert (await stranger.rest()).statuses == [413]


async def test_a_connection_that_is_closed_cancels_its_request(tmp_path: Path, tls: TlsConfig) -> None:
    trusted = (tmp_path / "ca.pem").read_text()
    context = ssl.create_default_context(cadata=trusted)
    async with served(over_tls(tmp_path, tls)) as router, aiohttp.ClientSession() as http:
        worker = router.start("decode", "decode-0")
        router.step_seconds = 0.05
        url = f"https://{router.addresses.api}/v1/completions"

        async def begun() -> aiohttp.ClientResponse | None:
            body = {**BODY, "max_tokens": 200, "stream": True, "ignore_eos": True}
            answer = await http.post(url, json=body, ssl=context)
            return answer if answer.status == 200 else None

        answer = await eventually_async(begun)
        assert await answer.content.readline()
        assert worker.sequences
        answer.close()
        await eventually_async(lambda: not worker.sequences)


async def test_a_certificate_is_renewed_while_the_router_serves(
    tmp_path: Path, tls: TlsConfig, authority: trustme.CA, caplog: pytest.LogCaptureFixture
) -> None:
    trusted = (tmp_path / "ca.pem").read_bytes()
    context = ssl.create_default_context(cadata=trusted.decode())

    def shown(address: str) -> int:
        host, _, port = address.rpartition(":")
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection((host, int(port)), 10) as plain,
            context.wrap_socket(plain, server_hostname=host) as encrypted,
        ):
            certificate = encrypted.getpeercert()
            return int(str(certificate["serialNumber"]), 16)

    async with served(over_tls(tmp_path, tls)) as router:
        doors = (router.addresses.api, router.addresses.grpc)
        first = [await asyncio.to_thread(shown, door) for door in doors]
        assert first[0] == first[1]
        renewed = authority.issue_cert("127.0.0.1")
        renewed.private_key_pem.write_to_path(tls.key_file)  # for a moment the two do not belong together
        await eventually_async(lambda: "the certificate stays as it was" in caplog.text)
        assert [await asyncio.to_thread(shown, door) for door in doors] == first
        for number, part in enumerate(renewed.cert_chain_pems):
            part.write_to_path(tls.cert_file, append=number > 0)

        async def changed() -> bool:
            now = [await asyncio.to_thread(shown, door) for door in doors]
            return now[0] == now[1] != first[0]

        await eventually_async(changed)


async def test_clients_show_a_certificate_where_one_is_asked_for(
    tmp_path: Path, tls: TlsConfig, authority: trustme.CA
) -> None:
    trusted = (tmp_path / "ca.pem").read_bytes()
    own = authority.issue_cert("client.example")
    mutual = msgspec.structs.replace(tls, client_ca_file=str(tmp_path / "ca.pem"))
    nameless, named = (ssl.create_default_context(cadata=trusted.decode()) for _ in range(2))
    own.configure_cert(named)
    chain = b"".join(part.bytes() for part in own.cert_chain_pems)
    with_own = grpc.ssl_channel_credentials(trusted, own.private_key_pem.bytes(), chain)
    async with (
        served(over_tls(tmp_path, mutual)) as router,
        aiohttp.ClientSession() as http,
        grpc.aio.secure_channel(router.addresses.grpc, with_own) as channel,
        grpc.aio.secure_channel(router.addresses.grpc, grpc.ssl_channel_credentials(trusted)) as strange,
    ):
        router.start("decode", "decode-0")
        url = f"https://{router.addresses.api}"
        with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
            await http.get(f"{url}/ready", ssl=nameless)
        await until_ready(http, router.addresses.api, "https", ssl=named)
        stub: Any = generation_pb2_grpc.GenerationStub(channel)
        await collect(stub.Generate(request()))
        stranger: Any = generation_pb2_grpc.GenerationStub(strange)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stranger.Generate(request(), timeout=5))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_the_authorities_of_clients_are_changed_while_the_router_serves(
    tmp_path: Path, tls: TlsConfig, authority: trustme.CA, caplog: pytest.LogCaptureFixture
) -> None:
    trusted, file = (tmp_path / "ca.pem").read_bytes(), tmp_path / "clients.pem"
    other = trustme.CA()
    file.write_bytes(trusted)
    mutual = msgspec.structs.replace(tls, client_ca_file=str(file))
    own = [each.issue_cert("client.example") for each in (authority, other)]

    def https(cert: trustme.LeafCert) -> ssl.SSLContext:
        context = ssl.create_default_context(cadata=trusted.decode())
        cert.configure_cert(context)
        return context

    async with served(over_tls(tmp_path, mutual)) as router:
        router.start("decode", "decode-0")
        contexts = [https(cert) for cert in own]

        async def accepted() -> list[tuple[bool, bool]]:
            """Of each certificate: whether HTTP takes it, and gRPC."""
            pairs = list[tuple[bool, bool]]()
            for cert, context in zip(own, contexts, strict=True):
                try:
                    async with aiohttp.ClientSession() as http:
                        await http.get(f"https://{router.addresses.api}/live", ssl=context)
                        over_http = True
                except (aiohttp.ClientError, ssl.SSLError):
                    over_http = False
                chain = b"".join(part.bytes() for part in cert.cert_chain_pems)
                shown = grpc.ssl_channel_credentials(trusted, cert.private_key_pem.bytes(), chain)
                async with grpc.aio.secure_channel(router.addresses.grpc, shown) as channel:
                    stub: Any = generation_pb2_grpc.GenerationStub(channel)
                    try:
                        await collect(stub.Generate(request(), timeout=5))
                        over_grpc = True
                    except grpc.aio.AioRpcError as error:
                        over_grpc = error.code() is not grpc.StatusCode.UNAVAILABLE
                pairs.append((over_http, over_grpc))
            return pairs

        first, second = [(True, True), (False, False)], [(False, False), (True, True)]
        assert await accepted() == first
        file.write_text("no certificate\n")
        await eventually_async(lambda: "holds no PEM certificates" in caplog.text)
        assert await accepted() == first
        other.cert_pem.write_to_path(file)
        await becomes(accepted, second)


def test_files_that_can_not_be_used_are_named(tmp_path: Path, tls: TlsConfig, authority: trustme.CA) -> None:
    assert server_tls(TlsConfig()) is None
    assert server_tls(tls) is not None
    other = tmp_path / "other.pem"
    authority.issue_cert("127.0.0.1").private_key_pem.write_to_path(other)
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate\n")
    for change, text in (
        ({"key_file": str(other)}, "is not the key of that certificate"),
        ({"key_file": "/no/such.pem"}, r"can't read tls\.key_file /no/such\.pem: No such file"),
        ({"cert_file": str(broken)}, "can't be used"),
        ({"key_file": str(broken)}, "can't be used"),
        ({"client_ca_file": str(broken)}, r"tls\.client_ca_file .* holds no PEM certificates"),
        ({"client_ca_file": str(tmp_path)}, r"can't read tls\.client_ca_file .*: Is a directory"),
    ):
        with pytest.raises(StartupError, match=text) as caught:
            server_tls(msgspec.structs.replace(tls, **change))
        assert "PRIVATE KEY" not in str(caught.value)


def test_a_key_with_a_password_is_refused_and_asks_nothing(tmp_path: Path, tls: TlsConfig) -> None:
    Path(tls.key_file).write_text(LOCKED)
    with pytest.raises(StartupError, match="needs a password"):
        server_tls(tls)


def test_other_machines_need_tls_and_keys_unless_insecure_is_said(tmp_path: Path, tls: TlsConfig) -> None:
    files = {"tls.cert_file": tls.cert_file, "tls.key_file": tls.key_file}
    for host in ("0.0.0.0", "192.0.2.1", "::", "some-host"):
        with pytest.raises(ConfigError, match="there is no TLS"):
            load(None, {"api.host": host})
        load(None, {"api.host": host, "api.insecure": True})
        encrypted = load(None, {"api.host": host, **files})
        path = tmp_path / "api-keys.json"
        path.unlink(missing_ok=True)
        with pytest.raises(StartupError, match="clients need no API key"):
            check_keys(encrypted, KeyRing(path))
        check_keys(msgspec.structs.replace(encrypted, api=ApiConfig(host=host, insecure=True)), KeyRing(path))
        api_keys.add_key(path, Identity(name="one", tenant="acme"), "")
        check_keys(encrypted, KeyRing(path))
    for host in ("127.0.0.1", "::1", "localhost"):
        check_keys(load(None, {"api.host": host}), KeyRing(None))


@pytest.mark.parametrize("field", ["cert_file", "key_file", "client_ca_file"])
def test_half_of_tls_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=r"tls\."):
        load(None, {f"tls.{field}": "a"})


async def test_a_router_opens_to_other_machines_only_with_keys_and_tls(tmp_path: Path, tls: TlsConfig) -> None:
    config = over_tls(tmp_path, tls)
    config = msgspec.structs.replace(config, api=msgspec.structs.replace(config.api, host="0.0.0.0"))
    with pytest.raises(StartupError, match="clients need no API key"):
        async with served(config):
            pass
    api_keys.add_key(tmp_path / "api-keys.json", Identity(name="one", tenant="acme"), "")
    async with served(config) as router:
        assert router.addresses.api.startswith("0.0.0.0:")
        assert router.addresses.grpc.startswith("0.0.0.0:")
