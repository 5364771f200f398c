"""Train heads that guess the demo model's next tokens: `python -m tools.demo_model.heads MODEL FOLDER`.

The model stays as it is, and answers are its teacher: each head learns the distribution that the model has at the place
that the head guesses for, on text of the small world. It takes some minutes on one thread. `FOLDER` gets a checkpoint
that `model.speculation_heads` takes.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch.nn import functional

from engine.models.heads import Heads, HeadsSpec
from tools.demo_model.batches import draw_batch
from tools.demo_model.network import Network, Shape

SEED = 22
INNER, HEADS = 96, 4
STEPS, ROWS, LENGTH = 600, 8, 512
LEARNING_RATE = 4e-3
_WARM_UP = 20
_LOG_EVERY = 20


def main() -> None:
    """Train, and write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    network = read_network(arguments.model)
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    spec = HeadsSpec(network.shape.vocabulary, network.shape.hidden, INNER, HEADS, tied=True)
    write(arguments.folder, spec, train(network, tokenizer, spec, arguments.steps))


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


def train(network: Network, tokenizer: Tokenizer, spec: HeadsSpec, steps: int) -> dict[str, torch.Tensor]:
    """Return the weights of heads for `network`, by name."""
    torch.manual_seed(SEED)
    tensors = {name: torch.randn(shape) / math.sqrt(spec.inner_size) for name, shape in spec.shapes().items()}
    for name in tensors:
        if ".ln." in name:
            tensors[name] = torch.full_like(tensors[name], float(name.endswith("weight")))
        tensors[name].requires_grad_()
    optimizer = torch.optim.AdamW(tensors.values(), betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    shares = torch.zeros(spec.count)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min((step + 1) / _WARM_UP, 1 - step / steps)
        losses, right = losses_of(network, Heads(spec, tensors), *draw_batch(tokenizer, (SEED, step, 0), ROWS, LENGTH))
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        shares += right / _LOG_EVERY
        if (step + 1) % _LOG_EVERY == 0:
            print(
                f"step {step + 1} of {steps}: loss {losses.mean():.3f}, the model's likeliest token:",
                *(f"{x:.1%}" for x in shares.tolist()),
                flush=True,
            )
            shares.zero_()
    return {name: tensor.detach() for name, tensor in tensors.items()}


def losses_of(
    network: Network, heads: Heads, tokens: torch.Tensor, kinds: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each head its loss, and how often its likeliest token is the model's. `tokens` and `kinds` are
    [rows, length + 1]. A place counts if the assistant says the token after it."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        hidden = network(tokens[:, :-1])
    places = torch.nonzero(kinds[:, 1 : -1 - heads.spec.count] > 0, as_tuple=True)
    state = heads.first(hidden[places].float())
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


def write(folder: Path, spec: HeadsSpec, tensors: dict[str, torch.Tensor]) -> None:
    """Write the checkpoint into `folder`, creating it if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "model.safetensors").chmod(0o644)  # safetensors lets nothing but the owner read
    (folder / "config.json").write_text(json.dumps(spec.config(), indent=2) + "\n")


if __name__ == "__main__":
    main()
