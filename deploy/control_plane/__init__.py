"""The cluster under Ray: desired state, observed state, and the supervisor that reconciles them.

Owns Ray actors, their processes and their records.
Never serves requests. Decides by its own observations, never by Ray's assumptions.
"""
