"""What only a CUDA device needs: copies and steps that go on beside the worker's loop.

In reading order: `errors` (a device that is lost), `streams` (where launched work lies), `launcher` and `draws` (a step
and its draws), `steps` (a step under way). Then `copies` (streams, events and pinned memory) and `mover` (threads that
make copies and checksums). None of it decides anything.
"""
