"""The router: the only control path.

Owns requests from submission to outcome: frontend, queue, placement, attempts and fail-over.
Never touches a page of K and V, and never imports the engine or the workers.
"""
