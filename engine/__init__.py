"""Running a model: the batch that goes in, the tokens that come out. Knows no request, no socket and no schedule.

In reading order: `batch` (what a step is asked), `engine` (one step), `model` (the transformer), `attention` (pages),
`sampler` (the draw), `config`, `weights` and `files` (where all of it comes from).
"""
