"""Page transfer between the stores of two nodes: ZMQ over TCP, or RDMA through NIXL.

Owns connections between stores and the threads that move page bytes.
Never decides which pages move, and never reuses a slot before the store's state says so.
"""
