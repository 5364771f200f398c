"""Print a long output whose K and V stay small: `python examples/long_output.py host:50051 [TOKENS]`.

`baton up` and `baton status` show the address. Tokens of the output attend to the first 4 tokens of the prompt and to
the last 512, in whole pages. docs/long-outputs.md says what that costs.
"""

import sys

from baton.client import Client


def main(address: str, tokens: str = "2000") -> None:
    with Client(address) as client:
        window = {"kind": "window", "window": 512, "sinks": 4}
        stream = client.generate("Once upon a time", max_tokens=int(tokens), ignore_eos=True, kv_compression=window)
        for output in stream:
            print(output.text, end="", flush=True)
        print(f"\n{stream.result().usage.completion_tokens} tokens")


if __name__ == "__main__":
    main(*sys.argv[1:])
