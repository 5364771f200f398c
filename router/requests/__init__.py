"""A request from submission to outcome.

Owns requests, their attempts and the record of why each decision was made.
Never chooses workers (`router.placement`) and never orders the queue (`router.queueing`).
"""
