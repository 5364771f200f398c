"""Other engines on the same machine, the same model and the same prompts, in the same run.

`environments.py` prepares what each peer needs. `adapter.py` is the protocol between a script and a peer's process,
which is one of the small files beside it. `cases.py` has the work of all engines, and how it is counted. Files that
run in a peer's own environment import neither Baton nor torch.
"""
