"""What the page at /dashboard shows: the last minutes in seconds, the cluster as it is, and the last requests.

Owns the samples, notices and snapshots that are made for the page.
Never changes the router's state, and never knows HTTP: `router.frontend.dashboard` serves what is made here. Pure.
"""
