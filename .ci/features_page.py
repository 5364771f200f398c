"""Write docs/features.md from the tests' marks: `python .ci/features_page.py docs/features.md`.

A test that proves a technique has the mark `technique` with its name.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent

HEAD = """# Features

The techniques of the field that Baton has: where each comes from, where it lives, and tests that prove it. Some have
more tests than those named. `python .ci/features_page.py docs/features.md` writes this page from the tests' marks, and
a test compares them.

| technique | source | where | proof |
|---|---|---|---|
"""


@dataclass(frozen=True)
class Technique:
    """One row."""

    name: str
    source: str
    where: str  # a file or folder of the project


TECHNIQUES = (
    Technique("Continuous batching", "Orca, OSDI 2022", "decode_worker/step_planner.py"),
    Technique("Paged KV cache", "vLLM, SOSP 2023", "kvstore/client/device_block_manager.py"),
    Technique("Chunked prefill", "Sarathi-Serve, OSDI 2024", "decode_worker/batching.py"),
    Technique("Several prompts in one prefill step", "Orca, OSDI 2022", "prefill_worker/chunking.py"),
    Technique("Prefill and decode apart", "Splitwise, ISCA 2024; DistServe, OSDI 2024", "router/placement"),
    Technique("Prefix reuse by a radix tree", "SGLang, NeurIPS 2024", "kvstore/prefix_map"),
    Technique("Prefixes shared within a page", "SGLang, NeurIPS 2024", "kvstore/client/device_block_manager.py"),
    Technique("KV-aware placement by predicted time to first token", "Mooncake, FAST 2025", "router/placement"),
    Technique("Placement rules of other systems", "llm-d, Dynamo, SGLang, Mooncake, load balancers", "router/policies"),
    Technique("Tiers: device, shared memory, disk, other nodes", "Mooncake, FAST 2025; LMCache", "kvstore/server"),
    Technique("Admission to the disk by frequency", "TinyLFU, ACM TOS 2017", "kvstore/disk"),
    Technique("Load or recompute, whichever is sooner", "CacheGen, SIGCOMM 2024", "kvstore/client"),
    Technique("Pages by RDMA", "NIXL", "kvstore/transport"),
    Technique("Pinned prefixes", "prompt caching of Anthropic's API", "router/prefix_pinning"),
    Technique("Preemption by recompute", "vLLM, SOSP 2023", "decode_worker/scheduler.py"),
    Technique("Long prompts over several prefill workers", "ours", "router/requests/moves.py"),
    Technique("Fail-over with the same tokens", "ours", "router/requests/lifecycle.py"),
    Technique("The same bits by every path", "He et al., 2025", "engine/cpu"),
    Technique("Pages checked by recomputation", "ours", "engine"),
    Technique("Grey failure: slow workers are left", "Huang et al., HotOS 2017", "router/placement"),
    Technique("Fair queueing of tenants", "VTC, OSDI 2024", "router/queueing"),
    Technique("Admission by objectives", "DistServe, OSDI 2024", "router/queueing"),
    Technique("Batches that fill gaps", "OpenAI's Batch API; vLLM's run-batch", "router/requests/gap_fillers.py"),
    Technique("Warm requests first, within a bound of age", "Locality-aware fair scheduling, 2025", "router/queueing"),
    Technique("A quantum of service for runaways", "FastServe, 2023", "router/requests/lifecycle.py"),
    Technique("Adapters at run time", "vLLM", "engine/vllm_runner"),
    Technique("Roles that change under load", "Dynamo's planner; DynaServe", "router/role_changes.py"),
    Technique("Cascades of models", "FrugalGPT, TMLR 2024", "router/frontend/cascade.py"),
    Technique("Requests explained", "ours", "router/requests/explain.py"),
    Technique("Several outputs of one prompt", "vLLM, SOSP 2023", "router/frontend"),
    Technique("Beam search", "transformers", "router/frontend"),
    Technique("Draws as a function of seed and position", "Gumbel-max", "engine/sampling"),
    Technique("Structured output", "llguidance", "engine/sampling"),
    Technique("Forced tokens without a step", "SGLang's jump forward", "engine/sampling"),
    Technique(
        "Speculation by n-grams, token-identical", "Saxena, 2023; Daliri et al., 2024", "decode_worker/speculation.py"
    ),
    Technique(
        "Speculation by a draft model, token-identical",
        "Leviathan et al., 2023; Daliri et al., 2024",
        "decode_worker/draft_model.py",
    ),
    Technique("Speculation by heads, token-identical", "Wertheimer et al., 2024", "decode_worker/heads.py"),
    Technique("Speculation by Medusa heads, token-identical", "Cai et al., 2024", "engine/models/heads/medusa.py"),
    Technique("Speculation by EAGLE, token-identical", "Li et al., 2024", "engine/models/heads/eagle.py"),
    Technique("vLLM's own drafts, token-identical", "EAGLE, ICML 2024; Medusa, ICML 2024; vLLM", "engine/vllm_runner"),
    Technique("Known tokens of a chat are not tokenized again", "ours", "router/frontend"),
    Technique("Steps launched ahead", "SGLang's overlap scheduler; vLLM", "worker/loop.py"),
    Technique("Sliding windows", "Mistral 7B, 2023", "decode_worker"),
    Technique("Attention sinks with a window, of a request", "StreamingLLM, ICLR 2024", "kvstore/kv_window.py"),
    Technique(
        "Attention sinks, a window and pages chosen by attention, of a request",
        "SnapKV, NeurIPS 2024",
        "kvstore/kv_window.py",
    ),
    Technique(
        "Pages chosen again by attention as an output grows, of a request", "H2O, NeurIPS 2023", "kvstore/kv_window.py"
    ),
    Technique("Pages by groups of layers", "Jenga, SOSP 2025; vLLM", "kvstore/window_groups.py"),
    Technique("Snapshots of recurrent states", "Marconi, MLSys 2025; vLLM", "engine/vllm_runner"),
    Technique("Mixture of experts", "GShard, 2020; Mixtral, 2024", "engine/models"),
    Technique("Latent attention", "DeepSeek-V2, 2024", "engine/vllm_runner"),
    Technique("Tensor parallelism", "Megatron-LM, 2019", "engine/vllm_runner"),
    Technique("Pipeline parallelism", "GPipe, 2019; vLLM", "engine/vllm_runner"),
    Technique("Many adapters in one batch", "Punica, MLSys 2024; S-LoRA, MLSys 2024", "engine/vllm_runner"),
    Technique("Quantized weights", "GPTQ, AWQ, FP8", "engine/vllm_runner"),
    Technique("Pages in FP8", "vLLM", "engine/vllm_runner"),
    Technique("Pages in codes, with a scale for each token and head", "vLLM", "engine/cpu"),
)


def page() -> str:
    """Return the page. Raises ValueError for a technique without a test, a mark without a technique, and a place that
    is not there."""
    tests = dict[str, list[str]]()
    for name, test in marks():
        tests.setdefault(name, []).append(test)
    if strange := tests.keys() - {each.name for each in TECHNIQUES}:
        raise ValueError(f"tests are marked with {sorted(strange)}, which .ci/features_page.py does not name")
    rows = list[str]()
    for each in TECHNIQUES:
        if not (ROOT / each.where).exists():
            raise ValueError(f"{each.name} lives in {each.where}, which is not there")
        if each.name not in tests:
            raise ValueError(f"{each.name} has no test: mark one with pytest.mark.technique({each.name!r})")
        rows.append(f"| {each.name} | {each.source} | `{each.where}` | {', '.join(tests[each.name])} |\n")
    return HEAD + "".join(rows)


def marks() -> Iterator[tuple[str, str]]:
    """Yield the name that each mark has, and its test as a link of the page."""
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        text = file.read_text()
        if "mark.technique(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            for decorator in node.decorator_list if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else ():
                match decorator:
                    case ast.Call(func=ast.Attribute(attr="technique"), args=[ast.Constant(value=str(name))]):
                        test = node.name.removeprefix("test_").replace("_", " ")
                        yield name, f"[{test}](../{file.relative_to(ROOT)})"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
