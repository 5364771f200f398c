"""What operators and the page at /dashboard are told: the cluster as it is, the last minutes and the last requests.

Owns the samples, notices and snapshots that are made for the page.
Never changes the router's state, and never knows HTTP: `router.frontend.api` serves what is made here. Pure.
"""
