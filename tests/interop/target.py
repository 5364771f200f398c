"""The cluster that the suites speak to, and the checkpoint it serves."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deploy.local import LocalCluster
from tests.support import checkpoints, workload

MODEL = "baton-interop"
ALIASES = ("gpt-6-astra", "gpt-3.5-turbo-instruct", "model")
"""Names in openai-python's own tests."""
CONTEXT = 512
TEMPLATE = """\
{%- if tools %}<|im_start|>system
Tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content if message.content else '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A template in the shape of Qwen's: roles, tools, and calls as Hermes writes them."""


@dataclass(frozen=True)
class Target:
    """What a suite is told of the cluster."""

    address: str  # host:port of the HTTP APIs
    folder: Path  # of the checkpoint
    model: str = MODEL

    @property
    def url(self) -> str:
        return f"http://{self.address}"


def make_checkpoint(folder: Path) -> Path:
    """Write a random checkpoint with a tokenizer and a chat template."""
    checkpoints.make("llama", folder, max_position_embeddings=CONTEXT)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"chat_template": TEMPLATE, "model_max_length": CONTEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@contextmanager
def cluster(checkpoint: Path, folder: Path, *, prefill: int = 1, decode: int = 1, **more: object) -> Iterator[Target]:
    """Run a cluster of real processes. `more`: its settings beside those of all tests."""
    names = [MODEL, *ALIASES]
    settings = workload.settings(checkpoint, prefill, decode, **{"model.served_model_name": names}, **more)
    with LocalCluster(settings, folder) as running:
        yield Target(running.api_of("router"), checkpoint)
