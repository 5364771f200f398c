// What all kernels share, and what decides the bits of a number: one exponential, one SiLU, one norm, one rotation.
//
// Conventions. A function for Python is extern "C", named baton_…, takes plain pointers to contiguous memory, int64_t
// sizes and a Pool* where it uses threads; it never fails, never throws and never allocates: sizes are checked and buffers
// made in Python. Its ctypes signature stands in the Python module that calls it. Tensors are float32 or bf16 as `Dtype`
// says; the residual stream, sums, norms, softmax and angles are float32 whatever the dtype, as in the torch path.
//
// The order in which numbers are added is a function of the row alone: neither the rows beside it, nor the chunk that it
// came in, nor the number of threads change a bit (He et al., "Defeating nondeterminism in LLM inference", 2025).
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "vector.h"

namespace baton {

enum Dtype : int64_t { kFloat32 = 0, kBfloat16 = 1 };

// Whether loops keep as much in registers as one would like, or make several rounds of it.
constexpr bool kMany = kRegisters >= 32;
constexpr float kNever = -std::numeric_limits<float>::infinity();

template <class T>
constexpr int kWord = 4 / sizeof(T);  // numbers in a word

inline int64_t round_up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }
inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Calls work with `count`, or `Most` if that is less, as a constant.
template <int Most, class Work>
inline void with_count(int64_t count, const Work& work) {
  if constexpr (Most > 1)
    if (count < Most) return with_count<Most - 1>(count, work);
  work(std::integral_constant<int, Most>{});
}

// Asks for a line into the first-level cache, or where that is small into the second. GCC takes a function that only asks
// for memory to do nothing, and leaves it out.
constexpr bool kLargeCache = FIRST_LEVEL_CACHE > 32 * 1024;
inline void prefetch(const char* from) {
  if (kLargeCache)
    asm volatile("prefetcht0 %0" : : "m"(*from));
  else
    asm volatile("prefetcht1 %0" : : "m"(*from));
}

// `power(x · kExponent<T>)` is e^x, zero where that is too small for a normal float, and 1 for 0.
template <class T>
constexpr float kExponent = sizeof(T) == 2 ? 1.44269504f : 1.0f;

inline Floats power(float, Floats x) { return exponential(x); }
// 2^x for x below 127: x = n + r, and a polynomial for 2^r that is 1 for 0. Its greatest relative error is the least that
// its degree allows, 1.0e-4, a tenth of what rounding to bf16 then adds. Adding 1.5 · 2²³ rounds x to n, which is left in
// the lowest bits; from there it is added to the exponent.
inline Floats power(bf16, Floats x) {
  const Floats rounder = filled(12582912.0f), lowest = filled(-126.0f);
  const Floats shifted = max(x, lowest) + rounder;
  const Floats r = max(x, lowest) - (shifted - rounder);
  Floats sum = filled(5.500893424e-2f);
  sum = fma(sum, r, filled(2.422110011e-1f));
  sum = fma(sum, r, filled(6.932829314e-1f));
  sum = fma(sum, r, filled(1.0f));
  return select(greater(x, lowest), as_floats(as_words(sum) + shifted_left<23>(as_words(shifted))), zeros());
}

// x · sigmoid(y)
template <class T>
Floats gated(Floats x, Floats y) {
  return x / (filled(1.0f) + power(T{}, min(y * filled(-kExponent<T>), filled(126.0f))));
}
template <class T>
Floats silu(Floats x) {
  return gated<T>(x, x);
}
// With tanh: 1 + tanh(y) is 2 · sigmoid(2 y).
template <class T>
Floats gelu(Floats x) {
  return gated<T>(x, filled(1.59576912f) * fma(filled(0.044715f) * x * x, x, x));
}

// One over the root mean square of `count` numbers.
inline float inverse_rms(const float* x, int64_t count, double eps) {
  Floats squares[2] = {zeros(), zeros()};
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats part = load16(x + i, count - i);
    Floats& sum = squares[i / kLanes % 2];
    sum = fma(part, part, sum);
  }
  return 1.0f / std::sqrt(sum_of(squares[0] + squares[1]) / static_cast<float>(count) + static_cast<float>(eps));
}

// RMSNorm(x) · weight
template <class T>
void norm_row(const float* x, const float* weight, T* to, int64_t count, double eps) {
  const Floats scale = filled(inverse_rms(x, count, eps));
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t left = count - i;
    store16(to + i, load16(x + i, left) * scale * load16(weight + i, left), left);
  }
}

template <class From, class To>
void copy_row(const From* from, To* to, int64_t count, float scale = 1.0f) {
  for (int64_t i = 0; i < count; i += kLanes) store16(to + i, load16(from + i, count - i) * filled(scale), count - i);
}

// Codes of a row; returns their scale, with which the largest number is the largest code or minus that. Neither other rows
// nor how the row's chunk was cut have a part in it.
template <class Code>
float quantise(const float* x, Code* to, int64_t count) {
  Floats most = zeros();
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats part = load16(x + i, count - i);
    most = max(most, max(part, zeros() - part));
  }
  const float scale = largest_of(most) / (std::is_same_v<Code, e4m3> ? 448.0f : 127.0f);
  const Floats inverse = filled(scale > 0 ? 1.0f / scale : 0.0f);
  for (int64_t i = 0; i < count; i += kLanes) store16(to + i, load16(x + i, count - i) * inverse, count - i);
  return scale;
}

// Rotates 2 · `half` numbers of a head.
template <class T>
void rotate(const float* x, const float* cos, const float* sin, T* to, int64_t half) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t left = half - i;
    const Floats a = load16(x + i, left), b = load16(x + half + i, left);
    const Floats c = load16(cos + i, left), s = load16(sin + i, left);
    store16(to + i, fms(a, c, b * s), left);
    store16(to + half + i, fma(b, c, a * s), left);
  }
}

}  // namespace baton
