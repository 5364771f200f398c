"""What the command says when something is wrong, and how: no Ray is needed for any of it."""

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from click.testing import Result
from typer.testing import CliRunner

from baton.api_keys import KeyRing, hash_of
from baton.config import SpeculativeConfig, load, parse_override
from baton.errors import NotEnoughMemory
from baton.system_memory import AvailableMemory
from bench import random_model
from deploy.cli import app
from deploy.control_plane import preflight
from deploy.control_plane.bring_up import _settle
from deploy.control_plane.preflight import Finding, examine
from deploy.models import with_demo_model
from engine.device.gpus import visible_gpus
from engine.models.config import load_spec
from engine.vllm_runner import VLLM_VERSION, requirements
from engine.vllm_runner.requirements import Installation
from router.frontend.served_model import ChatTemplate
from tests.router import tokenizers

PORTS = ("router.grpc_port", "router.internal_port", "router.http_port", "api.port")
FINE = "a checkpoint"
ANY_PORT = [each for port in PORTS for each in ("--set", f"{port}=0")]


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # nothing answers there


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model.write(tmp_path_factory.mktemp("model"))


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def call(*arguments: str | Path | int) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def error(*arguments: str | Path | int) -> tuple[str, str]:
    """The reason and the message with which the command fails."""
    result = call(*arguments, "--json")
    assert result.exit_code == 1, result.output
    fields = json.loads(result.stdout)["error"]
    assert "Traceback" not in result.output
    return fields["reason"], fields["message"]


def test_version():
    assert json.loads(call("version", "--json").stdout).keys() == {"version"}
    assert call("version").stdout.startswith("baton ")


def test_a_person_reads_the_same_error_on_stderr():
    result = call("up", "--model", "/no/such/model")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "error (model_not_found): /no/such/model is not a directory" in result.stderr
    assert "error (config): 'a:on:b' is no setting" in call("config", "show", "--set", "a:on:b").stderr


@pytest.mark.parametrize(
    ("flags", "reason", "says"),
    [
        (["--model", "/no/such/model"], "model_not_found", "/no/such/model"),
        (["--model", "m", "--set", "router.grpc_prot=1"], "config", "grpc_prot"),
        (["--model", "m", "--set", "nonsense"], "config", "section.setting"),
        (["--model", "m", "--decode", "0"], "config", "decode"),
        (["--model", "m", "--prefill", "-1"], "config", "prefill"),
        (["--model", "m", "--name", "Not A Name"], "config", "name"),
        (["--model", "m", "--config", "/no/such/file.yaml"], "config", "/no/such/file.yaml"),
        (["--model", "m", "--set", "router.grpc_port=70000"], "config", "grpc_port"),
        (["--model", "m", "--set", "store.host_cache_bytes=-3"], "config", "host_cache_bytes"),
        (["--model", FINE, "--set", "store.host_cache_bytes=100TiB"], "not_enough_memory", "store.host_cache_bytes"),
        (["--model", FINE], "ray", "ray start --head"),
    ],
)
def test_up_refuses_before_anything_starts(flags: list[str], reason: str, says: str, model: Path):
    code, message = error("up", *ANY_PORT, *(model if flag is FINE else flag for flag in flags))
    assert code == reason
    assert says in message


def test_an_empty_directory_is_no_model(tmp_path: Path):
    assert error("up", "--model", tmp_path) == (
        "model_not_found",
        f"{tmp_path} holds no config.json; give the directory of a Hugging Face checkpoint",
    )


def test_a_port_in_use(model: Path, busy_port: int):
    reason, message = error("up", "--model", model, *ANY_PORT, "--set", f"router.http_port={busy_port}")
    assert reason == "port_in_use"
    assert str(busy_port) in message
    assert "router.http_port=0" in message


def test_memory_counts_arena_pools_and_weights(model: Path):
    config = load(overrides={"model.path": str(model), "cluster.decode": 2})
    needed = 512 * 2**20 + 3 * (512 + 300) * 2**20 + 3 * (model / "model.safetensors").stat().st_size
    preflight.check_memory(config, AvailableMemory(needed, "a test"))
    with pytest.raises(NotEnoughMemory, match="a test"):
        preflight.check_memory(config, AvailableMemory(needed - 1, "a test"))


def test_memory_of_vllm_and_its_ranks_is_counted(model: Path):
    weights = (model / "model.safetensors").stat().st_size
    own = {"model.path": str(model), "model.engine": "vllm", "decode.tensor_parallel_size": 2}
    config = load(overrides=own)
    processes = (300 + 500) + (300 + 500 + 2 * 350)
    needed = 512 * 2**20 + (2 * 512 + processes) * 2**20 + 2 * weights
    preflight.check_memory(config, AvailableMemory(needed, "a test"))
    with pytest.raises(NotEnoughMemory, match="processes of 2 workers of 2,300 MiB"):
        preflight.check_memory(config, AvailableMemory(needed - 1, "a test"))


def test_memory_of_other_nodes_and_of_gpus_is_not_counted(model: Path):
    """Of workers on other nodes, that is; one decode worker is here."""
    config = load(overrides={"model.path": str(model), "cluster.decode": 8, "cluster.prefill": 4})
    small = AvailableMemory(512 * 2**20 + 2 * (512 + 300) * 2**20, "a test")
    with pytest.raises(NotEnoughMemory):
        preflight.check_memory(config, small)
    spread = {"model.path": str(model), "cluster.decode": 8, "cluster.prefill": 4, "router.host": "192.0.2.1"}
    preflight.check_memory(load(overrides=spread), small)
    gpu = {"model.path": str(model), "model.device": "cuda", "decode.kv_cache_bytes": "100GiB"}
    preflight.check_memory(load(overrides=gpu), small)


def test_each_of_several_models_is_checked(model: Path, tmp_path: Path):
    other = shutil.copytree(model, tmp_path / "other")
    twice = ["up", *ANY_PORT, "--model", model, "--model"]
    assert error(*twice, "/no/such/model") == (
        "model_not_found",
        "/no/such/model is not a directory; give that of a checkpoint, a GGUF file, or a Hugging Face id (owner/name)",
    )
    assert error(*twice, model) == (
        "config", "two models have the name 'model0'; set served_model_name of one of them to another",
    )  # fmt: skip
    tokenizers.byte_fallback().save(str(other / "tokenizer.json"))
    cascade = ["--set", "cascades.both={small: model0, large: other}"]
    assert error(*twice, str(other), *cascade) == (
        "model",
        "cascade 'both': 'model0' and 'other' have different tokenizers or chat templates; choose models of one family",
    )
    config = load(overrides={"model.path": str(model)}, further=[str(other)])
    needed = 512 * 2**20 + 2 * (512 + 300) * 2**20 + 2 * (model / "model.safetensors").stat().st_size
    preflight.check_memory(config, AvailableMemory(2 * needed, "a test"))
    with pytest.raises(NotEnoughMemory, match=f"{needed / 2**20 - 1:,.0f} MiB are left"):
        preflight.check_memory(config, AvailableMemory(2 * needed - 2**20, "a test"))


def test_paths_and_names_of_each_model_are_settled(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("model", "other"):
        shutil.copytree(model, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    draft = {"model.draft_model": "model", "model.speculation": "draft"}
    heads = {"model.speculation_heads": "model", "model.speculation": "heads"}
    first = {"model.path": "model", "model.served_model_name": "mine", "cluster.decode": 2}
    config = _settle(load(overrides=first | heads, further=["other"]), lambda _: None)
    assert [pool.model.speculation_heads for pool in config.pools()] == [str(tmp_path / "model"), ""]
    config = _settle(load(overrides=first | draft, further=["other"]), lambda _: None)
    assert [pool.model.draft_model for pool in config.pools()] == [str(tmp_path / "model"), ""]
    own = {"model.speculative_config": {"method": "eagle", "model": "model", "num_speculative_tokens": 2}}
    config = _settle(load(overrides=first | own, further=["other"]), lambda _: None)
    settled = SpeculativeConfig(method="eagle", model=str(tmp_path / "model"), num_speculative_tokens=2)
    assert [pool.model.speculative_config for pool in config.pools()] == [settled, None]
    assert [pool.model.path for pool in config.pools()] == [str(tmp_path / name) for name in ("model", "other")]
    assert [pool.model.served_names for pool in config.pools()] == [("mine",), ("other",)]
    assert [pool.cluster.decode for pool in config.pools()] == [2, 2]


def test_paths_of_the_user_are_absolute_wherever_they_are_used(model: Path, tmp_path: Path):
    overrides = {"model.path": str(model), "disk.path": "~/kv", "cluster.trace_dir": "traces"}
    config = _settle(load(overrides=overrides), lambda _: None)
    assert config.disk.path == str(tmp_path / "kv")
    assert config.cluster.trace_dir == str(Path("traces").resolve())


def test_a_home_that_can_not_be_written_to_is_named(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/proc/nope")
    reason, message = error("up", "--model", model, *ANY_PORT)
    assert reason == "startup"
    assert "/proc/nope" in message


def test_the_doctor_does_not_take_a_broken_state_file_for_a_cluster(tmp_path: Path):
    config = load()
    config.cluster.state_dir.mkdir(parents=True)
    (config.cluster.state_dir / "cluster.json").write_text("{")
    findings = {finding.subject: finding for finding in examine(config)}
    assert findings["cluster"].level == "bad"
    assert "remove it" in findings["cluster"].advice
    assert "this cluster is up" not in findings["ports"].text


@pytest.mark.parametrize(
    "command", [["status"], ["generate", "x"], ["pin", "--list"], ["scale", "--decode", "2"], ["down"]]
)
def test_commands_without_a_cluster(command: list[str]):
    assert "no cluster named 'baton' is up" in error(*command)[1]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "either a text or --token-ids"),
        (["text", "--token-ids", "1"], "either a text or --token-ids"),
        (["--token-ids", "1,x"], "list of token ids"),
        (["--token-ids", "-1"], "no token id"),
        (["text", "--max-tokens", "-1"], "can't be sent"),
        (["text", "--seed", "-1"], "can't be sent"),
    ],
)
def test_requests_that_the_wire_cannot_carry(flags: list[str], says: str):
    reason, message = error("generate", "--address", "127.0.0.1:1", *flags)
    assert reason == "invalid_request"
    assert says in message


def test_a_router_that_is_not_there():
    reason, message = error("generate", "x", "--address", "127.0.0.1:1")
    assert reason == "unavailable"
    assert "127.0.0.1:1" in message


def test_doctor_looks_at_everything():
    result = call("doctor", "--json")
    findings = json.loads(result.stdout)["findings"]
    assert {"Ray", "memory", "ports", "torch", "cores", "open files"} <= {finding["subject"] for finding in findings}
    assert result.exit_code == 1  # the Ray that RAY_ADDRESS names does not answer
    assert all(finding["advice"] for finding in findings if finding["level"] == "bad")
    assert "→" in call("doctor").stdout


def test_a_cluster_of_vllm_is_refused_with_the_reason(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(requirements, "_find", lambda: Installation("0.1.0"))
    reason, message = error("up", "--model", model, "--engine", "vllm", "--set", "model.device=cpu", *ANY_PORT)
    assert reason == "config"
    assert f"vLLM 0.1.0 is installed and Baton's runner needs {VLLM_VERSION}: pip install" in message
    assert call("up", "--engine", "sglang").exit_code == 2


def test_a_wrong_flag_is_a_usage_error():
    assert call("up", "--no-such-flag").exit_code == 2


def test_a_command_that_does_not_exist_is_a_usage_error():
    result = call("statu")
    assert result.exit_code == 2
    assert "Did you mean 'status'?" in result.output


def test_the_command_answers_at_once():
    """Nothing heavy is imported before it is needed."""
    script = (
        "import sys; import deploy.cli, deploy.commands.status, deploy.commands.generate, deploy.commands.advise\n"
        "print([m for m in ('torch', 'ray', 'transformers', 'tokenizers', 'simulator') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"


def test_keys_are_made_once(tmp_path: Path):
    path = tmp_path / "cluster.key"
    assert call("keys", "cluster", path).exit_code == 0
    assert path.stat().st_mode & 0o777 == 0o600
    assert "never overwritten" in error("keys", "cluster", path)[1]


def test_api_keys_are_added_listed_and_removed(tmp_path: Path):
    added = call("keys", "add", "one", "--tenant", "acme", "--max-streams", 4)
    assert added.exit_code == 0, added.output
    key = added.stdout.strip()
    path = tmp_path / ".local/state/baton/baton/api-keys.json"
    assert KeyRing(path).find(key) is not None
    reply = json.loads(call("keys", "add", "ops", "--operator", "--json").stdout)
    assert (reply["name"], reply["file"]) == ("ops", str(path))
    assert error("keys", "add", "one", "--tenant", "acme")[0] == "invalid_request"
    assert error("keys", "add", "two")[0] == "invalid_request"
    listed = call("keys", "list").stdout
    assert "4 requests at a time" in listed
    for secret in (key, reply["key"], hash_of(key)):
        assert secret not in listed
        assert secret not in call("keys", "list", "--json").stdout
    assert call("keys", "remove", "one").exit_code == 0
    assert error("keys", "remove", "one")[0] == "key_not_found"
    assert "every client is refused" in call("keys", "remove", "ops").stdout
    other = tmp_path / "other.json"
    assert call("keys", "add", "one", "--tenant", "acme", "--file", other).exit_code == 0
    assert other.stat().st_mode & 0o777 == 0o600


def test_other_machines_need_tls_and_keys(tmp_path: Path, model: Path):
    shown = trustme.CA().issue_cert("127.0.0.1")
    shown.private_key_pem.write_to_path(tmp_path / "key.pem")
    shown.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    opened = ("up", "--model", model, *ANY_PORT, "--host", "0.0.0.0")
    tls = ("--ssl-certfile", tmp_path / "cert.pem", "--ssl-keyfile", tmp_path / "key.pem")
    assert "there is no TLS" in error(*opened)[1]
    reason, message = error(*opened, *tls)
    assert reason == "startup"
    assert "`baton keys add NAME --tenant T`" in message
    reason, message = error(*opened, *tls[:2], "--ssl-keyfile", tmp_path / "none.pem")
    assert reason == "startup"
    assert "can't read tls.key_file" in message
    files = {"tls.cert_file": str(tls[1]), "tls.key_file": str(tls[3])}

    def clients(**more: object) -> Finding:
        settings = load(None, {"api.host": "0.0.0.0", **files, **more})
        return next(finding for finding in examine(settings) if finding.subject == "clients")

    assert clients().level == "bad"
    assert clients(**{"api.insecure": True}).text == "clients need no API key; TLS, at 0.0.0.0"
    assert call("keys", "add", "one", "--tenant", "acme").exit_code == 0
    assert clients().text == "every client needs an API key; TLS, at 0.0.0.0"


def test_keys_that_others_can_read_are_refused_before_anything_starts(tmp_path: Path, model: Path):
    path = tmp_path / "cluster.key"
    assert call("keys", "cluster", path).exit_code == 0
    path.chmod(0o644)
    reason, message = error("up", "--model", model, "--set", f"cluster.key_file={path}")
    assert reason == "keys"
    assert "chmod 600" in message


@pytest.mark.parametrize(
    ("settings", "level", "excerpt"),
    [
        ([], "ok", "the cluster's first process makes"),
        (["router.host=192.0.2.1"], "ok", "`baton up` makes"),
        (["cluster.key_file=/no/such.key"], "bad", "can't be used"),
    ],
)
def test_the_doctor_looks_at_keys(settings: list[str], level: str, excerpt: str):
    findings = examine(load(None, dict(parse_override(text) for text in settings)))
    (keys,) = (finding for finding in findings if finding.subject == "keys")
    assert keys.level == level
    assert excerpt in keys.text


def test_up_without_a_model_serves_the_one_that_comes_with_baton(busy_port: int):
    """It is found and named before the start fails at a port in use."""
    result = call("up", *ANY_PORT, "--set", f"router.http_port={busy_port}")
    assert result.exit_code == 1
    assert "serving the demo model that comes with Baton" in result.stderr
    assert str(busy_port) in result.stderr


def test_the_demo_model_is_a_checkpoint_with_a_chat_template():
    config = with_demo_model(load())
    preflight.check_model(config.model.path)
    assert load_spec(Path(config.model.path)).num_layers
    assert ChatTemplate.load(Path(config.model.path)) is not None
    assert sum(path.stat().st_size for path in Path(config.model.path).iterdir()) <= 24 * 10**6


@pytest.mark.skipif(bool(visible_gpus().gpus), reason="there is a GPU here")
def test_a_gpu_that_is_not_here_is_refused_before_anything_starts(model: Path):
    reason, message = error("up", "--model", model, *ANY_PORT, "--set", "model.device=cuda")
    assert reason == "startup"
    assert f"there is no GPU: {visible_gpus().problem}" in message
    (finding,) = [
        finding for finding in examine(load(overrides={"model.device": "cuda"})) if finding.subject == "device"
    ]
    assert (finding.level, finding.advice) == ("bad", message)
    assert not [finding for finding in examine(load()) if finding.subject == "device"]
