"""Print a long output whose K and V stay small: `python examples/long_output.py host:50051 [TOKENS] [FILE]`.

`baton up` and `baton status` show the address. Tokens of the output attend to the first 4 tokens of the prompt and to
the last 512, in whole pages. If the prompt comes from a file, they also attend to 1,024 tokens of it, the pages to
which its end attends most. docs/long-outputs.md says what that costs.
"""

import sys
from pathlib import Path

from baton.client import Client


def main(address: str, tokens: str = "2000", file: str = "") -> None:
    with Client(address) as client:
        prompt, order = "Once upon a time", {"kind": "window", "window": 512, "sinks": 4}
        if file:
            prompt, order = Path(file).read_text(), order | {"kind": "snapkv", "keep": 1_024}
        stream = client.generate(prompt, max_tokens=int(tokens), ignore_eos=True, kv_compression=order)
        for output in stream:
            print(output.text, end="", flush=True)
        print(f"\n{stream.result().usage.completion_tokens} tokens")


if __name__ == "__main__":
    main(*sys.argv[1:])
