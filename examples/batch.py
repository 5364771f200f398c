"""Have a file of requests served in a cluster's gaps, with OpenAI's client: `python examples/batch.py http://host:8000/v1`.

`baton run-batch -i requests.jsonl -o results.jsonl` does the same without an upload.
"""

import json
import sys
import time

from openai import OpenAI

QUESTIONS = {"capital": "What is the capital of France?", "colour": "Name a colour.", "sum": "What is 2 + 3?"}


def main(url: str) -> None:
    client = OpenAI(base_url=url)  # the API key comes from $OPENAI_API_KEY; without keys, any text will do
    model = client.models.list().data[0].id
    lines = [
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": 16},
        }
        for name, question in QUESTIONS.items()
    ]
    requests = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("requests.jsonl", requests), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    while batch.status in ("validating", "in_progress"):
        time.sleep(0.5)
        batch = client.batches.retrieve(batch.id)
    print(batch.status, batch.request_counts)
    for results in filter(None, (batch.output_file_id, batch.error_file_id)):
        for line in client.files.content(results).text.splitlines():
            result = json.loads(line)
            print(result["custom_id"], result["error"] or result["response"]["body"])


if __name__ == "__main__":
    main(sys.argv[1])
