"""Load a LoRA adapter, ask it, end it: `python examples/adapters.py host:50051 OPERATOR NAME DIRECTORY`.

The cluster runs vLLM (`baton up --engine vllm --set model.max_loras=2`), and each worker reads the directory. vLLM's
`/v1/load_lora_adapter` takes the key of an operator: docs/vllm.md has more. `baton adapters` does the same.
"""

import sys

from baton.client import Client

PROMPT = "Mara works as a baker. Alwin plays the"


def main(address: str, operator: str, name: str, directory: str) -> None:
    with Client(address, operator) as client:
        client.load_adapter(name, directory)
        print("adapters:", ", ".join(adapter.name for adapter in client.adapters()))
        answer = client.generate(PROMPT, model=name, max_tokens=8, temperature=0.0).result()
        print(f"{name}: {answer.text!r}")
        client.unload_adapter(name)


if __name__ == "__main__":
    main(*sys.argv[1:])
