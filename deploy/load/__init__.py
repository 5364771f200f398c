"""Loads for a cluster: what is sent, when, and the figures of what came back.

Owns workloads, the client that sends them, and latencies as that client sees them.
Never starts a cluster, and imports no engine.
"""
