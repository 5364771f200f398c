// 16 numbers at a time, whatever the CPU's registers hold: what kernels are written in.
//
//   Floats, Words   16 float32, and 16 times 32 bits, which are int32 to `+`, `-` and `greater`
//   Mask            a yes or no for each lane
//   kRegisters      vectors that fit into registers together
//
// first_lanes(n) is yes for the lanes before n, and select(mask, yes, no) takes each lane from one of two. fma(a, b, c) is
// a · b + c, fms a · b − c, fnma c − a · b, each rounded once; max and min are their second where either is no number;
// whole(x) is the nearest whole number, times_power_of_two(x, n) x · 2ⁿ for whole n, and reciprocal(x) good to 14 bits.
// filled, counted and zeros are the same number in all lanes, 0 to 15, and 0. sum_of and largest_of are of all lanes.
//
// load16 and store16 convert from and to the memory's type, to the nearest. With a count, they and what else takes one
// touch only so many numbers, none for 0 or less, and those missing read as zero. load_halves leaves a bf16 as it is in
// the lower half of a word; load_line and store_line move 64 bytes as they are, their count being of the memory's type;
// as_bf16(x) is x rounded to one, and pairs(low, high) puts two of them into each word.
//
// A word may stand for one float32 or for two bf16. factors<T>(words) prepares it for add_products(T{}, a, b, sum), which
// adds to each lane the product of its two floats, or those of both pairs. Before its use a factor may be kept.
//
// transpose makes rows of 16 words columns; of sums_of(x), lane i is the sum of all lanes of x[i].
#pragma once

#include <cstdint>

namespace baton {

// The upper half of a float32.
struct bf16 {
  uint16_t bits;
};

constexpr int kLanes = 16;

}  // namespace baton

#if defined(__AVX512BF16__) && defined(__AVX512VL__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#include "vector_avx512.h"
#else
#include "vector_avx2.h"
#endif

namespace baton {

// 32 numbers, of which `left` are there, in two vectors: of bf16 those with even and those with odd places, which costs
// least; `store_both` puts them back.
inline void load_both(const float* from, int64_t left, Floats& first, Floats& second) {
  first = load16(from, left);
  second = load16(from + kLanes, left - kLanes);
}
inline void load_both(const bf16* from, int64_t left, Floats& first, Floats& second) {
  const Words both = load_line(from, left);
  first = as_floats(shifted_left<16>(both));
  second = as_floats(both & filled(static_cast<int32_t>(0xffff0000)));
}
inline void store_both(float* to, int64_t left, Floats first, Floats second) {
  store16(to, first, left);
  store16(to + kLanes, second, left - kLanes);
}
inline void store_both(bf16* to, int64_t left, Floats first, Floats second) { store_line(to, pairs(first, second), left); }

// e^x to within 2 units in the last place, zero for −∞ and whatever underflows: x = n·ln 2 + r, and the Taylor series of
// e^r, whose terms from r⁸ on are below a tenth of a unit for |r| ≤ ln 2 / 2 (ln 2 in two parts: Cody and Waite, 1980).
inline Floats exponential(Floats x) {
  x = max(x, filled(-104.0f));
  const Floats n = whole(x * filled(1.44269504f));
  Floats r = fnma(n, filled(0.693359375f), x);
  r = fnma(n, filled(-2.12194440e-4f), r);
  Floats sum = filled(1.0f / 5040);
  sum = fma(sum, r, filled(1.0f / 720));
  sum = fma(sum, r, filled(1.0f / 120));
  sum = fma(sum, r, filled(1.0f / 24));
  sum = fma(sum, r, filled(1.0f / 6));
  sum = fma(sum, r, filled(0.5f));
  sum = fma(sum, r, filled(1.0f));
  sum = fma(sum, r, filled(1.0f));
  return times_power_of_two(sum, n);
}

// x · sigmoid(x)
inline Floats silu(Floats x) { return x / (filled(1.0f) + exponential(zeros() - x)); }

}  // namespace baton
