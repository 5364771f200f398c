"""Other engines on the same machine, the same model and the same prompts, in the same run.

`run.py` is what one runs. `environments.py` prepares what each peer needs; `adapter.py` is the protocol between the run
and the process of a peer, which is one of the small files beside it; `cases.py` is what is asked, and how it is counted.
Everything here but `baton_engine.py` runs without Baton and without torch, as a peer's own environment has neither.
"""
