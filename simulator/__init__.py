"""The cluster in virtual time: the real states of router, workers and stores, and of everything around them only how
long it takes.

    workloads ──Submit──▶ router ⇄ workers ⇄ stores        each a process around its real state
        ▲                    │        timing: what a step, a copy, a message takes
        └──── measure ◀──────┘        clock: nothing else knows what time it is

Nothing here decides: what the simulator says about a policy is what the code of that policy does.
"""
