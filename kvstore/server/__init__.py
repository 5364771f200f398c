"""The store process's decisions: reservations, leases, tiers, transfers between stores, pins.

Owns the state of a node's store: `state` knows processes and their leases, `tier_manager` knows pages.
Never touches page bytes, sockets or the clock.
"""
