"""Token buckets, tenants' quotas, and the budget of retries."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from baton.config import TenantConfig
from baton.errors import RateLimited
from router.queueing.rate_limits import ANYBODY, RateLimits, RetryBudget, TokenBucket


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 60)), max_size=40), st.floats(0.5, 50), st.floats(1, 100))
def test_what_passes_is_bounded_by_rate_and_burst(calls: list[tuple[float, int]], rate: float, capacity: float) -> None:
    bucket, now, passed, largest = TokenBucket(rate, capacity), 0.0, 0.0, 0
    for gap, amount in calls:
        now += gap
        wait = bucket.wait(amount, now)
        if not wait:
            bucket.take(amount, now)
            passed, largest = passed + amount, max(largest, amount)
        else:
            assert bucket.wait(amount, now + wait + 1e-6) == 0  # the hint holds
            now += wait + 1e-6
    assert passed <= capacity + rate * now + largest + 1e-3


def test_a_tenant_over_its_tokens_is_told_when_to_come_again() -> None:
    quotas = RateLimits({"a": TenantConfig(tokens_per_minute=6_000, burst_s=60)})
    quotas.take_quota("a", 5_500, 0.0)
    with pytest.raises(RateLimited, match="tokens") as caught:
        quotas.take_quota("a", 1_000, 0.0)
    assert caught.value.retry_after_ms == 5_000
    quotas.take_quota("a", 1_000, 5.001)
    quotas.take_quota("b", 10**6, 0.0)  # a tenant without a quota has no limit


def test_a_tenant_over_its_requests() -> None:
    quotas = RateLimits({ANYBODY: TenantConfig(requests_per_minute=2, burst_s=60)})
    for _ in range(2):
        quotas.take_quota("a", 20, 0.0)
    with pytest.raises(RateLimited, match="requests") as caught:
        quotas.take_quota("a", 20, 0.0)
    assert caught.value.retry_after_ms == 30_000
    quotas.take_quota("b", 20, 0.0)  # each has buckets of its own


def test_a_refusal_charges_neither_kind() -> None:
    quotas = RateLimits({"a": TenantConfig(requests_per_minute=2, tokens_per_minute=100, burst_s=60)})
    quotas.take_quota("a", 100, 0.0)
    for _ in range(5):
        with pytest.raises(RateLimited, match="tokens"):
            quotas.take_quota("a", 50, 0.0)
    quotas.take_quota("a", 50, 31.0)


def test_the_estimate_is_corrected_in_the_end() -> None:
    quotas = RateLimits({"a": TenantConfig(tokens_per_minute=600, requests_per_minute=1, burst_s=60)})
    quotas.take_quota("a", 600, 0.0)
    quotas.settle("a", 600, 150, 0.0)
    with pytest.raises(RateLimited, match="requests"):
        quotas.take_quota("a", 400, 0.0)
    quotas.take_quota("a", 450, 60.0)
    with pytest.raises(RateLimited):
        quotas.take_quota("a", 600, 60.0)


def test_a_rejected_request_uses_no_tokens() -> None:
    quotas = RateLimits({"a": TenantConfig(tokens_per_minute=600, requests_per_minute=1, burst_s=60)})
    for _ in range(5):
        quotas.take_quota("a", 600, 0.0)
        quotas.settle("a", 600, None, 0.0)
    quotas.take_quota("a", 600, 0.0)


def test_buckets_of_tenants_long_gone_are_forgotten() -> None:
    quotas = RateLimits({ANYBODY: TenantConfig(tokens_per_minute=60_000)})
    for i in range(1_000):
        tenant = f"t{i}"
        quotas.take_quota(tenant, 200, float(i))
        quotas.settle(tenant, 200, 200, float(i))
    assert len(quotas._buckets) < 100


def test_retries_are_a_share_of_first_attempts_and_a_trickle() -> None:
    retries = RetryBudget(share=0.5, steady=1.0)
    count = 0
    while retries.allow(0.0):
        retries.take_retry(0.0)
        count += 1
    assert count == 10
    retries.first(0.0)
    assert not retries.allow(0.0)
    retries.first(0.0)
    assert retries.allow(0.0)
    retries.take_retry(0.0)
    assert retries.allow(1.0)
