"""The HTTP APIs in processes of their own, for a router whose core is full.

Owns these processes, and the link on which they hand requests to their router.
Never decides anything about a request that the router itself does not check again.
"""
