"""What only a CUDA device needs: copies and steps that go on beside the worker's loop.

In reading order: `errors` (a device that is lost), `steps` (a step under way), `copies` (streams, events and pinned
memory), `mover` (threads that make copies and checksums). None of it decides anything.
"""
