"""The cluster under Ray: desired state, observed state, and the supervisor that makes one follow the other.

Owns Ray actors, their processes and the record of them.
Never serves requests, and never decides by what Ray assumes: only by what it observed.
"""
