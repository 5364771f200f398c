"""The part of the router that clients see: gRPC, HTTP, tokenizing, detokenizing.

Owns client calls and output streams: every message is bounded and validated here before the router's state sees it.
Never decides where a request runs, and never speaks to workers.
"""
