"""The engine's own kernels for CPUs with AVX2 or AVX512-BF16: C++, compiled once on the machine they run on.

In reading order: `build` (from sources to a loaded library), `thread_pool` (threads), `packed_linear` (weights),
`forward` (a step), `numerics` (the class of their arithmetic). The C++ beside them has one convention, told in
`kernels.h`. Where there is no library, the same work is done in torch.
"""
