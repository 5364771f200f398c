"""Ask a cascade and its models the same: `python examples/cascade.py http://host:8000 NAME...`.

Behind a cascade's name a small model answers, or a large one where the small one is unsure: docs/deploy.md has more.
"""

import sys

from openai import OpenAI

PROMPT = "Mara works as a baker. Alwin plays the"


def main(url: str, *names: str) -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        for name in names:
            answer = client.completions.create(model=name, prompt=PROMPT, max_tokens=8, temperature=0.0)
            print(f"{name}: {answer.choices[0].text!r}   (baton explain {answer.id})")


if __name__ == "__main__":
    main(*sys.argv[1:])
