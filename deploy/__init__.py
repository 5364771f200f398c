"""Starting, watching and ending a cluster: the `baton` command, Ray actors and a supervisor, or plain subprocesses."""
