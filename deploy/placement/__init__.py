"""Which processes a cluster has, on which nodes and GPUs. Pure: starts nothing.

Owns the plan. `deploy.control_plane` and `deploy.local` carry it out.
"""
