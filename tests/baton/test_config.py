"""The configuration: defaults, files, overrides, and a clear refusal of everything else."""

import re
from pathlib import Path

import msgspec
import pytest
import yaml

from baton import config
from baton.errors import ConfigError


def test_a_dumped_configuration_reads_back_equal(tmp_path: Path) -> None:
    settings = config.load(None, {"model.path": "m", "store.host_cache_bytes": "1.5GiB", "cluster.decode": 3})
    file = tmp_path / "baton.yaml"
    file.write_text(config.dump(settings))
    assert config.load(file) == settings
    assert settings.store.host_cache_bytes == 3 * 2**29


def test_overrides_lie_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("router:\n  grpc_port: 1\n  http_port: 2\n")
    settings = config.load(file, dict([config.parse_override("router.grpc_port=7")]))
    assert (settings.router.grpc_port, settings.router.http_port) == (7, 2)


def test_ports_that_no_client_expects_lie_below_those_of_outgoing_connections() -> None:
    """Linux takes these from 32768 on, and a connection that has ended holds its port for a minute."""
    defaults = config.Config()
    assert max(defaults.router.internal_port, defaults.router.http_port, defaults.api.port) < 32_768


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("")
    assert config.load(file) == config.Config()


def test_what_a_merge_brings_may_be_overridden(tmp_path: Path):
    file = tmp_path / "baton.yaml"
    file.write_text("models:\n- model: &c {<<: &b {path: x, dtype: float32}, path: y}\nmodel: {<<: *c, path: z}\n")
    read = config.load(file)
    assert [(one.path, one.dtype) for one in read.all_models] == [("z", "float32"), ("y", "float32")]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("router:\n  grp_port: 1\n", "unknown field `grp_port`"),
        ("nonsense: {}\n", "unknown field `nonsense`"),
        ("router: 5\n", "router"),
        ("- 1\n", "list"),
        ("a: [\n", "not YAML"),
        ("[" * 5_000, "not YAML"),
        ("router: {}\nmodel: {}\nrouter:\n  grpc_port: 1\n", "is not YAML: line 3: router comes twice"),
        ("router:\n  grpc_port: 1\n  grpc_port: 2\n", "grpc_port comes twice"),
        ("model:\n  path: 2024-99-01\n", "not YAML: month"),
        ("model:\n  path: !!int ''\n", "not YAML"),
        ("model:\n  path: !!timestamp x\n", "not YAML"),
        (f"router:\n  grpc_port: {'9' * 5_000}\n", "not YAML"),
        (f"store:\n  host_cache_bytes: {'9' * 400}GiB\n", "below 8 EiB"),
        (f"store:\n  host_cache_bytes: {'9' * 400}\n", "below 8 EiB"),
        ("cluster:\n  decode: 0\n", ">= 1"),
        ("cluster:\n  name: Bad Name\n", "name"),
        ("cluster:\n  heartbeat_timeout_ms: 10\n", "four heartbeats"),
        ("model:\n  tensor_parallel_size: 8\ndecode:\n  pipeline_parallel_size: 4\n", "a decode worker has 32 ranks"),
        ("router:\n  grpc_port: 70000\n", "65535"),
        ("router:\n  grpc_port: 20052\n", "differ"),
        ("store:\n  host_cache_bytes: 12 parsecs\n", "no size"),
        ("store:\n  host_cache_bytes: -1\n", "zero"),
        ("store:\n  host_cache_bytes: true\n", "no size"),
        ("store:\n  writer_share: .nan\n", "share"),
        ("prefill:\n  max_num_batched_tokens: 8\n", "below one page"),
        ("model:\n  dtype: int4\n", "int4"),
    ],
)
def test_what_is_impossible_is_refused_with_the_reason(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        config.load(file)
    assert says in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        config.load(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    "text", ["router.grpc_port", "router.grpc_port=[", "model.path=2024-99-01", "model.path=" + "[" * 5_000]
)
def test_an_override_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError):
        config.parse_override(text)


def test_an_override_without_a_section() -> None:
    with pytest.raises(ConfigError, match=r"section\.setting"):
        config.load(None, {"grpc_port": 1})


def test_a_model_has_one_name_or_several() -> None:
    def names(*values: object) -> tuple[str, ...]:
        settings = {"model.path": "/models/llama"} | ({"model.served_model_name": values[0]} if values else {})
        return config.load(None, settings).model.served_names

    assert names() == names("") == names([]) == ("llama",)
    assert names("gpt-5") == ("gpt-5",)
    assert names(["gpt-5", "gpt-4"]) == ("gpt-5", "gpt-4")
    with pytest.raises(ConfigError, match="empty name"):
        names(["gpt-5", ""])


def test_every_setting_is_documented_with_its_default() -> None:
    text = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    for section in msgspec.structs.fields(config.Config):
        entries = {
            "models": config.FurtherModel(model=config.ModelConfig()),
            "cascades": config.CascadeConfig(small="", large=""),
        }
        settings = entries.get(section.name) or getattr(config.Config(), section.name)
        table = text.split(f"## {section.name}\n")[1].split("\n## ")[0]
        rows = dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \| .+ \|$", table, re.M))
        optional = {field.name for field in msgspec.structs.fields(settings) if not field.required}
        assert rows.keys() == optional
        for name, default in rows.items():
            value = getattr(settings, name)
            value = value if isinstance(value, config.Bytes) else msgspec.to_builtins(value)
            documented = type(value).parse(default) if isinstance(value, config.Bytes) else yaml.safe_load(default)
            assert documented == value, name


def test_without_a_home_the_folders_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    cluster = config.load(None, {"cluster.log_dir": "/logs", "cluster.key_file": "/keys"}).cluster
    assert (cluster.logs, cluster.traces, cluster.key_path) == (Path("/logs"), Path("/logs/traces"), Path("/keys"))
    with pytest.raises(ConfigError, match=r"no home directory; set HOME, or cluster\.log_dir and cluster\.key_file"):
        _ = config.load(None, {}).cluster.logs


@pytest.mark.parametrize(
    ("name", "cascade", "message"),
    [
        ("both", {"small": "a", "large": "c"}, r"cascades\.both\.large is 'c', and the models are 'a', 'b', 'bee'"),
        ("both", {"small": "b", "large": "bee"}, "has 'b' as small and as large"),
        ("bee", {"small": "a", "large": "b"}, "is no model's or adapter's"),
        ("both", {"small": "a", "large": "b", "min_logprob": 0.5}, "min_logprob"),
        ("both", {"small": "a", "large": "b", "tokens": 0}, "tokens"),
    ],
)
def test_a_cascade_has_two_models(tmp_path: Path, name: str, cascade: dict[str, object], message: str) -> None:
    models = [{"model": {"path": "/b", "served_model_name": ["b", "bee"]}}]
    tree: dict[str, object] = {"model.path": "/a", "cascades.both": {"small": "a", "large": "bee"}}

    (path := tmp_path / "config.yaml").write_text(yaml.safe_dump({"models": models}))
    loaded = config.load(path, tree)
    assert loaded.cascades["both"].large == "bee"
    assert not any(pool.cascades for pool in loaded.pools())
    assert len(config.load(None, tree, further=["/c/bee"]).models) == 1
    with pytest.raises(ConfigError, match=message):
        config.load(path, tree | {f"cascades.{name}": cascade})
