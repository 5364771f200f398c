// 16 numbers at a time, whatever the CPU's registers hold: what kernels are written in.
//
//   Floats, Words   16 float32, and 16 times 32 bits, which are int32 to `+`, `-` and `greater`
//   Mask            a yes or no for each lane
//   kRegisters      vectors that fit into registers together
//
// first_lanes(n) is yes for the lanes before n, and select(mask, yes, no) takes each lane from one of two. fma(a, b, c) is
// a · b + c, fms a · b − c, fnma c − a · b, each rounded once; max and min are their second where either is no number;
// whole(x) is the nearest whole number, and times_power_of_two(x, n) x · 2ⁿ for whole n.
// filled, counted and zeros are the same number in all lanes, 0 to 15, and 0. largest_of is of all lanes, and so is
// sum_of, which adds lane i to lane i + 8, then to i + 4, i + 2 and i + 1.
//
// load16 and store16 convert from and to the memory's type, to the nearest, which of int8 is within −128 and 127, and e4m3
// takes up to 448. With a count, they and what else takes one touch only so many numbers, none for 0 or less, and those
// missing read as zero. store_bytes stores words within −128 and 127. load_halves leaves a bf16 as it is in the lower half
// of a word; pairs(low, high) rounds to two of them in each word.
//
// A word may stand for one float32 or for two bf16. factors<T>(words) prepares it for add_products(T{}, a, b, sum), which
// adds to each lane the product of its two floats; or of both pairs, the upper product first and each rounded by itself.
// Before its use a factor may be kept.
//
// keep(T{}, to, x) stores numbers for kept(T{}, from, word), which makes a factor of the same word in all lanes, as
// factors<T>(filled(…)) would.
//
// What add_words adds up is a Part<T> of a sum. With BATON_TILE_ORDER the even and the odd numbers of 16 words of bf16 are
// added up apart, from zero on, and then both to the sum, as the tiles of AMX do it. Else a part is the sum itself.
//
// load_beside(rows, i, count, x) makes kBeside factors, each of 16 numbers from place i on: of one row of float32, or of two
// rows of bf16 beside each other. What is summed with those of 32 numbers is put in their order by `in_order` afterwards.
//
// to_floats converts whole numbers. Of codes that lie as `packed_groups.py` packs them, number(bits, codes, input, vector) is
// what they say of the 16 outputs from 16 · `vector` on: exact numbers, from the middle of what the bits can say, or of e4m3
// those divided by 256. And decoded(T{}, bits, codes, step, vector) makes factors of those for a word of inputs.
//
// transpose makes rows of 16 words columns.
//
// Numbers too small for a normal float are zero to all of this, while its thread has a `FlushDenormals`: the bf16 products
// of AVX512 know no others.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace baton {

// The upper half of a float32.
struct bf16 {
  uint16_t bits;
};

// A half-precision float32.
struct fp16 {
  uint16_t bits;
};

// A float of 4 bits of exponent and 3 of mantissa that has no infinity: up to 448, in steps of 2⁻⁹ and more.
struct e4m3 {
  uint8_t bits;
};

constexpr int kLanes = 16;
constexpr int kTileOutputs = 64;  // whose codes stand together

// How many bits a code has, and how many bytes those of two inputs of a tile.
struct FourBits {
  static constexpr int64_t kPairBytes = 64;
};
struct EightBits {
  static constexpr int64_t kPairBytes = 128;
};
struct E4m3Bits : EightBits {};

inline float sum_of(__m256 x) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

}  // namespace baton

// The processors of Intel that know fp16 need 2.2 cycles for a bf16 dot product, and 0.55 for each of the two float32 ones
// that come to the same bits.
#if defined(__AMX_BF16__) && !defined(BATON_TILE_ORDER)
#define BATON_TILE_ORDER
#endif
#if defined(__AVX512BF16__) && defined(__AVX512VL__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#include "vector_avx512.h"
#if defined(__AVX512FP16__) || defined(BATON_TILE_ORDER)
#include "vector_pairs.h"
#else
#include "vector_dots.h"
#endif
#else
#include "vector_avx2.h"
#include "vector_pairs.h"
#endif

namespace baton {

template <class T>
struct PartOf {
  using Type = Floats;
};
#ifdef BATON_TILE_ORDER
template <>
struct PartOf<bf16> {
  using Type = Pair;
};
inline void begin(Pair& part, Floats) { part = {zeros(), zeros()}; }
inline Floats end(Pair part, Floats sum) { return sum + (part.even + part.odd); }
inline Pair add_products(bf16, Pair a, Pair b, Pair part) {
  return {fma(a.even, b.even, part.even), fma(a.odd, b.odd, part.odd)};
}
#endif
inline void begin(Floats& part, Floats sum) { part = sum; }
inline Floats end(Floats part, Floats) { return part; }
template <class T>
using Part = typename PartOf<T>::Type;
constexpr int kSpan = 16;  // words whose products are a part
template <class T>
constexpr bool kApart = sizeof(Part<T>) > sizeof(Floats);

// Adds the products of `count` words to sums. `add` adds those of one word to their parts.
template <class T, int R, int V, class Add>
__attribute__((always_inline)) inline void add_words(int64_t count, Floats (&sum)[R][V], const Add& add) {
  for (int64_t from = 0, next; from < count; from = next) {
    next = kApart<T> && count - from > kSpan ? from + kSpan : count;
    Part<T> part[R][V];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) begin(part[r][v], sum[r][v]);
    for (int64_t word = from; word < next; ++word) add(word, part);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sum[r][v] = end(part[r][v], sum[r][v]);
  }
}

// Those below 2⁻⁶ are multiples of 2⁻⁹, as which the lowest bits of their sum with 2¹⁴ count them.
inline void store16(e4m3* to, Floats x, int64_t count) {
  constexpr int kCut = 20, kBias = 127 - 7;
  const Words size = as_words(x) & filled(0x7fffffff), odd = signed_right<kCut>(size) & filled(1);
  const Words normal = signed_right<kCut>(size + odd + filled((1 << (kCut - 1)) - 1)) - filled(kBias << 3);
  const Words small = as_words(as_floats(size) + filled(16384.0f)) - as_words(filled(16384.0f));
  const Words code = select(greater(filled((kBias + 1) << 23), size), small, normal);
  store_bytes(to, (signed_right<24>(as_words(x)) & filled(-128)) | (code & filled(127)), count);
}

class FlushDenormals {
 public:
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(before_); }

 private:
  const unsigned before_;
};

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

}  // namespace baton
