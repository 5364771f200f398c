"""A process that compiles clients' grammars, to find out whether decode workers can.

`python -m router.frontend.grammars.grammar_process TOKENIZER VOCABULARY EOS` is a helper process (`helper_process`). It
works on a thread with a smaller stack than those of decode workers, so a grammar that is nested too deeply ends this
process and no worker.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from llguidance import LLTokenizer
from msgspec.structs import replace

from baton import grammars
from baton.errors import BatonError, InvalidGrammar
from baton.messages import MAX_GRAMMAR, Grammar
from router.frontend.grammars.schema_ends import check_ends
from router.frontend.helpers.helper_main import serve

_MEMORY = 2 << 30  # bytes of address space: a tokenizer of 256,000 tokens takes a quarter of it
_STACK = 1 << 20


@lru_cache
def _tokenizer(file: str, vocab_size: int, eos: int) -> LLTokenizer:
    return grammars.load_tokenizer(Path(file), vocab_size, eos)


def _answer(order: dict[str, Any], file: str, vocab_size: int, eos: int) -> dict[str, Any]:
    grammar = msgspec.convert(order, Grammar)
    try:
        if grammar.kind == "lark":
            grammar = replace(grammar, text=grammars.lark_of(grammar.text))
            if len(grammar.text) > MAX_GRAMMAR:
                raise InvalidGrammar(
                    f"the grammar has {len(grammar.text)} characters in Lark; at most {MAX_GRAMMAR} may be"
                )
        grammars.try_out(_tokenizer(file, vocab_size, eos), grammar)
        if grammar.kind == "json_schema":
            check_ends(json.loads(grammar.text))
        return {"text": grammar.text}
    except BatonError as error:
        return {"reason": error.reason, "error": str(error)}
    except RecursionError:
        return {"reason": "invalid_grammar", "error": "it is nested too deeply"}
    except MemoryError:
        return {"reason": "invalid_grammar", "error": "it takes too much memory"}


def main() -> None:
    """Answer until stdin ends."""
    file, vocab_size, eos = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    threading.stack_size(_STACK)
    with ThreadPoolExecutor(1) as thread:
        with contextlib.suppress(BatonError):  # each order then says so
            thread.submit(_tokenizer, file, vocab_size, eos).result()
        serve(lambda order: thread.submit(_answer, order, file, vocab_size, eos).result(), _MEMORY)


if __name__ == "__main__":
    main()
