"""Print the seconds that speculation saved a request: `python examples/speculation.py host:50051 OPERATOR`.

`baton up` and `baton status` show both addresses. `baton explain ID` prints the same figures of any recent request.
"""

import sys

from baton.client import Client

FACTS = "Mara works as a baker. Alwin plays the cello. Mara lives in Ashford. "


def main(address: str, operator: str) -> None:
    with Client(address, operator) as client:
        answer = client.generate(FACTS * 4, max_tokens=64, temperature=0.0).result()
        print(answer.text)
        for attempt in client.explain(answer.request_id).attempts:
            proposals = f"{attempt.proposals_accepted} of {attempt.proposals_verified} proposals accepted"
            print(f"attempt {attempt.number}: {proposals}, {attempt.speculation_saved_ms:.1f} ms saved")


if __name__ == "__main__":
    main(*sys.argv[1:])
