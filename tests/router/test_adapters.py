"""LoRA adapters at the router: requests name them, workers hear their digests, and no two of them share a page."""

import json
from pathlib import Path

import msgspec
import pytest

from baton import messages as msg
from baton.config import Config, ModelConfig, load
from baton.errors import ConfigError, CorruptWeights, InvalidRequest, ModelMismatch, PermissionDenied, Unavailable
from baton.messages import Accepted
from baton.operator_api import PinPrefix
from baton.v1 import generation_pb2 as pb
from router import events
from router.frontend import served_model
from router.frontend.api.model_cards import ModelCards
from router.frontend.api.operator_server import checked
from router.frontend.generation import generation_request, message_fields
from tests.router.cluster import Cluster
from tests.router.lab import Lab
from tests.router.model import CONFIG, card

DIGESTS = {"one": "digest of one", "two": "digest of two"}


def with_adapters() -> Config:
    return msgspec.structs.replace(CONFIG, model=ModelConfig(lora_modules={"one": "/1", "two": "/2"}))


def lab(*roles: str) -> Lab:
    one = Lab(with_adapters())
    for role in roles:
        one.join(role, f"{role}-0", model=card(adapters=DIGESTS))
    one.join("store", "store-0")
    return one


def test_workers_hear_the_digest_and_prefixes_of_adapters_are_apart() -> None:
    routers = lab("decode")
    roots: set[bytes] = set()
    for number, (name, digest) in enumerate({"": "", **DIGESTS}.items()):
        routers.submit(f"r{number}", prompt=40, adapter=name)
        assert routers.decode.adapter == digest
        roots.add(routers.decode.root)
    assert len(roots) == 3
    routers.submit("again", prompt=40, adapter="two", tenant="a")
    assert routers.decode.root not in roots
    routers.submit("and again", prompt=40, adapter="two")
    assert routers.decode.root in roots


def test_pages_of_the_plain_model_are_no_prefix_of_an_adapters_prompt() -> None:
    routers = lab("decode")
    plain = routers.submit("plain", prompt=40)
    routers.holds("store-0.1", plain, 9)
    routers.submit("same", prompt=40)
    assert routers.decode.fetch == 9
    routers.submit("adapted", prompt=40, adapter="one")
    assert routers.decode.fetch == 0


def test_a_prompt_that_is_handed_off_keeps_its_adapter() -> None:
    routers = lab("decode", "prefill")
    routers.submit("r", prompt=80, adapter="one")
    routers.say("decode-0.1", Accepted("r", 1))
    assert routers.prefill.adapter == "digest of one"
    assert routers.prefill.root == routers.decode.root


def test_a_request_keeps_its_adapter_through_a_fail_over() -> None:
    routers = lab("decode")
    routers.join("decode", "decode-1", model=card(adapters=DIGESTS))
    routers.submit("r", prompt=10, adapter="two")
    first = routers.decode
    routers.leaves(routers.to(first))
    assert (routers.decode.attempt, routers.decode.adapter, routers.decode.root) == (2, first.adapter, first.root)


def test_a_pinned_prefix_is_that_of_its_adapter() -> None:
    cluster = Cluster(with_adapters())
    for role in ("prefill", "decode", "store"):
        cluster.start(role, f"{role}-0")
    cluster.pin_prefix("plain")
    cluster.pin_prefix("adapted", adapter="one")
    cluster.finish()
    roots = {prefix.pin: prefix.keys for prefix in cluster.prefixes()}
    assert roots["plain"] != roots["adapted"]


def model(folder: Path) -> served_model.ServedModel:
    (folder / "config.json").write_text(json.dumps({"vocab_size": 400, "max_position_embeddings": 1_000}))
    names = ("small", "tiny")
    return served_model.load(
        ModelConfig(path=str(folder), served_model_name=names, lora_modules={"one": "/1"}, skip_tokenizer_init=True)
    )


def test_the_model_field_names_the_adapter(tmp_path: Path) -> None:
    small = model(tmp_path)
    for name, adapter in (("", ""), ("small", ""), ("tiny", ""), ("one", "one")):
        request = pb.GenerateRequest(model=name, token_ids=pb.TokenIds(ids=[1, 2, 3]))
        assert generation_request(message_fields(request), "r", small, lambda: 1).adapter == adapter
        pin = checked(PinPrefix(model=name, token_ids=[1, 2, 3]), small, 0.0)
        assert isinstance(pin, events.PinPrefix)
        assert pin.adapter == adapter
    with pytest.raises(ModelMismatch, match="'two'"):
        generation_request({"model": "two"}, "r", small, lambda: 1)


def test_adapters_are_listed_with_their_parent(tmp_path: Path) -> None:
    cards = {each["id"]: each for each in msgspec.to_builtins(ModelCards([model(tmp_path)], 1).all({}))["data"]}
    assert {name: (each["parent"], each["root"]) for name, each in cards.items()} == {
        "small": (None, "small"), "tiny": (None, "small"), "one": ("small", "/1"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("modules", "says"),
    [({"small": "/1"}, "which is a name of the model"), ({"": "/1"}, "1 to 128"), ({"a\n": "/1"}, "printable")],
)
def test_names_that_no_adapter_may_have(modules: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(overrides={"model.path": "/models/small", "model.lora_modules": modules})


# --- at run time ---


def of_runtime(*roles: str) -> Lab:
    one = Lab(msgspec.structs.replace(CONFIG, model=ModelConfig(max_loras=2)))
    for role in roles:
        one.join(role, f"{role}-0")
    one.join("store", "store-0")
    return one


def has(lab: Lab, worker: str, **digests: str) -> None:
    """A worker says Hello again, with these adapters."""
    role, number = worker.removesuffix(".1").split("-")
    lab.hello(role, f"{role}-{number}", model=card(adapters=digests))


def loading(lab: Lab, worker: str) -> list[tuple[str, str]]:
    return [(order.name, order.digest) for order in lab.sent(msg.LoadAdapter, worker)]


def test_one_worker_tells_the_digest_and_the_others_load_the_same() -> None:
    routers = of_runtime("decode", "prefill")
    adapters = routers.state.adapters
    routers.tell(events.LoadAdapter("poet", "/poet"))
    assert (loading(routers, "decode-0.1"), loading(routers, "prefill-0.1")) == ([("poet", "")], [])
    assert not adapters.is_loaded("poet")
    has(routers, "decode-0.1", poet="p")
    assert loading(routers, "prefill-0.1") == [("poet", "p")]
    assert not adapters.is_loaded("poet")
    has(routers, "prefill-0.1", poet="p")
    assert adapters.is_loaded("poet")
    assert routers.state.served_adapters.keys() == {"poet"}
    routers.submit("r", prompt=80, adapter="poet")
    assert routers.decode.adapter == "p"


def test_a_worker_that_joins_is_told_and_others_are_preferred_until_it_has_it() -> None:
    routers = of_runtime("decode")
    routers.tell(events.LoadAdapter("poet", "/poet"))
    has(routers, "decode-0.1", poet="p")
    routers.join("decode", "decode-1")
    assert loading(routers, "decode-1.1") == [("poet", "p")]
    for number in range(4):
        routers.submit(f"r{number}", prompt=10, adapter="poet")
        assert routers.to(routers.decode) == "decode-0.1"
    has(routers, "decode-1.1", poet="p")
    routers.submit("last", prompt=10, adapter="poet")
    assert routers.to(routers.decode) == "decode-1.1"


def test_where_one_worker_fails_none_has_it() -> None:
    routers = of_runtime("decode", "prefill")
    routers.tell(events.LoadAdapter("poet", "/poet"))
    has(routers, "decode-0.1", poet="p")
    routers.say("prefill-0.1", msg.AdapterFailed("poet", "corrupt_weights", "it differs"))
    with pytest.raises(CorruptWeights, match="prefill-0: it differs"):
        routers.state.adapters.is_loaded("poet")
    assert [order.name for order in routers.sent(msg.UnloadAdapter, "decode-0.1")] == ["poet"]
    has(routers, "decode-0.1")
    assert routers.state.served_adapters == {}
    routers.tell(events.LoadAdapter("poet", "/other"))


def test_another_router_learns_of_adapters_from_the_workers() -> None:
    other = of_runtime("decode", "prefill")
    has(other, "decode-0.1", poet="p")
    assert other.state.served_adapters.keys() == {"poet"}
    assert loading(other, "prefill-0.1") == []  # the router that loads it tells the workers
    has(other, "decode-0.1")
    assert other.state.served_adapters == {}


def test_an_adapter_outlasts_all_its_workers() -> None:
    routers = of_runtime("decode")
    routers.tell(events.LoadAdapter("poet", "/poet"))
    has(routers, "decode-0.1", poet="p")
    assert routers.state.adapters.is_loaded("poet")
    routers.leaves("decode-0.1")
    routers.submit("r", prompt=10, adapter="poet")
    routers.join("decode", "decode-1")
    sent = [command.message for command in routers.log if isinstance(command, events.SendMessage)]
    orders = [one for one in sent if isinstance(one, msg.LoadAdapter | msg.Decode)]
    assert isinstance(orders[-2], msg.LoadAdapter)  # before the request that needs it, by the same link
    assert isinstance(orders[-1], msg.Decode)
    assert orders[-1].adapter == "p"


def test_what_can_not_be_loaded_or_unloaded_is_refused() -> None:
    with pytest.raises(PermissionDenied, match="max_loras"):
        lab("decode").tell(events.LoadAdapter("poet", "/poet"))
    routers = of_runtime()
    with pytest.raises(Unavailable):
        routers.tell(events.LoadAdapter("poet", "/poet"))
    routers.join("decode", "decode-0")
    for name in ("", "x" * 200, "a\nb"):
        with pytest.raises(InvalidRequest, match="lora_name"):
            routers.tell(events.LoadAdapter(name, "/poet"))
    has(routers, "decode-0.1", one="1", two="2")
    with pytest.raises(InvalidRequest, match="already"):
        routers.tell(events.LoadAdapter("one", "/1"))
    with pytest.raises(InvalidRequest, match="as many"):
        routers.tell(events.LoadAdapter("three", "/3"))
    with pytest.raises(ModelMismatch):
        routers.tell(events.UnloadAdapter("three"))
    configured = lab("decode")
    with pytest.raises(InvalidRequest, match="lora_modules"):
        configured.tell(events.UnloadAdapter("one"))
