"""From a router's order to a sequence, or to the error that says what is wrong with it."""

# pyright: strict

from collections.abc import Collection
from dataclasses import dataclass

from baton.errors import InvalidGrammar, MalformedMessage, ModelMismatch, UnsupportedField
from baton.messages import LOWEST_CLASS, AttemptName, Decode
from decode_worker.sequence import Sequence
from decode_worker.sliding_window import SlidingWindow
from engine.sampling.logits_rules import LogitsEditor
from engine.sampling.token_masks import OutputGrammars
from kvstore.keys import unpack_tokens
from kvstore.kv_window import KvWindow
from kvstore.window_groups import WindowGroups


@dataclass(frozen=True)
class RequestReader:
    """What this worker's model can do, as far as orders depend on it."""

    page_size: int
    window: SlidingWindow | None
    groups: WindowGroups
    vocab_size: int | None  # where known: a token id of an order must be lower, because it would fail the whole step
    adapters: Collection[str]  # digests of those that orders may name, as they are now
    grammars: OutputGrammars | None
    ageing_ms: int
    no_kv_windows: str  # see `engine.runner.Runner`
    no_page_weights: str  # likewise

    def sequence(self, order: Decode, router: str, arrival: int, now: float) -> Sequence:
        """Return the sequence that is ordered, without pages. Raises MalformedMessage, ModelMismatch for an adapter
        that is not loaded, InvalidGrammar where no grammar is followed, and UnsupportedField where a request can't have
        a window."""
        tokens = unpack_tokens(order.tokens, self.vocab_size)
        if not order.prompt <= len(tokens) < order.prompt + order.max_tokens:
            raise MalformedMessage(
                f"{len(tokens)} tokens with a prompt of {order.prompt} and {order.max_tokens} to generate"
            )
        if order.adapter and order.adapter not in self.adapters:
            raise ModelMismatch("this worker has not loaded that adapter")
        rules = order.sampling.rules
        if rules is not None and (message := rules.wrong(self.vocab_size)):
            raise MalformedMessage(message)
        if order.sampling.grammar is not None and self.grammars is None:
            raise InvalidGrammar("this worker follows no grammars")
        kind = None if order.kv_compression is None else order.kv_compression.kind
        if kind is not None and self.no_kv_windows:
            raise UnsupportedField(f"kv_compression is not served: {self.no_kv_windows}; leave it out")
        if kind in ("snapkv", "h2o") and self.no_page_weights:
            raise UnsupportedField(f"kv_compression of the kind {kind} is not served: {self.no_page_weights}")
        # A tokenizer may have more tokens than the model, which never draws them.
        stops = [each for each in order.stop_token_ids if self.vocab_size is None or 0 <= each < self.vocab_size]
        priority = max(-LOWEST_CLASS, min(order.priority, LOWEST_CLASS))
        sequence = Sequence(
            name=AttemptName(order.request, order.attempt),
            owner=router,
            root=order.root,
            adapter=order.adapter,
            tokens=tokens,
            prompt=order.prompt,
            max_tokens=order.max_tokens,
            sampling=order.sampling,
            stop_token_ids=frozenset(stops),
            priority_time=now + priority * self.ageing_ms / 1_000,
            priority=priority,
            arrival=arrival,
            page_size=self.page_size,
            window=self.window,
            groups=self.groups,
            kv_window=KvWindow.of(order.kv_compression, order.prompt, self.page_size),
            deadline=None if order.deadline_ms is None else now + order.deadline_ms / 1_000,
            prefilled_remotely=order.prefilled_remotely,
            fetch_goal=order.fetch,
            sources=order.sources,
            progressed_at=now,
            first_new=len(tokens),
            logits_editor=None if rules is None else LogitsEditor(rules, tokens[: order.prompt], stops),
        )
        sequence.extend_keys()
        return sequence

    def begin_grammar(self, sequence: Sequence) -> None:
        """Have the grammar of an admitted sequence compiled, if it has one."""
        grammar = sequence.sampling.grammar
        if grammar is not None and self.grammars is not None:
            sequence.grammar = self.grammars.follow(grammar, sequence.stop_token_ids, sequence.tokens, sequence.prompt)
