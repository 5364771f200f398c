"""GGUF files on our own engine: the numbers that the package `gguf` makes of them, and the tokens of those numbers."""

import json
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from baton.checkpoints import from_gguf, hub
from baton.config import Config
from baton.errors import CorruptWeights, UnsupportedModel
from deploy.control_plane import checkpoint, preflight
from engine.checkpoint.gguf_reader import GgufTensors
from engine.cpu import build
from engine.engine import Engine
from engine.models.config import load_spec
from engine.vllm_runner import VLLM_VERSIONS
from engine.vllm_runner.requirements import Installation, problem
from tests.baton.test_named_models import bytes_of_gpt2
from tests.engine.driver import assert_same_tokens, generate, prompt_of
from tests.support import checkpoints

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 256, 512, 8, 4, 2
KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_1", "Q5_0", "Q2_K", "Q3_K", "Q4_K and Q6_K", "Q5_K", "IQ4_NL", "IQ3_S"]
SCALES: Mapping[str, tuple[float, tuple[int, ...]]] = {
    "Q2_K": (3e-3, (80, 82)), "Q3_K": (3e-3, (108,)), "Q4_K": (3e-4, (0, 2)), "Q5_K": (2e-4, (0, 2)),
    "Q6_K": (3e-5, (208,)), "IQ4_NL": (1e-3, (0,)), "IQ4_XS": (5e-5, (0,)), "IQ3_S": (3e-4, (0,)),
}  # fmt: skip
"""Of random blocks: about how large scales are, and where they stand."""
TOKENS = ["<|end|>", *sorted(bytes_of_gpt2()), "ab"]
TOKENS += [f"<{number}>" for number in range(len(TOKENS), 1024)]


def packed(weight: NDArray[np.float32], kind: str) -> NDArray[np.generic]:
    """A matrix in GGUF's blocks. Those that the package can't make are random, all but their scales."""
    if kind not in SCALES:
        return quantize(weight, Kind[kind])
    random = np.random.default_rng(weight.shape[1])
    inputs, size = gguf.GGML_QUANT_SIZES[Kind[kind]]
    blocks = random.integers(0, 256, (weight.shape[0], weight.shape[1] // inputs, size), dtype=np.uint8)
    spread, places = SCALES[kind]
    for place in places:
        numbers = (spread * random.uniform(0.5, 1, blocks.shape[:2])).astype(np.float16)
        blocks[..., place : place + 2] = numbers[..., None].view(np.uint8)
    return blocks.reshape(weight.shape[0], -1)


def write(
    file: Path, kind: str, *, tied: bool = True, factors: bool = False, fields: Mapping[str, object] | None = None
) -> Path:
    """A Llama with all its matrices in `kind`. In "Q4_K and Q6_K" the embedding and `ffn_down` are in the latter.
    `fields` are others than those of this model; None leaves one out."""
    out = gguf.GGUFWriter(file, "llama")
    out.add_context_length(512)
    out.add_embedding_length(HIDDEN)
    out.add_block_count(LAYERS)
    out.add_feed_forward_length(INNER)
    out.add_head_count(HEADS)
    out.add_head_count_kv(KV_HEADS)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("llama-bpe")
    out.add_token_list(TOKENS)
    out.add_token_types([3] + [1] * (len(TOKENS) - 1))
    out.add_token_merges(["a b"])
    out.add_bos_token_id(0)
    out.add_eos_token_id(0)
    out.add_chat_template("{{ messages[0]['content'] }}")
    for name, value in (fields or {}).items():
        out.kv_data[0].pop(name, None)
        match value:
            case None:
                pass
            case list():
                out.add_array(name, value)
            case str():
                out.add_string(name, value)
            case _:
                assert isinstance(value, int)
                out.add_uint32(name, value)
    key_values = HIDDEN * KV_HEADS // HEADS
    shapes = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (key_values, HIDDEN), "attn_v": (key_values, HIDDEN)}
    shapes |= {"attn_output": (HIDDEN, HIDDEN), "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN)}
    shapes |= {"ffn_down": (HIDDEN, INNER)}
    matrices = {f"blk.{n}.{part}.weight": shape for n in range(LAYERS) for part, shape in shapes.items()}
    matrices |= {name: (len(TOKENS), HIDDEN) for name in ("token_embd.weight", *([] if tied else ["output.weight"]))}
    norms = [f"blk.{n}.{part}.weight" for n in range(LAYERS) for part in ("attn_norm", "ffn_norm")]
    random = np.random.default_rng(5)
    for name in [*norms, "output_norm.weight"]:
        out.add_tensor(name, random.uniform(0.5, 1.5, HIDDEN).astype(np.float32))
    if factors:
        out.add_tensor("rope_freqs.weight", np.linspace(1, 8, HIDDEN // HEADS // 2, dtype=np.float32))
    for name, shape in matrices.items():
        one = kind if " and " not in kind else "Q6_K" if "ffn_down" in name or "embd" in name else "Q4_K"
        weight = random.normal(scale=0.1, size=shape).astype(np.float32)
        out.add_tensor(name, packed(weight, one), raw_dtype=Kind[one])
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return file


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def dense(file: Path, folder: Path) -> Path:
    """The same numbers as safetensors in float32, with a config of transformers."""
    from safetensors.torch import save_file

    reader, fields = from_gguf.read_gguf(file)
    tensors = {one.name: torch.from_numpy(one.numbers(fields)) for one in from_gguf.tensors(reader, fields)}
    from_gguf.convert(file, folder, {})
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def load(path: Path, native: bool = True) -> Engine:
    return Engine.load(path, "float32", "cpu", 20, 16, True, threads=1, native=native)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_same_numbers_in_safetensors(kind: str, tied: bool, home: Path):
    file = write(home / "model.gguf", kind, tied=tied)
    reference = checkpoints.reference(dense(file, home / "dense"))
    ours = load(hub.resolve(str(file)))
    prompt = prompt_of(70, seed=6)
    expected, gaps = reference.generate(prompt, 40)
    assert_same_tokens(generate(ours, prompt, 40, [16, 1, 30]), expected, gaps)


LINEAR = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10_000.0}
OTHERS = {
    "qwen2": ("qwen2", "qwen2", {}),
    "qwen3": ("qwen3", "qwen3", {}),
    "qwen2-yarn": ("qwen2", "qwen2", {"rope_parameters": YARN}),
    "qwen3-moe": ("qwen3moe", "qwen3-moe", {"mlp_only_layers": [], "moe_intermediate_size": 64}),
    "mixtral": ("llama", "mixtral", {}),
    "mistral": ("llama", "mistral", {}),
    "mistral-window": ("llama", "mistral-window", {}),
    "gemma3": ("gemma3", "gemma3", {"query_pre_attn_scalar": 32}),
    "gemma3-linear": ("gemma3", "gemma3", {"query_pre_attn_scalar": 32, "rope_parameters": LINEAR}),
    "phi3": ("phi3", "phi3", {}),
    "phi3-longrope": ("phi3", "phi3-longrope", {}),
}
"""GGUF's names of architectures, recipes, and settings that a file can say."""


def stacked_experts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors, with one for all experts of a layer, as llama.cpp's converter names them."""
    stacks = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for name in tensors:
        if ".experts.0." in name:
            each = [name.replace(".experts.0.", f".experts.{number}.") for number in range(64)]
            of_all = name.replace(".experts.0.", ".experts.")
            if "block_sparse_moe" in name:
                of_all = of_all.removeprefix("model.").replace("block_sparse_moe", "feed_forward")
            stacks[of_all] = torch.stack([tensors[one] for one in each if one in tensors])
    return stacks


def from_transformers(folder: Path, architecture: str, file: Path, kind: str = "F32") -> Path:
    """Write the checkpoint of a folder as llama.cpp's converter does, with all matrices in `kind`."""
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    ropes = config["rope_parameters"]
    rope = ropes.get("full_attention", ropes)
    out = gguf.GGUFWriter(file, architecture)
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_block_count(config["num_hidden_layers"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(heads["q_proj"])
    out.add_head_count_kv(heads["k_proj"])
    out.add_key_length(head_dim)
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_rope_freq_base(rope["rope_theta"])
    out.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    if window := config.get("sliding_window"):
        out.add_sliding_window(window)
    if architecture == "gemma3":
        out.add_sliding_window_pattern(2)
        if rope["rope_type"] == "linear":
            out.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            out.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        out.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        out.add_rope_scaling_factor(rope["factor"])
        out.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if experts := config.get("num_experts", config.get("num_local_experts")):
        out.add_expert_count(experts)
        out.add_expert_used_count(config["num_experts_per_tok"])
        out.add_expert_feed_forward_length(config.get("moe_intermediate_size", config["intermediate_size"]))
    if architecture == "phi3":
        out.add_rope_scaling_orig_ctx_len(config.get("original_max_position_embeddings", 4096))
        for name in ("long", "short"):
            if factors := rope.get(f"{name}_factor"):
                out.add_tensor(f"rope_factors_{name}.weight", np.array(factors, np.float32))
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("qwen2")
    tokens = TOKENS[: config["vocab_size"]]
    out.add_token_list(tokens)
    out.add_token_types([3] + [1] * (len(tokens) - 1))
    out.add_token_merges(["a b"])
    out.add_eos_token_id(config["eos_token_id"])
    out.add_pad_token_id(config["pad_token_id"])
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    for name, tensor in stacked_experts(load_file(folder / "model.safetensors")).items():
        theirs, weight = names.get_name(name, (".weight", ".bias")), tensor.numpy()
        assert theirs is not None, name
        if architecture == "llama" and (count := heads.get(name.split(".")[-2])):
            weight = weight.reshape(count, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            weight = weight + 1
        if weight.ndim > 1:
            out.add_tensor(theirs, packed(weight, kind), raw_dtype=Kind[kind])
        else:
            out.add_tensor(theirs, weight)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return file


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model", OTHERS)
def test_other_architectures_have_the_tokens_of_transformers(model: str, tied: bool, home: Path):
    architecture, recipe, settings = OTHERS[model]
    theirs = checkpoints.make(recipe, home / "theirs", tie_word_embeddings=tied, **settings)
    ours = load(hub.resolve(str(from_transformers(theirs, architecture, home / "model.gguf"))))
    prompt = prompt_of(70, seed=6)
    expected, gaps = checkpoints.reference(theirs).generate(prompt, 40)
    assert_same_tokens(generate(ours, prompt, 40, [16, 1, 30]), expected, gaps)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("model", OTHERS)
def test_other_architectures_stay_codes(model: str, kind: str, home: Path):
    architecture, recipe, settings = OTHERS[model]
    theirs = checkpoints.make(recipe, home / "theirs", **settings)
    file = from_transformers(theirs, architecture, home / "model.gguf", kind)
    ours = load(hub.resolve(str(file)))
    prompt = prompt_of(70, seed=6)
    expected, gaps = checkpoints.reference(dense(file, home / "dense")).generate(prompt, 40)
    assert_same_tokens(generate(ours, prompt, 40, [16, 1, 30]), expected, gaps)
    assert json.loads((home / "dense" / "generation_config.json").read_text())["eos_token_id"] == [2, 0]  # and <|end|>
    if build.can_compile():
        assert ours._native is not None
        assert ours._native.forms == {"int8" if kind == "Q8_0" else "int4"}


@pytest.mark.parametrize(("architecture", "tensor"), [("qwen3", "attn_q.bias"), ("qwen2", "attn_q_norm.weight")])
def test_a_tensor_of_another_architecture_is_refused_by_name(architecture: str, tensor: str):
    with pytest.raises(UnsupportedModel, match=rf"blk\.1\.{tensor} has no place .* {architecture}"):
        from_gguf.hf_name(f"blk.1.{tensor}", architecture)


@pytest.mark.skipif(not build.can_compile(), reason="no compiler, or no AVX2: torch does the work here")
@pytest.mark.parametrize(("kind", "forms"), [("Q8_0", {"int8"}), ("Q4_K and Q6_K", {"int4", "int8"}), ("IQ3_S", set())])
def test_codes_stay_codes(kind: str, forms: set[str], home: Path):
    engine = load(hub.resolve(str(write(home / "model.gguf", kind))))
    assert engine._native is not None
    assert engine._native.forms == forms


@pytest.mark.parametrize("kind", from_gguf.CODES)
def test_blocks_are_exactly_the_numbers_of_gguf(kind: str, home: Path):
    from engine.checkpoint import formats

    file = write(home / "model.gguf", kind)
    spec = load_spec(hub.resolve(str(file)))
    tensors = GgufTensors(file)
    theirs = {tensor.name: tensor for tensor in from_gguf.read_gguf(file)[0].tensors}
    for name, theirs_name, shape in (
        ("model.layers.1.mlp.down_proj", "blk.1.ffn_down.weight", (HIDDEN, INNER)),
        ("lm_head", "token_embd.weight", (len(TOKENS), HIDDEN)),
    ):
        matrix = formats.read_matrix(spec.stored, name, shape, lambda part, *_: tensors.get_tensor(part))
        assert not isinstance(matrix, torch.Tensor)
        tensor = theirs[theirs_name]
        assert torch.equal(matrix.dense(), torch.from_numpy(dequantize(tensor.data, tensor.tensor_type)))


def test_factors_of_waves_are_taken(home: Path):
    spec = load_spec(hub.resolve(str(write(home / "model.gguf", "F32", factors=True))))
    rope = spec.layers[0].rope
    assert (rope.kind, rope.attention_factor, rope.factors[0], rope.factors[-1]) == ("longrope", 1.0, 1.0, 8.0)
    load(hub.resolve(str(home / "model.gguf")))


def test_the_folder_follows_the_file(home: Path):
    file = write(home / "model.gguf", "Q4_0")
    first = hub.resolve(str(file))
    assert hub.resolve(str(file)) == first == hub.cached(str(file))
    assert {one.name for one in first.iterdir()} == {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
        "model.gguf",
    }  # fmt: skip
    assert (first / "chat_template.jinja").read_text() == "{{ messages[0]['content'] }}"
    write(file, "Q8_0")
    assert hub.resolve(str(file)) != first


def test_fields_are_those_of_the_package(home: Path):
    more: dict[str, object] = {"numbers": [1.5, -2.0], "flags": [True, False, True], "words": ["", "é"], "none": []}
    file = write(home / "model.gguf", "Q4_0", fields=more)
    theirs = {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}
    assert dict(from_gguf.read_gguf(file)[1]) == theirs
    assert {name: theirs.get(name) for name in more} == {**more, "none": theirs.get("none")}


@pytest.mark.parametrize("size", [0, 100, 700, 2_000, 12_000, 16_000, 50_000, 400_000])
def test_a_truncated_file_is_refused_by_name(size: int, home: Path):
    file = write(home / "model.gguf", "Q4_0")
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(CorruptWeights, match=r"model\.gguf can't be read"):
        hub.resolve(str(file))


def test_a_tensor_beyond_the_end_is_refused_by_name(home: Path):
    file = write(home / "model.gguf", "Q4_0")
    file.write_bytes(file.read_bytes()[:-1_000])
    with pytest.raises(CorruptWeights, match=r"token_embd\.weight ends at byte [\d,]+ of [\d,]+; fetch it again"):
        hub.resolve(str(file))


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("llama.feed_forward_length", INNER + 1, r"gate_proj\.weight has shape \[512, 144\], its config says \[513"),
        ("llama.block_count", LAYERS + 1, rf"no tensor model\.layers\.{LAYERS}\."),
        ("llama.attention.head_count", [HEADS, HEADS], r"llama\.attention\.head_count is \[8, 8\]; a number"),
        ("llama.attention.head_count", 0, "0 heads of 256"),
        ("llama.embedding_length", None, r"model\.gguf has no field llama\.embedding_length"),
        ("llama.rope.dimension_count", 8, "rotates 8 of 32"),
        ("llama.rope.scaling.type", "longrope", "'longrope' is not read"),
        ("llama.rope.scaling.type", "yarn", r"no field llama\.rope\.scaling\.factor"),
        ("tokenizer.ggml.eos_token_id", 5_000, "the eos token is 5000, and there are 1024"),
        ("tokenizer.ggml.token_type", [1, 1], "1024 tokens and types of 2"),
        ("tokenizer.ggml.merges", ["a q"], "its tokenizer can't be made"),
        ("tokenizer.ggml.merges", [1, 2], r"tokenizer\.ggml\.merges is \[1, 2\]"),
        ("tokenizer.ggml.tokens", 5, r"tokenizer\.ggml\.tokens is 5"),
        ("tokenizer.ggml.eos_token_id", "a", r"tokenizer\.ggml\.eos_token_id is 'a'"),
        ("tokenizer.ggml.pre", ["a"], r"tokenizer\.ggml\.pre is \['a'\]"),
        ("tokenizer.chat_template", 5, r"tokenizer\.chat_template is 5"),
        ("general.architecture", [1], r"general\.architecture is \[1\]"),
        ("general.architecture", "falcon", "'falcon'; known: llama, qwen2, qwen3, qwen3moe, gemma3, phi3"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused_by_name(name: str, value: object, says: str, home: Path):
    with pytest.raises((CorruptWeights, UnsupportedModel), match=says):
        load(hub.resolve(str(write(home / "model.gguf", "Q4_0", fields={name: value}))))


def test_another_tokenizer_is_refused_by_name(home: Path):
    with pytest.raises(UnsupportedModel, match="falcon"):
        hub.resolve(str(write(home / "model.gguf", "F32", fields={"tokenizer.ggml.pre": "falcon"})))


def test_words_are_those_of_llama_3(home: Path):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(hub.resolve(str(write(home / "model.gguf", "F32"))) / "tokenizer.json"))
    words = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str("It's 12345 ab\n\n  é!")]
    assert words == ["It", "'s", "Ġ", "123", "45", "Ġab", "ĊĊ", "Ġ", "ĠÃ©", "!"]
    assert tokenizer.encode("ab").tokens == ["<|end|>", "ab"]
    assert tokenizer.decode(tokenizer.encode("ab é").ids, skip_special_tokens=True) == "ab é"


def test_the_checks_before_a_start_know_such_a_file(home: Path):
    file = write(home / "model.gguf", "Q4_0")
    preflight.check_model(str(file))
    folder = hub.resolve(str(file))
    report = checkpoint.examine(Config(), folder, [("native", "cpu")])
    assert (report.problems, report.notes) == ([], [])
    assert preflight.weight_bytes(folder) == file.stat().st_size
    vllm = Installation(VLLM_VERSIONS[0], frozenset({"LlamaForCausalLM"}))
    assert "GGUF" in problem(vllm, json.loads((folder / "config.json").read_text()), 32, "cpu")
