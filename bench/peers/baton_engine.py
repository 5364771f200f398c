"""Baton's own engine, bare, as one of the peers.

`python -m bench.peers.baton_engine MODEL DTYPE THREADS STEP_TOKENS`
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench import bare
from bench.peers import adapter
from engine.engine import Engine

_PAGES, _PAGE_SIZE = 1_024, 16  # more than any case needs


def load() -> adapter.Generate:
    model, dtype, threads, max_num_batched_tokens = sys.argv[1:]
    engine = Engine.load(Path(model), dtype, "cpu", _PAGES, _PAGE_SIZE, head=True, threads=int(threads))

    def generate(prompts: adapter.Tokens, count: int) -> adapter.Tokens:
        return bare.generate_batch(engine, prompts, count, int(max_num_batched_tokens))

    return generate


if __name__ == "__main__":
    adapter.serve(load)
