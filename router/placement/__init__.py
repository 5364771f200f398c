"""The choice of a decode worker, perhaps a prefill worker, and the stores that pages come from.

Owns the prediction of what each placement would take, and the policy that compares them.
Never changes a request, a queue or a worker's record: the request manager carries a decision out.
"""
