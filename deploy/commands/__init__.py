"""The subcommands of `baton`, one module each.

Owns what the user of the command line sees.
Never keeps a cluster alive: `deploy.control_plane` does.
"""
