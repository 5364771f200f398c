"""How much a tenant may ask for in a minute: token buckets, of requests and of tokens. And how much may be retried.

A bucket fills at a steady rate up to its capacity, the burst, and what is asked for is taken out. More than its
capacity is let through by a full bucket, which then owes: so there is no request that can never pass.

How many tokens a request takes is known when it has ended. What was taken at entry is an estimate; the difference is
put back in the end, or taken. Pure.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, inf

from baton.config import TenantConfig
from baton.errors import RateLimited

ANYBODY = "*"  # the tenant in the configuration whose settings hold for those that are not named there


class TokenBucket:
    """Fills by `rate` a second up to `capacity`; full at first. It may hold less than nothing: then it owes."""

    def __init__(self, rate: float, capacity: float) -> None:
        self._rate = rate
        self._capacity = capacity
        self._level = capacity
        self._at = -inf

    def level(self, now: float) -> float:
        self._level = min(self._capacity, self._level + self._rate * max(0.0, now - self._at))
        self._at = max(self._at, now)
        return self._level

    def wait(self, amount: float, now: float) -> float:
        """Seconds until `amount` may be taken; 0: now."""
        missing = min(amount, self._capacity) - self.level(now)
        return max(0.0, missing / self._rate)

    def take(self, amount: float, now: float) -> None:
        self._level = self.level(now) - amount

    def put(self, amount: float, now: float) -> None:
        """Fill by so much at once; less than nothing takes it."""
        self._level = min(self._capacity, self.level(now) + amount)


class RateLimits:
    """The buckets of every tenant that has a quota."""

    def __init__(self, tenants: Mapping[str, TenantConfig]) -> None:
        self._tenants = tenants
        self._buckets: dict[tuple[str, str], TokenBucket] = {}

    def weight(self, tenant: str) -> float:
        """Its share beside that of others."""
        return self._of(tenant).weight

    def take_quota(self, tenant: str, tokens: int, now: float) -> None:
        """Take a request of about so many tokens out of its tenant's quota. Raises RateLimited while the quota has not
        got them, and then takes nothing."""
        wants = (("requests", 1), ("tokens", tokens))
        buckets = [(bucket, amount, kind) for kind, amount in wants if (bucket := self._bucket(tenant, kind))]
        wait, kind = max(((bucket.wait(amount, now), kind) for bucket, amount, kind in buckets), default=(0.0, ""))
        if wait > 0:
            raise RateLimited(f"the tenant's {kind} of this minute are used up", ceil(wait * 1_000))
        for bucket, amount, _ in buckets:
            bucket.take(amount, now)

    def settle(self, tenant: str, charge: int, used: int | None, now: float) -> None:
        """The request took `used` tokens of the `charge`; none: it was turned away, so that nothing of it counts."""
        if (tokens := self._bucket(tenant, "tokens")) is not None:
            tokens.put(charge - (used or 0), now)
        if used is None and (requests := self._bucket(tenant, "requests")) is not None:
            requests.put(1, now)
        self._forget(now)

    def _of(self, tenant: str) -> TenantConfig:
        return self._tenants.get(tenant) or self._tenants.get(ANYBODY) or TenantConfig()

    def _bucket(self, tenant: str, kind: str) -> TokenBucket | None:
        settings = self._of(tenant)
        per_minute = settings.requests_per_minute if kind == "requests" else settings.tokens_per_minute
        if not per_minute:
            return None
        if (bucket := self._buckets.get((tenant, kind))) is None:
            rate = per_minute / 60
            bucket = self._buckets[tenant, kind] = TokenBucket(rate, max(1.0, rate * settings.burst_s))
        return bucket

    def _forget(self, now: float) -> None:
        """A full bucket is as good as a new one, so the buckets are those of tenants that came lately."""
        if len(self._buckets) > 2 * len(self._tenants) + 64:
            self._buckets = {key: bucket for key, bucket in self._buckets.items() if bucket.wait(inf, now) > 0}


class RetryBudget:
    """How many attempts may be repeated, over all requests: so that a sick worker, which fails what it is given, does
    not multiply the work of the others. Each first attempt adds `share` of a retry, and each second `steady` of them,
    up to a burst of ten seconds' worth.

    After the retry budgets of Google's SRE book (chapter 21) and gRPC's retry throttling (proposal A6)."""

    _BURST_S = 10.0

    def __init__(self, share: float, steady: float) -> None:
        self._share = share
        self._bucket = TokenBucket(steady, max(1.0, steady * self._BURST_S))

    def first(self, now: float) -> None:
        """A first attempt is made."""
        self._bucket.put(self._share, now)

    def allow(self, now: float) -> bool:
        """Whether one may be made now."""
        return self._bucket.level(now) >= 1

    def take_retry(self, now: float) -> None:
        """One is made."""
        self._bucket.take(1, now)
