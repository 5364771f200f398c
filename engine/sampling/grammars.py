"""Grammars that outputs follow: compiled by llguidance on a thread, kept, and followed token by token.

Owns the matchers. The tokenizer is read when the first grammar comes. All that llguidance raises or reports ends in
`TokenMask.failure`: one request's grammar never ends a step.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from msgspec.structs import replace

from baton import grammars
from baton.errors import BatonError
from baton.messages import Grammar
from baton.tokenizer_files import tokenizer_folder
from engine.step.batch import Bits, ComputedMask

log = logging.getLogger(__name__)

_MOST_COMPILED = 64  # compiled grammars
_AT_ONCE = 64  # tokens of an output that are followed at once; a longer one is followed by the thread
_SLOW = 0.005  # seconds for one mask
_FEW = 64  # tokens: the beginnings of a text that must come are fewer


class GrammarMask:
    """One sequence's mask after one more step. A `TokenMask`."""

    def __init__(self, owner: FollowedGrammar, new: Sequence[int]) -> None:
        """`new`: the tokens since the last mask."""
        self._owner = owner
        self._new = new
        self._begun = False
        self.ready = False
        self.allowed: Bits | None = None
        self.may_end = False
        self.forced: Sequence[int] = ()
        self.failure = ""
        self._proposals: Sequence[int] = ()
        self._ahead: Sequence[ComputedMask] = ()

    @property
    def slow(self) -> bool:
        return self._owner.slow

    @property
    def ends(self) -> Collection[int]:
        return self._owner.ends

    def begin(self) -> bool:
        if self._begun:
            return False
        self._begun = True
        return True

    def compute(self) -> None:
        began = time.perf_counter()
        try:
            self.allowed, self.may_end, self.forced = self._owner.advance(self._new)
            self._owner.look_ahead(self._proposals, self._ahead)
        except BatonError as error:
            self.failure = str(error)
        except Exception as error:  # what an extension raises is not known; the request hears of it
            log.exception("a token mask failed")
            self.failure = f"{type(error).__name__}: {error}"
        self._owner.slow = time.perf_counter() - began > _SLOW * (1 + len(self._ahead))
        for mask in self._ahead:
            mask.ready = True
        self.ready = True

    def ahead(self, proposals: Sequence[int]) -> Sequence[ComputedMask]:
        if self._begun:
            return ()
        self._proposals = proposals
        self._ahead = [ComputedMask(None, ends=tuple(self.ends), ready=False) for _ in proposals]
        return self._ahead


class FollowedGrammar:
    """One sequence's grammar, an `OutputGrammar`. Only the mask that is being computed touches the matcher."""

    def __init__(self, grammar: Grammar, ends: Collection[int], vocab_size: int, known: int) -> None:
        """`known`: tokens of prompt and output that the matcher will have followed when it is there."""
        self._grammar = grammar
        self._vocab_size = vocab_size
        self._known = known
        self._matcher: LLMatcher | None = None
        self._failure: BatonError | None = None
        self._mask: GrammarMask | None = None
        self._ends = np.array(sorted(one for one in ends if one < vocab_size), np.int64)
        self.ends = ends
        self.slow = False

    @property
    def ready(self) -> bool:
        return self._matcher is not None or self._failure is not None

    def mask(self, tokens: Sequence[int]) -> GrammarMask:
        if self._mask is None or len(tokens) > self._known:
            self._mask = GrammarMask(self, tokens[self._known :])
            self._known = len(tokens)
        return self._mask

    def begin(self, matcher: LLMatcher, output: Sequence[int]) -> None:
        """Follow the output of earlier attempts. The grammar is ready then."""
        try:
            self._follow(matcher, output)
            self._matcher = matcher
        except BatonError as error:
            self._failure = error

    def fail(self, error: BatonError) -> None:
        self._failure = error

    def advance(self, new: Sequence[int]) -> tuple[Bits, bool, Sequence[int]]:
        """Follow new tokens. Returns the tokens that may come then, as bits, whether the output may end, and what must
        come. Raises InvalidGrammar."""
        if self._failure is not None:
            raise self._failure
        matcher = self._matcher
        assert matcher is not None, "its sequence is in no step before it is ready"
        self._follow(matcher, new)
        return self._next(matcher)

    def look_ahead(self, proposals: Sequence[int], masks: Sequence[ComputedMask]) -> None:
        """Compute the masks after each of these tokens, as far as they are allowed. The matcher stays where it is."""
        if not proposals or self._matcher is None:
            return
        matcher = self._matcher.deep_copy()
        for token, mask in zip(proposals, masks, strict=True):
            if token in self.ends or not matcher.try_consume_tokens([token]):
                return
            try:
                mask.allowed, mask.may_end, mask.forced = self._next(matcher)
            except BatonError:  # of a text that may never come
                return

    def _next(self, matcher: LLMatcher) -> tuple[Bits, bool, tuple[int, ...]]:
        """What may come where a matcher is, as `advance` says it."""
        grammar = self._grammar
        allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        grammars.raise_error_of(matcher, grammar)
        may_end = bool(allowed[grammar.eos])
        allowed = allowed[: self._vocab_size]
        # An end of sequence or a stop token ends the output whatever text it stands for.
        allowed[self._ends] = 0
        if may_end and not (grammar.ignore_eos and allowed.any()):
            allowed[self._ends] = 1
        forced = () if may_end or np.count_nonzero(allowed) > _FEW else matcher.compute_ff_tokens()
        others = (number for number, token in enumerate(forced) if token >= self._vocab_size or token in self.ends)
        return allowed.view(np.bool_), may_end, tuple(forced[: next(others, None)])

    def _follow(self, matcher: LLMatcher, tokens: Sequence[int]) -> None:
        if tokens and not matcher.consume_tokens(list(tokens)):
            grammars.raise_error_of(matcher, self._grammar)
            raise grammars.left(self._grammar)


class GrammarCompiler:
    """The grammars of one decode worker, `OutputGrammars`. One thread calls it; another one compiles."""

    def __init__(self, folder: Path, vocab_size: int, wake: Callable[[], None]) -> None:
        """`folder`: the checkpoint's. `wake` is called on the other thread when a grammar has become ready."""
        self._folder = folder
        self._vocab_size = vocab_size
        self._wake = wake
        self._thread = ThreadPoolExecutor(1, "grammar")
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    def follow(self, grammar: Grammar, ends: Collection[int], tokens: Sequence[int], prompt: int) -> FollowedGrammar:
        followed = FollowedGrammar(grammar, ends, self._vocab_size, len(tokens))
        output = list(tokens[prompt:])
        compiled = self._compiled.get(_key(grammar))
        if compiled is not None and len(output) <= _AT_ONCE:
            followed.begin(compiled.deep_copy(), output)
        else:
            self._thread.submit(self._begin, followed, grammar, output)
        return followed

    def close(self) -> None:
        """End the thread when it has done what it does now."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _begin(self, followed: FollowedGrammar, grammar: Grammar, output: Sequence[int]) -> None:
        """On the thread: compile and follow."""
        try:
            followed.begin(self._compile(grammar).deep_copy(), output)
        except BatonError as error:
            followed.fail(error)
        except Exception as error:  # what an extension raises is not known; the request hears of it
            log.exception("a grammar could not be compiled")
            followed.fail(BatonError(f"{type(error).__name__}: {error}"))
        self._wake()

    def _compile(self, grammar: Grammar) -> LLMatcher:
        key = _key(grammar)
        if (known := self._compiled.get(key)) is not None:
            self._compiled.move_to_end(key)
            return known
        if self._tokenizer is None:
            began = time.monotonic()
            file = tokenizer_folder(self._folder) / "tokenizer.json"
            self._tokenizer = grammars.load_tokenizer(file, self._vocab_size, grammar.eos)
            log.info("read the tokenizer for grammars in %.2f s", time.monotonic() - began)
        matcher = self._compiled[key] = grammars.matcher_of(self._tokenizer, grammar)
        while len(self._compiled) > _MOST_COMPILED:
            self._compiled.popitem(last=False)
        return matcher


def _key(grammar: Grammar) -> Grammar:
    return replace(grammar, ignore_eos=False)
