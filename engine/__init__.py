"""Running a model: the batch that goes in, the tokens that come out. Knows no request, no socket and no schedule.

In reading order: `spec` (what a model is), `step` (what a step is asked), `engine` (one step), `models.transformer`,
`attention.torch_sdpa` (pages), `sampling.sampler` (the draw). Weights come from `models.families`, `models.weights` and
`checkpoint`. The kernels for CPUs are in `cpu`.

Import this package before torch: what it sets below is read once, when torch loads its OpenMP library.
"""

import os

# A thread that waits for its siblings by spinning takes the core that they need, as soon as anything else runs on the
# node. Measured with 2 threads on 2 busy cores, a decode step of 13 ms took 468. A setting of the user's own stands.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
