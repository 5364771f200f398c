// What all kernels share.
//
// Conventions. A function for Python is extern "C", named baton_…, takes plain pointers to contiguous memory, int64_t
// sizes and floats, and a Pool* or Team* where it uses threads; it never fails, never throws and never allocates: sizes
// are checked and buffers made in Python. Its ctypes signature stands in the Python module of its own name. Tensors are float or bf16
// as `Dtype` says; sums, norms, softmax and angles are float32 whatever the dtype, as in the torch path.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "vector.h"

namespace baton {

enum Dtype : int64_t { kFloat32 = 0, kBfloat16 = 1 };

// Whether loops keep as much in registers as one would like, or make several rounds of it.
constexpr bool kMany = kRegisters >= 32;

// Calls work with `count`, or `Most` if that is less, as a constant.
template <int Most, class Work>
inline void with_count(int64_t count, const Work& work) {
  if constexpr (Most > 1)
    if (count < Most) return with_count<Most - 1>(count, work);
  work(std::integral_constant<int, Most>{});
}

}  // namespace baton
