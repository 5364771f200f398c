"""Admission control and the waiting queue.

Owns the order of waiting requests, the tenants' fair shares, rate limits and retry budgets.
Never chooses workers and never speaks to them.
"""
