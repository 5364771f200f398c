"""Print how two prompts that begin alike were computed: `python examples/shared_prefixes.py host:50051 OPERATOR`.

The second prompt leaves the first one in the middle of a page. What they share is not computed again, and a long prompt
may be computed by several prefill workers. A file that is named besides has another text. docs/observe.md has more.
"""

import sys
from pathlib import Path

from baton.client import Client

FACTS = "Mara works as a baker. Alwin plays the cello. Mara lives in Ashford. "


def main(address: str, operator: str, file: str = "") -> None:
    text = Path(file).read_text() if file else FACTS * 6
    with Client(address, operator) as client:
        for prompt in (f"{text}Mara works", f"{text[:-25]}Berlin. Mara works"):
            answer = client.generate(prompt, max_tokens=8, temperature=0.0).result()
            print(f"{answer.usage.prompt_tokens} tokens, {answer.usage.cached_tokens} of them cached: {answer.text!r}")
            for attempt in client.explain(answer.request_id).attempts:
                print(f"  {attempt.why}")


if __name__ == "__main__":
    main(*sys.argv[1:])
