"""The subcommands of `baton`, one module each.

Owns the output of the command line.
Never keeps a cluster alive: `deploy.control_plane` does.
"""
