"""OpenVINO GenAI with continuous batching, in its own environment.

`python -m bench.peers.openvino_genai MODEL THREADS STEP_TOKENS`. MODEL is the checkpoint as `bench.engine.speed`
converts it, in bfloat16. Arithmetic and cache are in bfloat16, too, or in float32 where the CPU has nothing else.
"""

from __future__ import annotations

import sys
from importlib import import_module

from bench.peers import adapter

_CACHE_GIB = 2


def load() -> adapter.Generate:
    # By name, and only here: they are in this peer's environment, and in no other.
    numpy, openvino, openvino_genai = map(import_module, ("numpy", "openvino", "openvino_genai"))
    model, threads, max_num_batched_tokens = sys.argv[1:]
    precision = "bf16" if "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES") else "f32"
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = int(max_num_batched_tokens)
    scheduler.cache_size = _CACHE_GIB
    scheduler.enable_prefix_caching = True
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        model,
        scheduler,
        "CPU",
        {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "INFERENCE_NUM_THREADS": int(threads),
        },
    )

    def generate(prompts: adapter.Tokens, count: int) -> adapter.Tokens:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = count
        config.do_sample = False
        config.ignore_eos = True
        inputs = [openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt in prompts]
        ended = pipeline.generate(inputs, [config] * len(prompts))
        return [list(one.m_generation_ids[0]) for one in ended]

    return generate


if __name__ == "__main__":
    adapter.serve(load)
