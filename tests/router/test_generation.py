"""What clients send and what checkpoints say, checked field by field."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from baton.config import ModelConfig
from baton.errors import BatonError, ContextTooLong, InvalidRequest, ModelError, ModelMismatch, ModelNotFound
from baton.messages import KvCompression, SamplingParams
from baton.v1 import generation_pb2 as pb
from kvstore.keys import unpack_tokens
from router.frontend.api.anthropic_messages import MessagesRequest, chat_of_messages
from router.frontend.api.openai_chat import ChatCompletionRequest
from router.frontend.api.openai_completions import CompletionRequest
from router.frontend.api.openai_responses import ResponsesRequest, chat_of_response
from router.frontend.api.protocol import GenerationFields, GenerationOrder, decode, request_fields
from router.frontend.chat.repairs import Repairs
from router.frontend.detokenizer import Tokenizer
from router.frontend.generation import generation_request, message_fields, name_of
from router.frontend.served_model import ServedModel, load
from router.generation_request import GenerationRequest
from router.queueing.admission import ModelLimits
from tests.router import tokenizers

MODEL = ServedModel(
    name="small",
    tokenizer=Tokenizer(tokenizers.byte_level()),
    limits=ModelLimits(400, 1_000),
    eos=(1,),
    defaults=SamplingParams(temperature=0.6, top_p=0.9, top_k=20, min_p=0.05),
)
BARE = ServedModel("bare", None, MODEL.limits, (), SamplingParams())


def seed() -> int:
    return 42


def parse(request: pb.GenerateRequest, model: ServedModel) -> GenerationRequest:
    return generation_request(message_fields(request), name_of(request), model, seed)


def ids(*tokens: int) -> pb.TokenIds:
    return pb.TokenIds(ids=tokens)


@pytest.mark.parametrize(
    ("fields", "kind", "says"),
    [
        ({}, InvalidRequest, "prompt"),
        ({"text": ""}, InvalidRequest, "prompt"),
        ({"model": "large"}, ModelMismatch, "'large'"),
        ({"temperature": -0.5}, InvalidRequest, "temperature is -0.5"),
        ({"temperature": math.nan}, InvalidRequest, "temperature is nan"),
        ({"temperature": math.inf}, InvalidRequest, "temperature is inf"),
        ({"top_p": 0.0}, InvalidRequest, "top_p is 0.0"),
        ({"top_p": 1.5}, InvalidRequest, "top_p is 1.5"),
        ({"top_p": math.nan}, InvalidRequest, "top_p is nan"),
        ({"min_p": -0.5}, InvalidRequest, "min_p is -0.5"),
        ({"min_p": 1.5}, InvalidRequest, "min_p is 1.5"),
        ({"min_p": math.nan}, InvalidRequest, "min_p is nan"),
        ({"seed": 2**63}, InvalidRequest, "seed is 9223372036854775808"),
        ({"logprobs": 21}, InvalidRequest, "logprobs is 21"),
        ({"stop": [""]}, InvalidRequest, "stop has a string of 0"),
        ({"stop": ["x" * 2_000]}, InvalidRequest, "stop has a string of 2000"),
        ({"stop": [str(i) for i in range(17)]}, InvalidRequest, "stop has 17"),
        ({"stop_token_ids": [400]}, InvalidRequest, "stop_token_ids has 400"),
        ({"ttft_ms": 0}, InvalidRequest, "ttft_ms is 0"),
        ({"affinity": "a b"}, InvalidRequest, "affinity is 'a b'"),
        ({"kv_compression": pb.KvCompression(window=9)}, InvalidRequest, "kv_compression is .* missing .* `kind`"),
        ({"kv_compression": pb.KvCompression(kind="best", window=9)}, InvalidRequest, "Invalid enum value 'best'"),
        ({"kv_compression": pb.KvCompression(kind="window")}, InvalidRequest, "missing required field `window`"),
        ({"kv_compression": pb.KvCompression(kind="snapkv", window=9)}, InvalidRequest, "need a `keep` of at least 1"),
        ({"kv_compression": pb.KvCompression(kind="window", window=9, keep=2)}, InvalidRequest, '"window" has none'),
        ({"cache_salt": "a@b"}, InvalidRequest, "cache_salt is 'a@b'"),
        ({"cache_salt": "a\\b"}, InvalidRequest, "cache_salt is"),
        ({"cache_salt": "a\0b"}, InvalidRequest, "cache_salt is"),
        ({"cache_salt": "ß" * 129}, InvalidRequest, "at most 128 characters"),
        ({"tpot_ms": 0}, InvalidRequest, "tpot_ms is 0"),
        ({"request_id": "a b"}, InvalidRequest, "request_id is 'a b'"),
        ({"request_id": "x" * 81}, InvalidRequest, "request_id"),
        ({"request_id": "line\nbreak"}, InvalidRequest, "request_id"),
        ({"request_id": "r\u00e9sum\u00e9"}, InvalidRequest, "ASCII"),  # it becomes a header of the answer
        ({"token_ids": ids(*range(1_001))}, ContextTooLong, "1001 input tokens"),
        ({"stop_token_ids": [1] * 1_001}, InvalidRequest, "stop_token_ids has 1001"),
    ],
)
def test_bad_fields_are_named_with_their_value(fields: dict[str, Any], kind: type[BatonError], says: str) -> None:
    prompt = {} if {"text", "token_ids"} & fields.keys() or not fields else {"token_ids": ids(5)}
    with pytest.raises(kind, match=says):
        parse(pb.GenerateRequest(**prompt, **fields), MODEL)


def test_what_is_open_is_filled_in() -> None:
    intake = parse(pb.GenerateRequest(text="fox"), MODEL)
    assert intake.sampling == SamplingParams(0.6, 0.9, 20, 0.05, 42)
    assert intake.stop_token_ids == (1,)
    assert (intake.max_tokens, intake.ttft, intake.tpot) == (None, None, None)
    assert unpack_tokens(intake.tokens) == tokenizers.byte_level().encode("fox").ids


def test_what_is_given_wins() -> None:
    request = pb.GenerateRequest(
        token_ids=ids(5, 6), model="small", temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=7, max_tokens=3,
        stop=["a", "b", "a"], stop_token_ids=[9, 9], ignore_eos=True, logprobs=0, request_id="mine", priority=-2,
        ttft_ms=2_000, tpot_ms=50, affinity="conversation-7", cache_salt="ß" * 128,
        kv_compression=pb.KvCompression(kind="snapkv", window=9, sinks=0, keep=7),
    )  # fmt: skip
    intake = parse(request, MODEL)
    assert intake.sampling == SamplingParams(0.0, 1.0, 0, 0.0, 7, 0)
    assert (intake.stops, intake.stop_token_ids) == (("a", "b"), (9,))
    assert (intake.max_tokens, intake.name, intake.priority) == (3, "mine", -2)
    assert (intake.ttft, intake.tpot, intake.affinity) == (2.0, 0.05, "conversation-7")
    assert intake.salt == "ß" * 128
    assert intake.kv_compression == KvCompression("snapkv", 9, 0, 7)


@pytest.mark.parametrize("fields", [{"text": "fox"}, {"token_ids": ids(5), "stop": ["x"]}])
def test_without_a_tokenizer_there_is_no_text(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"tokenizer\.json"):
        parse(pb.GenerateRequest(**fields), BARE)


def test_a_number_has_32_bits_at_every_door() -> None:
    """gRPC's floats have no more. One seed draws the same tokens at each door only if the numbers are the same."""
    fields: dict[str, Any] = {"temperature": 0.7, "logit_bias": {3: 0.1}, "token_ids": {"ids": [5]}}
    message = pb.GenerateRequest(temperature=0.7, logit_bias={3: 0.1}, token_ids=ids(5))
    assert generation_request(fields, "r", MODEL, seed) == generation_request(message_fields(message), "r", MODEL, seed)


def test_a_sampling_parameter_stands_in_eight_files_at_most() -> None:
    root = Path(__file__).parents[2]
    folders = ["baton", "router", "worker", "*_worker", "engine", "kvstore", "deploy", "simulator", "proto"]
    files = [file for folder in folders for kind in ("py", "proto") for file in root.glob(f"{folder}/**/*.{kind}")]
    naming = [file for file in files if re.search(r"\bmin_p\b", file.read_text()) and "_pb2" not in file.name]
    assert root / "baton" / "messages.py" in naming
    assert len(naming) <= 8, naming


# --- checkpoints ---


def checkpoint(folder: Path, config: object, generation: object = None) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    tokenizers.byte_level().save(str(folder / "tokenizer.json"))
    return ModelConfig(path=str(folder))


CONFIG = {"vocab_size": 400, "max_position_embeddings": 1_000, "eos_token_id": 1}


def test_a_checkpoint_is_read(tmp_path: Path) -> None:
    model = load(checkpoint(tmp_path, CONFIG))
    assert (model.name, model.eos, model.limits) == (tmp_path.name, (1,), ModelLimits(400, 1_000))
    assert model.defaults == SamplingParams()
    assert model.tokenizer is not None


def test_a_checkpoint_that_names_no_context_needs_a_bound(tmp_path: Path) -> None:
    config = checkpoint(tmp_path, {"vocab_size": 400, "eos_token_id": 1})
    with pytest.raises(ModelError, match=r"or set model\.max_model_len"):
        load(config)
    assert load(structs.replace(config, max_model_len=500)).limits == ModelLimits(400, 500)


def test_generation_settings_count_only_where_sampling_is_recommended(tmp_path: Path) -> None:
    recommended = {"do_sample": True, "temperature": 0.6, "top_k": 20, "eos_token_id": [2, 3]}
    model = load(checkpoint(tmp_path, CONFIG, recommended))
    assert model.defaults == SamplingParams(temperature=0.6, top_k=20)
    assert model.eos == (2, 3, 1)
    assert load(checkpoint(tmp_path, CONFIG, recommended | {"do_sample": False})).defaults == SamplingParams()


@pytest.mark.parametrize("named", ["</s>", {"content": "</s>", "special": True}])
def test_every_file_may_name_tokens_that_end_an_output(tmp_path: Path, named: object) -> None:
    """Qwen's base models name <|endoftext|> in config.json, and their chat models <|im_end|> in the tokenizer alone."""
    config = {**CONFIG, "eos_token_id": None, "text_config": {**CONFIG, "eos_token_id": 7}}
    folder = checkpoint(tmp_path, config, {"eos_token_id": [5, 7]})
    assert load(folder).eos == (5, 7)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "a"}))
    assert load(folder).eos[1:] == (5, 7)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
    model = load(folder)
    assert (model.eos, model.notes) == ((1, 5, 7), ())
    request = pb.GenerateRequest(text="fox", min_tokens=3)
    assert parse(request, model).stop_token_ids == (1, 5, 7)


def test_grammars_end_with_a_token_that_the_tokenizer_has(tmp_path: Path) -> None:
    """Others are rows that pad the vocabulary. llguidance takes no such end."""
    model = load(checkpoint(tmp_path, CONFIG | {"vocab_size": 512, "eos_token_id": [500, 1]}))
    assert (model.eos, model.grammar_end) == ((500, 1), 1)


def test_ends_that_no_output_can_come_to_are_told(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, CONFIG | {"eos_token_id": 400})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    model = load(folder)
    assert (model.eos, model.grammar_end) == ((), None)
    assert [note.split(";")[0] for note in model.notes] == [
        "eos_token '<|im_end|>' of the tokenizer's settings is no token of it",
        "end-of-sequence token 400 is beyond the vocabulary of 400",
        "the checkpoint names no end-of-sequence token",
    ]


def test_the_tokenizer_may_describe_answers(tmp_path: Path) -> None:
    config = checkpoint(tmp_path, CONFIG)
    by_name = ModelConfig(path=config.path, tool_call_parser="hf")
    with pytest.raises(ModelError, match="there is none"):
        load(by_name)
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps({"response_template": {"fields": {"images": {}}}}))
    assert "'images' is not served" in "".join(load(config).notes)
    with pytest.raises(ModelError, match="'images' is not served"):
        load(by_name)
    fields = {"content": {}, "thinking": {"open": "<t>", "close": "</t>"}}
    settings.write_text(json.dumps({"response_template": {"fields": fields}}))
    model = load(config)
    assert (model.notes, model.chat_format.reasoning_end) == ((), "</t>")
    assert load(by_name).chat_format.tool_parser == "hf"


@pytest.mark.parametrize(
    ("config", "generation", "kind", "says"),
    [
        ([], None, ModelError, "list"),
        ({}, None, ModelError, "vocab_size is None"),
        (CONFIG | {"eos_token_id": "x"}, None, ModelError, "eos_token_id is 'x'"),
        (CONFIG, {"do_sample": True, "top_p": 7}, ModelError, "top_p"),
        (CONFIG, {"do_sample": True, "temperature": math.nan}, ModelError, "temperature"),
        (CONFIG, {"do_sample": True, "temperature": math.inf}, ModelError, "temperature"),
        (CONFIG, {"do_sample": True, "temperature": 10**400}, ModelError, "temperature"),
        (CONFIG, {"do_sample": True, "top_p": math.nan}, ModelError, "top_p"),
        (CONFIG, {"do_sample": True, "min_p": math.nan}, ModelError, "min_p"),
        (CONFIG, {"do_sample": True, "top_k": math.nan}, ModelError, "top_k"),
        (CONFIG, {"do_sample": True, "top_k": math.inf}, ModelError, "top_k"),
        (CONFIG, {"do_sample": True, "top_k": 2**32}, ModelError, "top_k"),
        (CONFIG, {"do_sample": True, "temperature": True}, ModelError, "temperature"),
    ],
)
def test_a_checkpoint_that_makes_no_sense(
    tmp_path: Path, config: object, generation: object, kind: type[BatonError], says: str
) -> None:
    with pytest.raises(kind, match=says):
        load(checkpoint(tmp_path, config, generation))


def test_a_folder_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=str(tmp_path)):
        load(ModelConfig(path=str(tmp_path)))
    with pytest.raises(ModelNotFound, match="empty"):
        load(ModelConfig())


def test_bad_words_never_name_a_token_that_the_model_lacks() -> None:
    """A tokenizer may have more tokens than the model. An order with one of these would be refused by every worker."""
    small = replace(MODEL, limits=ModelLimits(300, 1_000))
    assert small.tokenizer is not None
    words = ["hello", "stop", "x", "the", "world"]
    tokens = {token for word in words for token in small.tokenizer.encode(word, special_tokens=False)}
    assert max(tokens) >= 300
    rules = parse(pb.GenerateRequest(text="a", bad_words=words), small).sampling.rules
    assert rules.bad_words
    assert not rules.wrong(300)


def test_bad_words_are_bounded_together() -> None:
    with pytest.raises(InvalidRequest, match="100000 characters in all"):
        parse(pb.GenerateRequest(text="a", bad_words=["x" * 1_000] * 100), MODEL)


HELLO = [{"role": "user", "content": "hello"}]
HTTP: dict[str, tuple[Any, dict[str, Any], Callable[[Any], GenerationFields]]] = {
    "completions": (CompletionRequest, {"prompt": "hello"}, lambda request: request),
    "chat/completions": (ChatCompletionRequest, {"messages": HELLO}, lambda request: request),
    "responses": (ResponsesRequest, {"input": "hello"}, lambda request: chat_of_response(request, Repairs())),
    "messages": (
        MessagesRequest, {"messages": HELLO, "max_tokens": 9}, lambda request: chat_of_messages(request, Repairs())
    ),
}  # fmt: skip


@pytest.mark.parametrize("path", HTTP)
def test_every_http_api_takes_kv_compression_and_says_what_is_wrong_with_it(path: str) -> None:
    kind, body, chat_of = HTTP[path]

    def order_of(order: Any) -> KvCompression | None:
        request = chat_of(decode(json.dumps(body | {"kv_compression": order}).encode(), kind))
        fields = request_fields(GenerationOrder(request, [[5]], 9, None, False), [5], 9, affinity="", session="")
        return generation_request(fields, "r", MODEL, seed).kv_compression

    assert order_of(None) is None
    assert order_of({"kind": "window", "window": 9}) == KvCompression("window", 9, 4)
    snapkv = {"kind": "snapkv", "window": 9, "keep": 7}
    assert order_of(snapkv | {"sinks": 0}) == KvCompression("snapkv", 9, 0, 7)
    assert order_of(snapkv | {"kind": "h2o"}) == KvCompression("h2o", 9, 4, 7)
    for order, says in (
        ("window", "Expected `object"),
        ({"kind": "best", "window": 9}, "Invalid enum value 'best'"),
        ({"kind": "window"}, "missing required field `window`"),
        ({"kind": "window", "window": 0}, r"Expected `int` >= 1 .*window"),
        ({"kind": "window", "window": -9}, r"Expected `int` >= 1 .*window"),
        ({"kind": "window", "window": 2**32}, r"Expected `int` <= 4294967295 .*window"),
        ({"kind": "window", "window": 9.5}, r"Expected `int`.*window"),
        ({"kind": "window", "window": 9, "sinks": -1}, r"Expected `int` >= 0 .*sinks"),
        ({"kind": "window", "window": 9, "heads": 2}, "unknown field `heads`"),
        ({"kind": "window", "window": 9, "keep": 2}, '"window" has none'),
        (snapkv | {"keep": 0}, "need a `keep` of at least 1"),
        ({"kind": "h2o", "window": 9}, "need a `keep` of at least 1"),
        (snapkv | {"keep": -1}, r"Expected `int` >= 0 .*keep"),
    ):
        with pytest.raises(InvalidRequest, match=says) as error:
            order_of(order)
        assert order == "window" or error.value.field == "kv_compression"
