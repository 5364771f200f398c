"""Count the properties of the tests and the mistakes that they must find: `python -m tests.proofs [FOLDER...]`.

A property is a test that hypothesis makes the inputs of, or a state machine. A mistake is planted in the code by a test
that then has to find it. Its name says so: `test_it_notices`, `a_mistake_would_be_found`.
"""

import re
import sys

import pytest

_MISTAKE = re.compile(r"test_(it|the_machine)_notices|mistakes?_\w*(found|noticed)|(wrong|not_taken)\w*_is_noticed")


class _Counter:
    properties = mistakes = 0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            test = getattr(item, "obj", None)
            self.properties += getattr(test, "is_hypothesis_test", False) or item.name == "runTest"
            self.mistakes += bool(_MISTAKE.search(item.name))


def main() -> int:
    """Return the exit status of pytest."""
    counter = _Counter()
    options = ["--collect-only", "-qqq", "--hypothesis-profile=thorough", "-p", "no:cacheprovider", *sys.argv[1:]]
    status = pytest.main(options, plugins=[counter])
    print(f"{counter.properties} properties, {counter.mistakes} planted mistakes")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
