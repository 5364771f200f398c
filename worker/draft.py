"""The draft model of a decode worker: what fits beside a model, and how it is loaded.

`check` is called before anything starts. The draft model has an engine and pages of its own in the worker's process.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path

from baton.checkpoints import hub
from baton.config import Config, ModelConfig
from baton.errors import ConfigError
from decode_worker.draft_model import DraftModel
from engine.engine import Engine, layout_of
from engine.models.config import load_spec
from engine.runner import Runner
from engine.step.batch import Chunk, Sampled
from worker.calibration import calibrate


def check(model: ModelConfig, path: Path) -> None:
    """Raise ConfigError unless `model.draft_model` has the vocabulary of the checkpoint in `path`, and ModelError if
    it can't be read. Without a draft model nothing is checked."""
    if not model.draft_model:
        return
    draft = hub.resolve(model.draft_model)
    own, other = load_spec(path).vocab_size, load_spec(draft).vocab_size
    if own != other:
        raise ConfigError(_unlike(model, f"has {other} tokens and the model's vocabulary {own}"))
    if _vocabulary(path) != _vocabulary(draft):
        raise ConfigError(_unlike(model, "has a tokenizer.json with other tokens than the model's"))


def load(config: Config, runner: Runner) -> DraftModel:
    """Load `model.draft_model` beside `runner`. Raises as `check` and `Engine.load` do."""
    model, page_size = config.model, config.pages.page_size
    check(model, hub.resolve(model.path))
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
