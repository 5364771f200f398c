"""The gRPC door: `Generation` for clients.

Owns what stands before every handler (keys, limits, the reading of messages) and the rendering of answers. Requests go
on to `router.frontend.generation`, as those of the HTTP APIs do.
"""
