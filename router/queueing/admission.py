"""Admission control: a request's limits, its objectives, and its tenant's share. Pure."""

# pyright: strict

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from baton.config import RouterConfig
from baton.errors import ContextTooLong, InvalidRequest, ObjectiveUnreachable, Overloaded, RateLimited
from baton.messages import TOKEN_BYTES
from kvstore.keys import unpack_tokens
from router.events import Usage
from router.queueing.fairness import TenantFairness, TokensServed, TokenWeights
from router.queueing.quantile import Quantile
from router.queueing.rate_limits import RateLimits, RetryBudget
from router.queueing.waiting_queue import WaitingQueue
from router.request import Request

_LATE_IN_TIME = 0.9
"""Of requests that leave the queue, so many have their first token no later than computing it and what is expected on
top: they share their workers with others."""
_TURN = 86_400.0  # seconds within which a request that has yielded goes on
_AHEAD = 0.5  # seconds of prompts that are enough for a worker to go on with
REJECTIONS = ("rate_limited", "no_worker", "objective", "objective_while_waiting", "queue_full")
"""Why a request is turned away; the keys of `AdmissionControl.rejected`."""

_LEAST_HINT, _MOST_HINT = 0.25, 30.0  # seconds after which another try is worth it


@dataclass(frozen=True)
class ModelLimits:
    """What the model's own files allow."""

    vocab_size: int
    max_context: int  # tokens, prompt and output


def check_tokens(tokens: bytes, vocab_size: int) -> None:
    """Raises InvalidRequest for a prompt without tokens, or with one that the model does not have."""
    if not tokens:
        raise InvalidRequest("the prompt has no tokens; send at least one")
    if len(tokens) % TOKEN_BYTES:
        raise InvalidRequest(f"the prompt's {len(tokens)} bytes are no whole tokens of {TOKEN_BYTES}")
    highest = max(unpack_tokens(tokens))
    if highest >= vocab_size:
        raise InvalidRequest(f"token id {highest} is not in the model's vocabulary of {vocab_size}")


def settle_length(prompt: int, max_tokens: int | None, max_context: int, pool_tokens: int | None) -> int:
    """How many tokens may be generated: what was asked for, or else all that fit. `pool_tokens` is what the largest
    decode worker's pages hold; none: no worker is known. Raises InvalidRequest or ContextTooLong."""
    if max_tokens is not None and max_tokens < 1:
        raise InvalidRequest(f"max_tokens is {max_tokens}; it must be at least 1")
    length = prompt + (max_tokens or 1)
    if length > max_context:
        raise ContextTooLong(prompt=prompt, output=max_tokens or 1, context=max_context)
    if pool_tokens is not None and length > pool_tokens:
        raise ContextTooLong(
            f"The maximum context length is {pool_tokens} tokens here, for which the largest decode worker has pages. "
            f"However, you requested {max_tokens or 1} output tokens and your prompt contains {prompt} input tokens; "
            "ask for less, or raise decode.kv_cache_bytes",
            prompt=prompt, output=max_tokens or 1, context=pool_tokens,
        )  # fmt: skip
    if max_tokens is not None:
        return max_tokens
    return min(max_context, pool_tokens or max_context) - prompt


class AdmissionControl:
    """The queue, and the accounts that decide about it. Its owner ends the requests that it turns away.

    In this order: the tenant's rate limit (`router.queueing.rate_limits`), a place at once, for a request with an
    objective whether the queue will be served in time, and room in the queue (`router.queueing.waiting_queue`). A
    full queue sheds its least urgent request. A request that a worker has accepted once is never refused."""

    def __init__(self, config: RouterConfig, warmth: Callable[[Request], float] | None = None) -> None:
        """`warmth`: the share of a request's tokens that is cached now; None: the queue's order does without."""
        self._config = config
        self._token_weights = TokenWeights(config.cached_weight, config.output_weight)
        self._rate_limits = RateLimits(config.tenants)
        self.retry_budget = RetryBudget(config.retry_share, config.retries_per_s)
        self._fairness = TenantFairness(self._rate_limits.weight)
        self._late = Quantile(_LATE_IN_TIME, least=0.05)
        self.queue = WaitingQueue(
            self._fairness, config.ageing_ms / 1_000, warmth, patience=config.warm_first_ms / 1_000
        )
        self.served = TokensServed()
        self.rejected: Counter[str] = Counter()  # by reason
        self._here: Counter[tuple[str, int]] = Counter()  # requests that have not ended, by tenant and level

    # --- in ----------------------------------------------------------------------------------------------------------

    def set_objectives(self, request: Request) -> None:
        """What a request does not ask for itself, its class does."""
        promised = self._config.slo_classes.get(request.spec.priority)
        if promised is None or not promised.enforce:
            return
        if request.ttft is None and promised.ttft_ms:
            request.ttft = promised.ttft_ms / 1_000
        if request.tpot is None and promised.tpot_ms:
            request.tpot = promised.tpot_ms / 1_000

    def charge_quota(self, request: Request, output: float, now: float) -> None:
        """A request that may come in as far as its quota goes; it is expected to generate `output` tokens. Raises
        RateLimited."""
        tokens = request.prompt + ceil(output)
        try:
            self._rate_limits.take_quota(request.spec.tenant, tokens, now)
        except RateLimited:
            self.rejected["rate_limited"] += 1
            raise
        request.queueing.quota_tokens = tokens
        self._here[request.spec.tenant, request.level] += 1

    def enqueue(self, request: Request, now: float) -> None:
        """Queue a request, with a limit. One that comes back unaccepted keeps the limit it had."""
        if request.queueing.deadline is None:
            waits_for_its_turn = request.history.ever_accepted and not request.goes_first
            request.queueing.deadline = now + (_TURN if waits_for_its_turn else self._config.queue_timeout_ms / 1_000)
        self.queue.add(request, now)

    def check_wait(self, request: Request, work: int, seconds: float, now: float) -> Overloaded | None:
        """A newcomer could not be placed at once. It has `work` tokens to compute, which takes `seconds` at least.
        Returns an error where it would wait in vain, and sets the limit of its wait where it would not."""
        self.queue.set_work(request, work)
        if request.queueing.deadline is None:
            return None
        if request.ttft is not None:
            limit = request.timeline.received + request.ttft - seconds - self._late.seconds
            request.queueing.deadline = min(request.queueing.deadline, limit)
        wait = self.queue.wait(request, now)
        if (
            now + wait + self.queue.safety_margin(request, wait, request.queueing.deadline - now)
            < request.queueing.deadline
        ):
            request.queueing.min_prefill_seconds = seconds
            request.queueing.predicted_dequeue_at = now + wait if wait else None
            return None
        late = max(0.0, now + wait - request.queueing.deadline)
        self.queue.refuse(request, now)
        if request.ttft is None:
            self.rejected["no_worker"] += 1
            return Overloaded(f"the queue would take {wait:.1f} s, longer than any request may wait", _hint(late))
        self.rejected["objective"] += 1
        message = f"the queue would bring the first token {late:.1f} s after the {request.ttft:.1f} s it may take"
        return ObjectiveUnreachable(message, _hint(late))

    def should_hold(self, request: Request, ahead: float) -> bool:
        """Whether it should wait here rather than at a worker that has prompts to compute for `ahead` seconds: here
        turns are kept. Where all are of one tenant and one level it makes no difference."""
        return ahead > _AHEAD and len(self._here) > 1 and not request.history.ever_accepted

    def shed_excess(self, now: float) -> tuple[Request, Overloaded] | None:
        """Return a request to shed, and its error, because too many wait; none: there is room."""
        count, tokens = len(self.queue), self.queue.tokens
        if count <= self._config.max_queued and (tokens <= self._config.max_queued_tokens or count == 1):
            return None
        if (request := self.queue.last(now)) is None:
            return None
        self.rejected["queue_full"] += 1
        self.queue.refuse(request, now)
        message = f"{count - 1} requests with {tokens - request.known} tokens wait for a worker already"
        return request, Overloaded(message, _hint(self.queue.wait(request, now)))

    def unreachable(self, request: Request, why: str, retry_after: float | None, now: float) -> ObjectiveUnreachable:
        """Placement says that no worker meets the request's objectives."""
        self.queue.learn(request, now)
        self.rejected["objective"] += 1
        return ObjectiveUnreachable(why, _hint(self.queue.wait(request, now) if retry_after is None else retry_after))

    def queue_timeout(self, request: Request, now: float) -> Overloaded:
        """It has waited for as long as it could."""
        self.queue.learn(request, now)
        waited = now - request.submitted
        self.queue.refuse(request, now)
        hint = _hint(waited)
        if (
            request.ttft is not None
            and not request.history.ever_accepted
            and waited < self._config.queue_timeout_ms / 1_000
        ):
            self.rejected["objective_while_waiting"] += 1
            message = f"after {waited:.1f} s in the queue the first token can't come within {request.ttft:.1f} s"
            return ObjectiveUnreachable(message, hint)
        self.rejected["no_worker"] += 1
        return Overloaded(f"no worker took the request within {self._config.queue_timeout_ms} ms", hint)

    # --- out ---------------------------------------------------------------------------------------------------------

    def lacks_retry_budget(self, request: Request, now: float) -> bool:
        """It would repeat a failed attempt, and too many have been repeated lately."""
        return request.history.is_retry and not self.retry_budget.allow(now)

    def placed(self, request: Request, cached: int, now: float) -> None:
        """It begins an attempt, with so many of its prompt's tokens cached. A tenant pays for the first only."""
        self.queue.remove(request, now, placed=True)
        self.queue.learn(request, now)
        if request.history.is_retry:
            self.retry_budget.take_retry(now)
            request.history.is_retry = False
        elif request.history.attempts == 1:
            self.retry_budget.first(now)
        if not request.queueing.charged:
            request.queueing.charged = self._token_weights.prompt(request.prompt, cached)
            self._charge(request.spec.tenant, request.queueing.charged)

    def began(self, request: Request, now: float) -> None:
        if (
            request.queueing.min_prefill_seconds is not None
            and request.timeline.placed is not None
            and request.history.attempts == 1
        ):
            self._late.learn(now - request.timeline.placed - request.queueing.min_prefill_seconds)

    def generated(self, request: Request, tokens: int) -> None:
        self._charge(request.spec.tenant, self._token_weights.output * tokens)

    def request_ended(self, request: Request, usage: Usage, now: float) -> None:
        """Estimates become what it was."""
        self.queue.remove(request, now)
        tenant, begun = request.spec.tenant, request.history.ever_accepted
        if request.queueing.charged:
            cost = self._token_weights.prompt(usage.prompt, usage.cached) if begun else 0.0
            self._charge(tenant, cost - request.queueing.charged)
        if request.queueing.quota_tokens is not None:
            self._here -= Counter({(tenant, request.level): 1})
            used = usage.prompt + usage.completion if begun else None
            self._rate_limits.settle(tenant, request.queueing.quota_tokens, used, now)
        if begun:
            self.served.add_tokens(tenant, "computed", usage.prompt - usage.cached)
            self.served.add_tokens(tenant, "cached", usage.cached)
            self.served.add_tokens(tenant, "generated", usage.completion)

    def _charge(self, tenant: str, cost: float) -> None:
        self._fairness.charge(tenant, cost)
        self.queue.served(cost)

    def validate(self) -> None:
        self.queue.validate()
        self._fairness.validate()


def _hint(seconds: float) -> int:
    """Milliseconds until another try is worth it."""
    return int(1_000 * min(_MOST_HINT, max(_LEAST_HINT, seconds)))
