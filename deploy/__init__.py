"""Starting, watching and ending a cluster: the `baton` command, with Ray or as plain subprocesses.

Owns which processes there should be, on which nodes, and what is done when one ends.
Never takes part in serving a request: a cluster serves on while nothing of this package runs.
"""
