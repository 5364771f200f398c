"""Ask each model of a cluster the same: `python examples/several_models.py http://host:8000`.

`baton up --model A --model B` serves several models behind the same routers, and says the address.
"""

import sys

from openai import OpenAI

PROMPT = "Mara works as a baker. Alwin plays the"


def main(url: str) -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        for model in client.models.list():
            answer = client.completions.create(model=model.id, prompt=PROMPT, max_tokens=8, temperature=0.0)
            print(f"{model.id}: {answer.choices[0].text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
