"""The draft model or the heads of a decode worker: what fits beside a model, and how it is loaded.

`check` is called before anything starts. A draft model has an engine and pages of its own in the worker's process.
Heads have their weights alone. vLLM loads its own drafts with the model.
"""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from baton.checkpoint_files import read_config, text_settings
from baton.checkpoints import hub
from baton.config import Config, ModelConfig
from baton.errors import ConfigError
from decode_worker.draft_model import DraftModel
from decode_worker.drafter import Drafter
from decode_worker.handed_proposals import HandedProposals
from decode_worker.heads import HeadsDrafter
from engine.checkpoint.safetensors_reader import TensorFiles
from engine.cpu.packed_linear import PackedLinears
from engine.engine import Engine, dtype_of, layout_of, linear_maker
from engine.models import heads, weights
from engine.models.config import load_spec
from engine.runner import Runner
from engine.step.batch import Chunk, HiddenRow, Sampled
from engine.vllm_runner import drafts
from engine.vllm_runner.runner import VllmRunner
from worker.calibration import calibrate


def check(model: ModelConfig, path: Path) -> None:
    """Raise ConfigError unless the draft or the heads that are named fit the checkpoint in `path`, and ModelError if
    they can't be read. What is not named is not checked."""
    if settings := model.speculative_config:
        folder = hub.resolve(settings.model) if settings.model else path
        own, other = (text_settings(read_config(each)) for each in (path, folder))
        wrong = drafts.lack(settings, own, other)
        if not wrong:
            with TensorFiles(folder) as files:  # of other formats vLLM would unpickle some
                if (weight := drafts.weight(settings, own)) and weight not in files.names:
                    wrong = f"its checkpoint was saved without {weight}"
        if wrong:
            raise ConfigError(
                f"model.speculative_config: {settings.model or settings.method} does not fit the model: {wrong}"
            )
    if model.speculation_heads:
        spec, fitting = load_spec(path), heads.load_spec(hub.resolve(model.speculation_heads))
        if (fitting.vocab_size, fitting.hidden_size) != (spec.vocab_size, spec.hidden_size):
            raise ConfigError(
                f"model.speculation_heads {model.speculation_heads} is for {fitting.vocab_size} tokens and a hidden "
                f"size of {fitting.hidden_size}, and the model has {spec.vocab_size} and {spec.hidden_size}; name "
                "heads that were trained for this model, or leave it out"
            )
        with TensorFiles(hub.resolve(model.speculation_heads)):  # published ones are often pickled
            pass
    if not model.draft_model:
        return
    draft = hub.resolve(model.draft_model)
    own, spec = load_spec(path).vocab_size, load_spec(draft)
    if own != spec.vocab_size:
        raise ConfigError(_unlike(model, f"has {spec.vocab_size} tokens and the model's vocabulary {own}"))
    if _vocabulary(path) != _vocabulary(draft):
        raise ConfigError(_unlike(model, "has a tokenizer.json with other tokens than the model's"))
    weights.check(draft, spec, weights.TORCH_DTYPES[dtype_of(spec, model.dtype)], linear_maker("cpu", spec, ""))


def page_layers(model: ModelConfig, raw: Mapping[str, Any]) -> int:
    """Return how many layers vLLM's draft adds to the pages of a model with this config. Raises ModelNotFound, and
    ModelError for sizes that are none."""
    if (settings := model.speculative_config) is None:
        return 0
    folder = hub.resolve(settings.model, ["config.json"]) if settings.model else None
    return drafts.layers(settings.method, text_settings(read_config(folder) if folder else raw))


def load(config: Config, runner: Runner) -> Drafter | None:
    """Load `model.draft_model` or `model.speculation_heads` beside `runner`, or take what its own draft proposes; none
    if nothing is named. Raises as `check` and `Engine.load` do."""
    model, page_size = config.model, config.pages.page_size
    check(model, hub.resolve(model.path))
    if model.speculation_heads:
        return _load_heads(hub.resolve(model.speculation_heads), runner)
    if model.speculative_config:
        assert isinstance(runner, VllmRunner), "no other runner has drafts of its own"
        return HandedProposals(runner, model.speculative_config.num_speculative_tokens)
    if not model.draft_model:
        return None
    path = hub.resolve(model.draft_model)
    layout = layout_of(load_spec(path), model.dtype, page_size)
    pages = max(1, min(runner.num_pages, Engine.pages_for(config.draft_cache_bytes, layout)))
    engine = Engine.load(path, model.dtype, "cpu", pages, page_size, head=True, threads=config.decode.threads or None)

    def run(chunks: Sequence[Chunk]) -> tuple[Sequence[Sampled | None], float]:
        with runner.tracer.span("draft", "engine", chunks=len(chunks)):
            began = time.monotonic()  # what the sequences wait for is all of it
            results = engine.launch(chunks).wait()
        return results.sampled, time.monotonic() - began

    steps = calibrate(
        lambda chunks: run(chunks)[1], time.monotonic, page_size, pages, engine.max_positions,
        decodes=True, most_rows=config.decode.max_num_seqs,
    )  # fmt: skip
    return DraftModel(run, pages, page_size, engine.max_positions, calibration=steps)


def _load_heads(path: Path, runner: Runner) -> HeadsDrafter:
    assert isinstance(runner, Engine), "no other engine is chosen with heads"
    loaded = heads.load(path, runner.dtype, PackedLinears(groups=False), runner)

    def run(rows: Sequence[HiddenRow], count: int) -> tuple[list[list[int]], float]:
        with runner.tracer.span("draft", "engine", rows=len(rows)):
            began = time.monotonic()
            guesses = runner.guess(loaded, rows, count)
        return guesses, time.monotonic() - began

    keep = (lambda drawn: loaded.keep(runner.hidden, drawn)) if loaded.remembers else None
    return HeadsDrafter(run, loaded.spec.count, keep)


def _unlike(model: ModelConfig, how: str) -> str:
    remedy = "it must have the same vocabulary: name another one, or leave it out"
    return f"model.draft_model {model.draft_model} {how}; {remedy}"


def _vocabulary(path: Path) -> object:
    """The tokens of a checkpoint's tokenizer; None: it has none."""
    file = path / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        tokenizer = json.loads(file.read_bytes())
        return tokenizer["model"]["vocab"], [(each["id"], each["content"]) for each in tokenizer["added_tokens"]]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ConfigError(f"{file} can't be read as a tokenizer ({error!r}): fetch it anew") from None
