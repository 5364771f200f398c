"""The one check of a checkpoint: `baton doctor MODEL` tells all of its findings, `baton up` ends at the first problem.

It reads as routers and workers read, so that a checkpoint which passes starts. Of the weights it reads the heads of
files, and two tensors where embedding and output head may be one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jinja2
import msgspec

from baton.checkpoint_files import read_config, text_settings
from baton.config import Config
from baton.errors import BatonError, ModelError, UnsupportedModel
from baton.hosts import is_loopback
from engine.device.gpus import resolve_device, visible_gpus
from router.frontend.cascade import check_texts
from router.frontend.chat.template_process import environment
from router.frontend.served_model import ChatTemplate, load


@dataclass
class CheckpointReport:
    """Why processes would refuse a checkpoint, and what of it is odd and does no harm."""

    problems: list[BatonError] = field(default_factory=list[BatonError])
    notes: list[str] = field(default_factory=list[str])


def examine(config: Config, path: Path, engines: Sequence[tuple[Literal["native", "vllm"], str]]) -> CheckpointReport:
    """Look at the checkpoint in `path` as routers do, and as workers do with these engines on these devices."""
    report = CheckpointReport()
    try:
        model = load(msgspec.structs.replace(config.model, path=str(path)))
        report.notes += [*model.notes, *_template_notes(model.chat_template)]
    except BatonError as error:
        report.problems.append(error)
    for engine, device in dict.fromkeys(engines):
        try:
            report.notes += _native(config, path, device) if engine == "native" else _vllm(path)
        except BatonError as error:
            report.problems.append(error)
    report.notes = list(dict.fromkeys(report.notes))
    return report


def check(config: Config) -> tuple[Config, Sequence[str]]:
    """Check the checkpoint in `model.path`, a directory, for all workers. Return the configuration with the engine that
    all of them have, and what is to be told. Raises the first problem.

    Where workers may run on other machines, their engine is not known here. If it is not set, of the weights only the
    files are looked at.
    """
    from worker import draft
    from worker.engine_choice import devices_of, engine_of  # imports torch

    path = Path(config.model.path)
    draft.check(config.model, path)
    if not is_loopback(config.router.host):
        report = examine(config, path, [("native" if config.model.engine == "native" else "vllm", "cpu")])
        notes: Sequence[str] = ()
    else:
        gpus = visible_gpus()
        devices = [resolve_device(device, gpus) for device in devices_of(config, gpus).values()]
        choice = engine_of(config, path, devices)
        assert choice.engine is not None
        report = examine(config, path, [(choice.engine, device) for device in devices])
        config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, engine=choice.engine))
        notes = [f"the engine is {'our own' if choice.engine == 'native' else 'vLLM'}: {choice.why}"]
    if report.problems:
        raise report.problems[0]
    return config, [*notes, *(f"note: {note}" for note in report.notes)]


def check_cascades(config: Config) -> None:
    """Raise ModelError where the models of a cascade read texts differently. Their paths are directories."""
    if not config.cascades:
        return
    models = {name: model for model in map(load, config.all_models) for name in (model.name, *model.aliases)}
    for name, cascade in config.cascades.items():
        check_texts(name, models[cascade.small], models[cascade.large])


def _template_notes(template: ChatTemplate | None) -> Sequence[str]:
    notes: list[str] = []
    for name, source in template.named.items() if template is not None else ():
        try:
            environment().parse(source)
        except (jinja2.TemplateError, RecursionError) as error:
            notes.append(f"the chat template {name!r} is no template; chats that need it are refused: {error}")
    return notes


def _native(config: Config, path: Path, device: str) -> Sequence[str]:
    from engine.engine import dtype_of, linear_maker, quantization_lack
    from engine.models import weights
    from engine.models.config import load_spec

    spec, model = load_spec(path), config.model
    if lack := quantization_lack(spec, device, model.dtype, model.native, model.quantization):
        raise UnsupportedModel(lack)
    dtype, maker = weights.TORCH_DTYPES[dtype_of(spec, model.dtype)], linear_maker(device, spec, model.quantization)
    _, notes = weights.check(path, spec, dtype, maker)
    return notes


def _vllm(path: Path) -> Sequence[str]:
    """vLLM reads the tensors its own way. Whether it finds all of them is seen when it loads them."""
    import torch

    from engine.checkpoint.safetensors_reader import TensorFiles

    raw: Any = read_config(path)
    with TensorFiles(path) as files:
        ends = ("embed_tokens.weight", "lm_head.weight")
        names = [name for end in ends for name in files.names if name.endswith(end)]
        if text_settings(raw).get("tie_word_embeddings") is not True or len(names) != 2:
            return ()
        shape = files.shape(names[0])
        if not torch.equal(files.read_tensor(names[0], shape), files.read_tensor(names[1], shape)):
            raise ModelError(
                f"tie_word_embeddings is true, and the checkpoint's {names[1]} differs from {names[0]}, which vLLM's "
                "runner would use for both; set it to false in config.json"
            )
    return ()
