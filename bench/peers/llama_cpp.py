"""llama.cpp through llama-cpp-python, in its own environment: `python -m bench.peers.llama_cpp FILE THREADS`.

FILE is GGUF. A step has a token of every sequence, or prompts of 2,048 tokens in all. The cache is in float16, its
default, and it quantizes inputs to 8 bits where weights are codes.
"""

from __future__ import annotations

import sys
from importlib import import_module

from bench.peers import adapter

_STEP_TOKENS, _SEQUENCES, _CONTEXT = 2_048, 8, 16_384


def load() -> adapter.Generate:
    numpy, llama = map(import_module, ("numpy", "llama_cpp"))
    file, threads = sys.argv[1:]
    silent = llama.llama_log_callback(lambda *_: None)  # thousands of lines
    llama.llama_log_set(silent, None)
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(file.encode(), llama.llama_model_default_params())
    settings = llama.llama_context_default_params()
    settings.n_ctx, settings.n_seq_max, settings.n_batch = _CONTEXT, _SEQUENCES, _STEP_TOKENS
    settings.n_threads = settings.n_threads_batch = int(threads)
    context = llama.llama_init_from_model(model, settings)
    vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    batch = llama.llama_batch_init(_STEP_TOKENS, 0, 1)

    def step(chunks: adapter.Tokens, before: int) -> list[int]:
        """Compute as many tokens of each sequence, and return the likeliest next ones."""
        last: list[int] = []
        batch.n_tokens = 0
        for sequence, tokens in enumerate(chunks):
            for place, token in enumerate(tokens):
                at = batch.n_tokens
                batch.token[at], batch.pos[at], batch.logits[at] = token, before + place, place == len(tokens) - 1
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
                batch.n_tokens += 1
            last.append(batch.n_tokens - 1)
        if code := llama.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode returned {code}")
        rows = (numpy.ctypeslib.as_array(llama.llama_get_logits_ith(context, at), (vocabulary,)) for at in last)
        return [int(row.argmax()) for row in rows]

    def generate(prompts: adapter.Tokens, count: int) -> adapter.Tokens:
        assert silent  # llama.cpp calls it, so it lives as long as this function
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        steps = [step(prompts, 0)]
        while len(steps) < count:
            steps.append(step([[token] for token in steps[-1]], len(prompts[0]) + len(steps) - 1))
        return [list(tokens) for tokens in zip(*steps, strict=True)]

    return generate


if __name__ == "__main__":
    adapter.serve(load)
