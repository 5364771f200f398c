"""The decode worker's decisions: continuous batching, chunked prefill beside it, preemption, write-through.

Owns sequences from `Decode` to their last token. It is the only producer of tokens.
Never decides where a request runs.
"""
