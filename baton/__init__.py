"""The shared vocabulary of every Baton process: messages, errors, configuration, sockets, clocks, metrics."""

__version__ = "0.1.0"
