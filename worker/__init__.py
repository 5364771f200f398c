"""The worker process: one loaded model that serves prefill or decode, one role after the other.

Owns the loop, the sockets, the clock, the engine and the copies; it does what the role's scheduler says.
Never decides: `prefill_worker.scheduler` and `decode_worker.scheduler` do.
"""
