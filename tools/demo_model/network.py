"""Qwen2's architecture to train on a CPU, with Hugging Face's tensor names and a start that can already look back.

Owns the forward pass, the first weights, and the shapes. `engine` serves the result; a test compares both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional

Turns: TypeAlias = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """The sizes of a model. `intermediate` is the width of the MLP."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    head_dim: int
    theta: float = 1_000_000.0
    positions: int = 4_096

    def config(self) -> dict[str, Any]:
        """Return `config.json` of the checkpoint."""
        return {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.positions,
            "rope_theta": self.theta,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "bos_token_id": None,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "torch_dtype": "bfloat16",
        }


class _Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.head_dim = shape.heads, shape.head_dim
        width = shape.heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, width)
        self.k_proj = nn.Linear(shape.hidden, width)
        self.v_proj = nn.Linear(shape.hidden, width)
        self.o_proj = nn.Linear(width, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, turns: Turns, mask: torch.Tensor | None) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = (
            project(x).view(rows, length, self.heads, self.head_dim).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = _rotate(q, *turns), _rotate(k, *turns)
        attended = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        return self.o_proj(attended.transpose(1, 2).reshape(rows, length, -1))


class _Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=1e-6)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=1e-6)
        self.mlp = _Mlp(shape)

    def forward(self, x: torch.Tensor, turns: Turns, mask: torch.Tensor | None = None) -> torch.Tensor:
        """`mask`: which places each attends to; None: all up to its own."""
        x = x + self.self_attn(self.input_layernorm(x), turns, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class _Body(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-6)


class Network(nn.Module):
    """The model. `state_dict()` is the checkpoint: its names are those of Hugging Face."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = _Body(shape)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[rows, length] token ids → [rows, length, hidden] normed hidden states."""
        x = self.model.embed_tokens(tokens)
        turns = turns_of(self.shape, tokens.shape[1], x.dtype)
        for layer in self.model.layers:
            x = layer(x, turns)
        return self.model.norm(x)

    def attention(self, depth: int) -> _Attention:
        """Return a layer's attention."""
        layer = self.model.layers[depth]
        assert isinstance(layer, Layer)
        return layer.self_attn

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[…, hidden] → […, vocabulary]; input and output embeddings are one tensor."""
        return functional.linear(hidden, self.model.embed_tokens.weight)


def turns_of(shape: Shape, length: int, dtype: torch.dtype) -> Turns:
    """Cosine and sine of each place's angles."""
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32), shape.theta**-half)
    cos, sin = (torch.cat([turn, turn], dim=-1).to(dtype) for turn in (angles.cos(), angles.sin()))
    return cos, sin


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


@torch.no_grad()
def start(network: Network, tokenizer: Tokenizer, seed: int) -> None:
    """Set first weights that need little training to look back.

    Half of the hidden dimensions begin with the token itself, the other half is empty. Heads of the first layer attend,
    by their biases alone, to the token one, two, three … places before, and copy a part of it into a share of the empty
    half. Heads of the second layer compare the tokens here with those before each earlier token, and copy the token
    that followed the same words. Heads of the last layer take the token itself out again, since it is seldom the next
    one. Learning these circuits from noise costs more than all the rest of the training.
    """
    torch.manual_seed(seed)
    shape = network.shape
    for name, parameter in network.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif "norm" not in name:
            scale = 0.03 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            parameter.normal_(0, scale / math.sqrt(parameter.shape[-1]))
    half = shape.hidden // 2
    embeddings, common = _embeddings(tokenizer, half)
    network.model.embed_tokens.weight[:, :half] = embeddings
    network.model.embed_tokens.weight[:, half:] *= 0.1
    share = half // shape.heads
    content = functional.pad(_orthonormal(share, half, common), (0, half))
    places = [
        functional.pad(torch.eye(share), (half + share * head, half - share * (head + 1)))
        for head in range(shape.heads)
    ]
    for head in range(shape.heads):
        _attend_at(network, 0, head, head + 1)
        _copy(network, 0, head, content, places[head], 1.3)
    parts = functional.pad(_orthonormal(half, half, common[:0]), (0, half)).split(half // 2)
    for head in range(2):
        _attend_alike(network, 1, head, content, places)
        _copy(network, 1, head, parts[head], parts[head], 1.5)
    for head in range(2 if shape.layers > 2 else 0):
        _attend_at(network, shape.layers - 1, head, 0)
        _copy(network, shape.layers - 1, head, parts[head], parts[head], -1.5)


def _embeddings(tokenizer: Tokenizer, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return embeddings [vocabulary, width], and what many words have in common [2, width].

    A word has nearly the same embedding with a space before it and without, capital or not.
    """
    scale = 1 / math.sqrt(width)
    common = torch.randn(2, width) * scale
    bases: dict[str, torch.Tensor] = {}
    weights = torch.empty(tokenizer.get_vocab_size(), width)
    for token, number in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        word = token.removeprefix("Ġ")
        base = bases.setdefault(word.lower() or token, torch.randn(width) * scale)
        marks = torch.tensor([0.4 * (token != word), 0.4 * (word != word.lower())])
        weights[number] = base + marks @ common + 0.15 * torch.randn(width) * scale
    return weights, common


def _attend_at(network: Network, depth: int, head: int, distance: int) -> None:
    """Let a head attend to the token `distance` places before, whatever it is."""
    shape, attention = network.shape, network.attention(depth)
    pairs = shape.head_dim // 2
    rows = slice(head * shape.head_dim, (head + 1) * shape.head_dim)
    frequencies = shape.theta ** (-torch.arange(pairs) / pairs)
    strength = 6.0 * (torch.arange(pairs) < pairs * 3 // 8)  # the fast pairs, which tell neighbours apart
    attention.q_proj.weight[rows] *= 0.1
    attention.k_proj.weight[rows] *= 0.1
    # The score at distance d is a sum of cos(f · (d - distance)) over frequencies: largest at `distance`.
    attention.q_proj.bias[rows] = torch.cat([strength, torch.zeros(pairs)])
    angle = frequencies * distance
    attention.k_proj.bias[rows] = torch.cat([strength * angle.cos(), strength * angle.sin()])


def _attend_alike(network: Network, depth: int, head: int, content: torch.Tensor, places: list[torch.Tensor]) -> None:
    """Let a head attend to tokens that come after the same words as the next token does here."""
    shape, attention = network.shape, network.attention(depth)
    size = shape.head_dim
    slow = torch.arange(size)[torch.arange(size) % (size // 2) >= size // 4]  # these hardly turn over 1,000 tokens
    rows = head * size + slow
    share = len(content)
    query, key = torch.zeros(len(slow), shape.hidden), torch.zeros(len(slow), shape.hidden)
    for place in range(min(3, shape.heads)):
        mixed = torch.linalg.qr(torch.randn(max(len(slow), share), max(len(slow), share)))[0][: len(slow), :share]
        weight = (1.0, 0.8, 0.6)[place]
        query += weight * mixed @ (content if place == 0 else places[place - 1])
        key += weight * mixed @ places[place]
    attention.q_proj.weight[head * size : (head + 1) * size] *= 0.1
    attention.k_proj.weight[head * size : (head + 1) * size] *= 0.1
    attention.q_proj.weight[rows] = 2.2 * query
    attention.k_proj.weight[rows] = 2.2 * key


def _copy(network: Network, depth: int, head: int, read: torch.Tensor, written: torch.Tensor, strength: float) -> None:
    """Let a head read a part of what it attends to, [at most head_dim, hidden], and write it elsewhere."""
    shape, attention = network.shape, network.attention(depth)
    begin = head * shape.head_dim
    rows = slice(begin, begin + len(read))
    attention.v_proj.weight[rows] = read
    attention.o_proj.weight[:, rows] = strength * written.T / math.sqrt(shape.hidden)


def _orthonormal(rows: int, columns: int, apart: torch.Tensor) -> torch.Tensor:
    """[rows, columns] with orthonormal rows, each also orthogonal to the rows of `apart`."""
    drawn = torch.cat([apart, torch.randn(columns - len(apart), columns)])
    return torch.linalg.qr(drawn.T)[0].T[len(apart) :][:rows]
