"""Other engines on the same machine, the same model and the same prompts, in the same run.

`run.py` is what one runs. `environments.py` prepares what each peer needs; `adapter.py` is the protocol between the run
and the process of a peer, which is one of the small files beside it; `cases.py` is what is asked, and how it is
counted. Only `run.py` and `baton_engine.py` import Baton or torch: the others run in a peer's environment, too.
"""
