"""The cluster in virtual time: the real states of router, workers and stores. Everything else is only a duration.

    workloads ──request─▶ router ⇄ workers ⇄ stores        each a process around its real state
        ▲                    │        timing: what a step, a copy, a message takes
        └──── measure ◀──────┘        clock: nothing else knows what time it is

The simulator makes no decisions: it runs the real code of each policy.
"""
