"""Train the demo's model: `python -m tools.demo_model.train FOLDER [--size draft|large]`. The same command resumes.

Owns the schedule and the state on disk. With `--processes 2` each draws its own rows, and they average their gradients.
On a machine that others use, one process with one thread wastes least. `FOLDER/log.jsonl` has a line every 20 steps.
`FOLDER/checkpoint` is what `baton up --model` takes; it is written with the state every five minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import distributed, multiprocessing
from torch.nn import functional

from tools.demo_model import checkpoint
from tools.demo_model import tokenizer as tokenizers
from tools.demo_model.batches import draw_batch
from tools.demo_model.conversation import OPENING, VALUE
from tools.demo_model.network import Network, Shape, start

SEED = 21


@dataclass(frozen=True)
class Stage:
    """A part of the training: `steps` batches of `rows` rows of `length` tokens."""

    steps: int
    rows: int
    length: int


@dataclass(frozen=True)
class Plan:
    """A model's size and how it is trained."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    head_dim: int
    learning_rate: float
    """Of matrices, which Muon trains, and of all else, which AdamW trains."""
    stages: tuple[Stage, ...]

    @property
    def steps(self) -> int:
        """All steps of all stages."""
        return sum(stage.steps for stage in self.stages)

    def stage(self, step: int) -> Stage:
        """Return the stage that `step` belongs to."""
        for stage in self.stages:
            if step < stage.steps:
                return stage
            step -= stage.steps
        return self.stages[-1]


_STAGES = (Stage(500, 16, 256), Stage(1_970, 8, 512), Stage(730, 4, 1_024), Stage(80, 2, 2_048))
_LARGE_STAGES = (
    Stage(250, 16, 256), Stage(950, 8, 512), Stage(400, 4, 1_024), Stage(400, 2, 2_048), Stage(400, 2, 3_072),
)  # fmt: skip
PLANS = {
    "draft": Plan(80, 128, 2, 2, 40, 1.5e-3, _STAGES),
    "small": Plan(128, 256, 2, 2, 64, 1.2e-3, _STAGES),
    "large": Plan(192, 384, 4, 3, 64, 1e-3, _LARGE_STAGES),
}
_WEIGHTS = (0.1, 1.0, 3.0, 3.0)
_PROSE_SHARE = 0.15
"""Share of the prose tokens that a loss is computed for; each then weighs as much more."""
_WARM_UP = 40
_LOG_EVERY = 20
_SAVE_EVERY = 300.0


def main() -> None:
    """Train until the plan's last step, or for `--minutes`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=PLANS, default="small")
    parser.add_argument("--processes", type=int, default=2, help="with a thread each")
    parser.add_argument("--minutes", type=float, default=math.inf, help="end after so long, resumable")
    parser.add_argument("--port", type=int, default=29_521, help="loopback port on which the processes meet")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    shared = (arguments.processes, arguments.folder, arguments.size, arguments.minutes, arguments.port)
    multiprocessing.spawn(_run, shared, nprocs=arguments.processes)  # pyright: ignore[reportPrivateImportUsage]


def _run(rank: int, processes: int, folder: Path, size: str, minutes: float, port: int) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=processes)
    trainer = Trainer(folder, PLANS[size], rank, processes)
    end = time.monotonic() + 60 * minutes
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    while trainer.step < trainer.plan.steps and _agree(time.monotonic() < end and not stopped):
        trainer.train_step()
    trainer.save()
    distributed.destroy_process_group()


def _agree(going: bool) -> bool:
    """Whether all processes would go on."""
    votes = torch.tensor([float(going)])
    distributed.all_reduce(votes)
    return bool(votes.item() == distributed.get_world_size())


def _tokenizer(path: Path, rank: int) -> Tokenizer:
    """Return the run's tokenizer, which the first process trains when the run begins."""
    if rank == 0 and not path.exists():
        tokenizers.train().save(str(path))
    distributed.barrier()
    return Tokenizer.from_file(str(path))


def _optimizers(network: Network) -> tuple[torch.optim.Optimizer, ...]:
    """Return Muon for the matrices of the layers, and AdamW for embeddings, norms and biases."""
    inner = [p for name, p in network.named_parameters() if p.ndim == 2 and "embed" not in name]
    outer = [p for name, p in network.named_parameters() if p.ndim != 2 or "embed" in name]
    muon = torch.optim.Muon(inner, weight_decay=0.01, ns_steps=4, adjust_lr_fn="match_rms_adamw")
    return muon, torch.optim.AdamW(outer, betas=(0.9, 0.98), weight_decay=0.0, fused=True)


class Trainer:
    """One process's part of the training, and its state on disk."""

    def __init__(self, folder: Path, plan: Plan, rank: int, processes: int) -> None:
        self.plan = plan
        self.step = 0
        self._folder = folder
        self._rank = rank
        self._processes = processes
        self._tokenizer = _tokenizer(folder / "tokenizer.json", rank)
        shape = Shape(
            self._tokenizer.get_vocab_size(), plan.hidden, plan.intermediate, plan.layers, plan.heads, plan.head_dim
        )
        self.network = Network(shape)
        start(self.network, self._tokenizer, SEED)
        self._optimizers = _optimizers(self.network)
        self._cpu_seconds = 0.0
        self._tokens = 0
        self._saved = time.monotonic()
        self._sums = torch.zeros(6)
        if (folder / "state.pt").exists():
            self._load(torch.load(folder / "state.pt", weights_only=True))
        self._began = time.process_time()

    def _load(self, state: dict[str, Any]) -> None:
        self.network.load_state_dict(state["network"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self._tokens, self._cpu_seconds = state["step"], state["tokens"], state["cpu_seconds"]

    def train_step(self) -> None:
        """Draw a batch, average the gradients of all processes, and move the weights."""
        torch.manual_seed(2 * self.step + self._rank)
        stage = self.plan.stage(self.step)
        tokens, kinds = draw_batch(
            self._tokenizer, (SEED, self.step, self._rank), stage.rows // self._processes, stage.length
        )
        self._loss(tokens[:, :-1], tokens[:, 1:], kinds[:, 1:]).backward()
        self._average()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.plan.learning_rate * self._schedule()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        self.step += 1
        self._tokens += self._processes * tokens.numel()
        if self.step % _LOG_EVERY == 0:
            self._log(stage)
        if _agree(time.monotonic() - self._saved < _SAVE_EVERY) is False:
            self.save()

    def _schedule(self) -> float:
        """Warm up, hold, and fall to a tenth over the last 60 %."""
        left = 1 - self.step / self.plan.steps
        return min(1.0, (self.step + 1) / _WARM_UP, 0.1 + 0.9 * left / 0.6)

    def _loss(self, inputs: torch.Tensor, targets: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        mask = (kinds > 0) | (torch.rand(kinds.shape) < _PROSE_SHARE)
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.network.logits(self.network(inputs)[mask])
        kinds, targets = kinds[mask], targets[mask]
        weights = torch.tensor((_WEIGHTS[0] / _PROSE_SHARE, *_WEIGHTS[1:]))[kinds]
        losses = functional.cross_entropy(logits.float(), targets, reduction="none")
        loss = (losses * weights).sum() / weights.sum()
        self._count(loss.detach(), losses.detach(), logits.detach().argmax(-1) == targets, kinds)
        return loss

    def _count(self, loss: torch.Tensor, losses: torch.Tensor, right: torch.Tensor, kinds: torch.Tensor) -> None:
        of_value, spoken = kinds == VALUE, kinds > 0
        sums = [
            loss,
            losses[of_value].mean(),
            right[of_value].float().mean(),
            right[spoken].float().mean(),
            right[kinds == OPENING].float().mean(),
            1.0,
        ]
        self._sums += torch.tensor([float(x) for x in sums])

    def _average(self) -> None:
        if self._processes == 1:
            return
        grads = [p.grad for p in self.network.parameters() if p.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        distributed.all_reduce(flat)
        flat /= self._processes
        for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))

    def _log(self, stage: Stage) -> None:
        loss, value_loss, value_right, spoken_right, opening_right, _ = (self._sums / self._sums[-1]).tolist()
        self._sums.zero_()
        if self._rank:
            return
        line = {
            "step": self.step, "of": self.plan.steps, "length": stage.length, "tokens": self._tokens,
            "cpu_hours": round(self._cpu_hours(), 3), "loss": round(loss, 3), "value_loss": round(value_loss, 3),
            "values_right": round(value_right, 3), "spoken_right": round(spoken_right, 3),
            "openings_right": round(opening_right, 3), "time": time.strftime("%H:%M:%S"),
        }  # fmt: skip
        with (self._folder / "log.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")

    def _cpu_hours(self) -> float:
        """CPU hours of all processes so far, each taken as this one's."""
        return (self._cpu_seconds + self._processes * (time.process_time() - self._began)) / 3_600

    def save(self) -> None:
        """Write state and checkpoint, whole or not at all."""
        self._saved = time.monotonic()
        if self._rank:
            return
        state = {
            "network": self.network.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "step": self.step,
            "tokens": self._tokens,
            "cpu_seconds": self._cpu_hours() * 3_600,
        }
        torch.save(state, self._folder / "state.new")
        (self._folder / "state.new").replace(self._folder / "state.pt")
        checkpoint.write(self._folder / "checkpoint", self.network, self._tokenizer)


if __name__ == "__main__":
    main()
