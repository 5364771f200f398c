"""Grammars that an output must match, compiled by llguidance.

A router checks with this module what decode workers later compile with it, so both have the same limits. Nothing here
holds a state: `engine.sampling.grammars` keeps the matchers, `router.frontend.grammar_process` throws them
away.
"""

import json
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from baton.errors import InvalidGrammar, ModelError, shown
from baton.messages import Grammar

LIMITS = LLParserLimits(max_lexer_states=25_000, verbose_errors=False)
"""llguidance's own, except for the lexer's memory, which is 1 to 2 KB for each state: 50 MB and not 500. They bound a
compilation to about a second, and one mask to about 0.2 s."""
_TRIED = 12  # tokens of a trial: enough to be inside of an object, where a grammar's rows are widest


def load_tokenizer(file: Path, vocab_size: int, eos: int) -> LLTokenizer:
    """Read a checkpoint's tokenizer.json. Raises ModelError. It takes about a second for 128,000 tokens."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} can't be read, so no grammar can be matched: {error}") from None
    try:
        try:
            return LLTokenizer(text, n_vocab=vocab_size, eos_token=eos)
        except ValueError as error:
            if "vocab size too small" not in str(error):
                raise
            return LLTokenizer(text, eos_token=eos)  # it has more tokens than the model
    except ValueError as error:
        raise ModelError(f"{file} can't be used for grammars: {shown(str(error), 300)}") from None


def matcher_of(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """Compile a grammar. Raises InvalidGrammar with llguidance's reason."""
    try:
        matcher = LLMatcher(tokenizer, _source(grammar), log_level=0, limits=LIMITS)
    except ValueError as error:
        raise refusal(grammar, str(error)) from None
    raise_error_of(matcher, grammar)
    return matcher


def raise_error_of(matcher: LLMatcher, grammar: Grammar) -> None:
    """Raise InvalidGrammar if a matcher has failed, from which it never recovers."""
    if matcher.is_error():
        raise refusal(grammar, matcher.get_error())


def left(grammar: Grammar) -> InvalidGrammar:
    """The error for an output that is not the beginning of anything that the grammar allows."""
    return refusal(grammar, "the output so far does not match it")


def try_out(tokenizer: LLTokenizer, grammar: Grammar) -> None:
    """Compile a grammar, and go some tokens along it. Raises InvalidGrammar. A grammar can compile and still be too
    ambiguous to follow."""
    matcher = matcher_of(tokenizer, grammar)
    for _ in range(_TRIED):
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little"))
        raise_error_of(matcher, grammar)
        going_on = allowed[allowed != tokenizer.eos_token]
        if matcher.is_stopped() or not len(going_on):
            break
        matcher.consume_token(int(going_on[0]))
        raise_error_of(matcher, grammar)


def lark_of(text: str) -> str:
    """Translate a grammar in GBNF to Lark; one in Lark stays as it is. Raises InvalidGrammar."""
    try:
        return any_to_lark(text)
    except Exception as error:  # noqa: BLE001 whatever its parser raises, it is the text's fault
        raise InvalidGrammar(f"the grammar is no GBNF that can be read: {shown(str(error), 300)}") from None


def _source(grammar: Grammar) -> str:
    match grammar.kind:
        case "json_schema":
            source = LLMatcher.grammar_from_json_schema(grammar.text)
        case "regex":
            source = LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            source = json.dumps({"grammars": [{"lark_grammar": grammar.text}]})
    if not grammar.frame:
        return source
    (output,) = json.loads(source)["grammars"]
    return json.dumps({"grammars": [{"lark_grammar": grammar.frame}, output | {"name": "output"}]})


_NAMES = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "grammar"}


def refusal(grammar: Grammar, reason: str) -> InvalidGrammar:
    """Return the error for a grammar: llguidance's first lines, without the parser's state that follows them."""
    reason = reason.split("\n<state>")[0].split("\n<non-verbose/>")[0].strip()
    return InvalidGrammar(f"the {_NAMES[grammar.kind]} can't be used: {shown(reason, 500)}")
