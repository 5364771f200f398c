"""Train heads that guess the demo model's next tokens: `python -m tools.demo_model.heads MODEL FOLDER --form eagle`.

The model stays as it is, and answers are its teacher: each head learns the distribution that the model has at the place
that the head guesses for, on text of the small world. EAGLE's layer attends as it does in a worker, and goes on from
states that it has guessed itself. It takes some minutes on one thread. `FOLDER` gets a checkpoint that
`model.speculation_heads` takes.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional

from deploy.models import DEMO_MODEL
from engine.models.heads import Heads
from engine.models.heads.eagle import WINDOW
from engine.models.heads.medusa import Medusa, MedusaSpec
from engine.models.heads.mlp_speculator import MlpSpec, MlpSpeculator
from tools.demo_model.batches import draw_batch
from tools.demo_model.network import Layer, Network, Shape, turns_of

SEED = 22
INNER, HEADS = 96, 4
STEPS, ROWS, LENGTH = 600, 8, 512
LEARNING_RATE = 4e-3
_PASSES = 3  # of EAGLE's layer: each goes on from the states that the one before has guessed
_WARM_UP = 20
_LOG_EVERY = 20
Spec: TypeAlias = MlpSpec | MedusaSpec | Shape
"""The sizes of heads: of EAGLE's, the shape of its layer."""
Losses: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""The loss of each head, and how often its likeliest token is the model's."""


def main() -> None:
    """Train, and write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--form", choices=("mlp_speculator", "medusa", "eagle"), default="mlp_speculator")
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    network = read_network(arguments.model)
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    spec = spec_of(arguments.form, network.shape)
    write(arguments.folder, spec, train(network, tokenizer, spec, arguments.steps))


def spec_of(form: str, shape: Shape) -> Spec:
    """Return the sizes of heads of a form for a model."""
    match form:
        case "medusa":
            return MedusaSpec(shape.vocabulary, shape.hidden, HEADS, shared=True)
        case "eagle":
            return replace(shape, layers=1)
        case _:
            return MlpSpec(shape.vocabulary, shape.hidden, INNER, HEADS, tied=True)


def read_network(folder: Path) -> Network:
    """Return the model of a checkpoint that `train.py` wrote."""
    config = json.loads((folder / "config.json").read_text())
    network = Network(
        Shape(
            config["vocab_size"], config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"],
            config["num_attention_heads"], config["head_dim"], config["rope_theta"], config["max_position_embeddings"],
        )
    )  # fmt: skip
    network.load_state_dict(load_file(folder / "model.safetensors"))
    return network.requires_grad_(requires_grad=False)


def train(network: Network, tokenizer: Tokenizer, spec: Spec, steps: int) -> dict[str, torch.Tensor]:
    """Return the weights of heads for `network`, by name."""
    torch.manual_seed(SEED)
    tensors, losses_of_batch = start(network, spec)
    for tensor in tensors.values():
        tensor.requires_grad_()
    optimizer = torch.optim.AdamW(tensors.values(), betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    shares: torch.Tensor | float = 0.0
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min((step + 1) / _WARM_UP, 1 - step / steps)
        losses, right = losses_of_batch(*draw_batch(tokenizer, (SEED, step, 0), ROWS, LENGTH))
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        shares = shares + right / _LOG_EVERY
        if (step + 1) % _LOG_EVERY == 0:
            print(
                f"step {step + 1} of {steps}: loss {losses.mean():.3f}, the model's likeliest token:",
                *(f"{x:.1%}" for x in shares.tolist()),
                flush=True,
            )
            shares = 0.0
    return {name: tensor.detach() for name, tensor in tensors.items()}


def first_heads(form: str, folder: Path) -> Path:
    """Write heads of the demo model that have learned nothing into `folder`, and return it."""
    network = read_network(DEMO_MODEL)
    spec = spec_of(form, network.shape)
    torch.manual_seed(SEED)
    write(folder, spec, {name: tensor.detach() for name, tensor in start(network, spec)[0].items()})
    return folder


def start(network: Network, spec: Spec) -> tuple[dict[str, torch.Tensor], Callable[..., Losses]]:
    """Return first weights of heads, by name, and their losses for a batch."""
    if isinstance(spec, Shape):
        layer = EagleLayer(spec)
        return dict(layer.named_parameters()), partial(eagle_losses, network, layer)
    if isinstance(spec, MedusaSpec):
        tensors = {name: torch.zeros(shape) for name, shape in spec.shapes().items()}
        tensors[spec.output(0)] = network.model.embed_tokens.weight.clone()
        return tensors, lambda *batch: losses_of(network, Medusa(spec, tensors), *batch)
    tensors = {name: torch.randn(shape) / math.sqrt(spec.inner_size) for name, shape in spec.shapes().items()}
    for name in tensors:
        if ".ln." in name:
            tensors[name] = torch.full_like(tensors[name], float(name.endswith("weight")))
    return tensors, lambda *batch: losses_of(network, MlpSpeculator(spec, tensors), *batch)


def losses_of(network: Network, heads: Heads, tokens: torch.Tensor, kinds: torch.Tensor) -> Losses:
    """Return for each head its loss, and how often its likeliest token is the model's. `tokens` and `kinds` are
    [rows, length + 1]. A place counts if the assistant says the token after it."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        hidden = network(tokens[:, :-1])
    places = torch.nonzero(kinds[:, 1 : -1 - heads.spec.count] > 0, as_tuple=True)
    state = heads.first(hidden[places].float(), ())
    losses, right = list[torch.Tensor](), list[float]()
    for head in range(heads.spec.count):
        row, at = places[0], places[1] + 1 + head
        with torch.autocast("cpu", torch.bfloat16):
            state = heads.advance(head, state, tokens[row, at])
            logits = heads.logits(head, state).float()
            teacher = network.logits(hidden[row, at]).float()
        losses.append(functional.cross_entropy(logits, teacher.softmax(-1)))
        right.append((logits.argmax(-1) == teacher.argmax(-1)).float().mean().item())
    return torch.stack(losses), torch.tensor(right)


class EagleLayer(nn.Module):
    """EAGLE's layer. Its parameters have the names of a checkpoint."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        layer = Layer(shape)
        layer.register_module("input_layernorm", nn.Identity())
        self.layers = nn.ModuleList([layer])

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The hidden states after those given, all [rows, length, hidden], and the tokens drawn from these."""
        x = self.fc(torch.cat((embedded, hidden), dim=-1)).float()
        return self.layers[0](x, turns_of(self.shape, x.shape[1], x.dtype), mask)


def eagle_losses(network: Network, layer: EagleLayer, tokens: torch.Tensor, kinds: torch.Tensor) -> Losses:
    """As `losses_of`. A place attends to those of its answer alone, as it does where the prompt came as pages."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        hidden = network(tokens[:, :-1])
    drawn = kinds[:, 1:-1] > 0
    answers = (~drawn).cumsum(1)
    at = torch.arange(drawn.shape[1])
    near = (at[:, None] >= at) & (at[:, None] - at <= WINDOW)
    mask = near & (answers[:, :, None] == answers[:, None]) & drawn[:, None] | torch.eye(len(at), dtype=torch.bool)
    places, teacher = torch.nonzero(drawn, as_tuple=True), hidden[:, 1:]
    embedded, state = network.model.embed_tokens(tokens[:, 1:-1]), hidden[:, :-1]
    states = teacher[places].float()
    losses, right = list[torch.Tensor](), list[float]()
    for _ in range(_PASSES):
        with torch.autocast("cpu", torch.bfloat16):
            guessed = layer(embedded, state, mask[:, None])
            logits, likely = (network.logits(each).float() for each in (guessed[places], teacher[places]))
        loss = functional.cross_entropy(logits, likely.softmax(-1))
        losses.append(loss + functional.smooth_l1_loss(guessed[places].float(), states))
        right.append((logits.argmax(-1) == likely.argmax(-1)).float().mean().item())
        state = torch.cat((hidden[:, :1], guessed[:, :-1]), dim=1)
    return torch.stack(losses), torch.tensor(right)


def write(folder: Path, spec: Spec, tensors: dict[str, torch.Tensor]) -> None:
    """Write the checkpoint into `folder`, creating it if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "model.safetensors").chmod(0o644)  # safetensors lets nothing but the owner read
    (folder / "config.json").write_text(json.dumps(spec.config(), indent=2) + "\n")


if __name__ == "__main__":
    main()
