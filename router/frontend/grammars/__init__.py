"""Structured output at the router: a request's grammar is read, and compiled in a helper process before it is queued.

Owns no matcher: masks are the decode workers' (`engine.sampling`).
"""
