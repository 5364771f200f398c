"""Write a trained network as a Hugging Face checkpoint: bf16 safetensors, tokenizer, chat template, settings."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from tools.demo_model.conversation import BEGIN, END, PAD, TEMPLATE
from tools.demo_model.network import Network


def write(folder: Path, network: Network, tokenizer: Tokenizer) -> Path:
    """Write the checkpoint into `folder`, creating it if needed, and return `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in network.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors lets nothing but the owner read
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "config.json", network.shape.config())
    _write_json(folder / "generation_config.json", {"eos_token_id": [2, 0], "pad_token_id": 0, "do_sample": False})
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": PAD,
            "additional_special_tokens": [BEGIN, END],
            "model_max_length": network.shape.positions,
            "clean_up_tokenization_spaces": False,
            "chat_template": TEMPLATE.read_text(),
        },
    )
    return folder


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
