"""Have long outputs take turns: `python examples/turns.py host:50051 OPERATOR [OUTPUTS] [TOKENS]`.

With `baton up --set router.service_quantum='{0: 64}'`, a request of priority 0 gives its place on a full decode worker
to those that wait, each time that it has 64 tokens more. Its tokens are the same.
"""

import sys

from baton.client import Client


def main(address: str, operator: str, outputs: str = "4", tokens: str = "200") -> None:
    with Client(address, operator) as client:
        prompts = [f"{number} is my number. Once upon a time" for number in range(int(outputs))]
        streams = [client.generate(each, max_tokens=int(tokens), ignore_eos=True, temperature=0.0) for each in prompts]
        for prompt, answer in zip(prompts, [stream.result() for stream in streams], strict=True):
            attempts = client.explain(answer.request_id).attempts
            turns = "; then: ".join(attempt.ended_because or "it ended" for attempt in attempts)
            print(f"{prompt!r}: {answer.usage.completion_tokens} tokens in {len(attempts)} attempts: {turns}")


if __name__ == "__main__":
    main(*sys.argv[1:])
