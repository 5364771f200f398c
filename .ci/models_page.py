"""Write docs/models.md from the families and the tests that prove them: `python .ci/models_page.py docs/models.md`."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from engine.cpu import features  # noqa: E402
from engine.models.config import parse_spec  # noqa: E402
from engine.models.families.registry import FAMILIES  # noqa: E402
from engine.spec import ModelSpec  # noqa: E402
from tests import checkpoints  # noqa: E402
from tests.processes import test_exact  # noqa: E402

HEAD = """# Models

Which families the native runner serves, and the test that proves each cell. `python .ci/models_page.py docs/models.md`
writes this page, and a test compares them.

Each checkpoint below is small, has random weights, and is made by transformers from a config and a seed.

- *Engine*: greedy tokens and log-probabilities are those of transformers in float32, whole, in chunks and in batches.
- *Clusters*: up to 64 requests at once get the same tokens from a whole cluster of processes. `make test` takes the
  shapes named, `make soak` all three of each family: 1P+1D, 2P+2D and colocated.
- *Kernels*: "native" are our own for CPUs, in float32 and bfloat16. All else is computed by torch, on a CPU or a GPU.
  Nothing of this was run on a GPU yet.
"""

FOOT = """
## What the checkpoints differ in

{kinds}

## Where this ends

- Weights are float32, bfloat16 or float16. Matrices in FP8 with blocks of 128 x 128 are made dense when they are loaded
  ([test]({weights})). Other quantized checkpoints are refused by name.
- LongRoPE has one list of factors for all sequences: the long one where a model takes more than its original context.
  transformers takes the short one for shorter sequences, and would have to turn cached keys anew. vLLM does as we do.
- Dynamic NTK scaling changes nothing up to `max_position_embeddings`, which is the longest sequence here.
- A mixture of experts is computed by torch, expert by expert. In bfloat16 two experts may be so nearly alike to the
  router that another batch takes the other one.
- An architecture that is not in the table is refused when the cluster starts, by name, unless vLLM's runner serves it
  ([vllm.md](vllm.md)).
"""

GENERATION = "tests/engine/test_generation.py"
EXACT = "tests/processes/test_exact.py"


@dataclass(frozen=True)
class Row:
    """One kind of checkpoint."""

    recipe: str
    spec: ModelSpec


def rows() -> list[Row]:
    """All kinds of checkpoints in the order of their families."""
    found: list[Row] = []
    for recipe in checkpoints.RECIPES:
        with tempfile.TemporaryDirectory() as folder:
            checkpoints.config(recipe).save_pretrained(folder)
            raw = json.loads((Path(folder) / "config.json").read_text())
        raw["architectures"] = [checkpoints.RECIPES[recipe].model.__name__]
        found.append(Row(recipe, parse_spec(raw)))
    order = [family.name for family in FAMILIES]
    return sorted(found, key=lambda row: order.index(row.spec.family))


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
    return (
        f"{HEAD}\n{chr(10).join(lines)}\n\n"
        f"Engine: `{_GENERATION_TESTS[0]}[checkpoint]` and\n`{_GENERATION_TESTS[1]}[checkpoint]`.\n"
        f"Clusters: `{_EXACT_TEST}[checkpoint-shape]`.\n"
        + FOOT.format(kinds="\n".join(kinds), weights="../tests/engine/test_weights.py")
    )


_GENERATION_TESTS = ("test_greedy_tokens_are_those_of_transformers", "test_logits_are_those_of_transformers")
_EXACT_TEST = "test_64_requests_at_once_get_the_reference_tokens"


def _kind(row: Row) -> str:
    spec = row.spec
    windowed = [window for window in spec.windows if window is not None]
    windows = "" if not windowed else "all layers" if len(windowed) == spec.num_layers else "some layers"
    ropes = dict.fromkeys(layer.rope for layer in spec.layers)
    rotation = ", ".join(rope.kind + (" of a part of each head" if rope.rotated else "") for rope in ropes)
    experts = [layer.experts for layer in spec.layers if layer.experts is not None]
    told = {
        "biases": spec.qkv_bias or spec.output_bias or spec.mlp_bias,
        "tied embeddings": spec.tied_embeddings,
        "norms of queries and keys": spec.qk_norm,
        "norms of what layers add": spec.output_norms,
        "GELU": spec.activation == "gelu_tanh",
        "experts in all layers": len(experts) == spec.num_layers,
        "experts in some layers": 0 < len(experts) < spec.num_layers,
    }
    return f"| {row.recipe} | {windows} | {rotation} | {', '.join(name for name, is_so in told.items() if is_so)} |"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
