// Factors of bf16 as they are, for the dot product of AVX512-BF16: what `vector.h` promises.
#pragma once

#include <immintrin.h>

namespace baton {

template <class T>
using Factors = Words;
template <class T>
Factors<T> factors(Words x) {
  return x;
}
inline Floats add_products(float, Words a, Words b, Floats sum) { return fma(as_floats(a), as_floats(b), sum); }
inline Floats add_products(bf16, Words a, Words b, Floats sum) {
  return {_mm512_dpbf16_ps(sum.all, (__m512bh)a.all, (__m512bh)b.all)};
}

template <class Bits>
Words decoded(float, Bits, const char* codes, int64_t step, int vector) {
  return as_words(number(Bits{}, codes, step, vector));
}
template <class Bits>
Words decoded(bf16, Bits bits, const char* codes, int64_t step, int vector) {
  return word_of(bits, codes, step, vector);
}

template <class T>
using Kept = T;
template <class T>
void keep(T, T* to, Floats x) {
  store16(to, x);
}
template <class T>
Words kept(T, const T* from, int64_t word) {
  return filled(reinterpret_cast<const int32_t*>(from)[word]);
}

constexpr int kBeside = 2;
inline void load_beside(const float* const* rows, int64_t i, int64_t count, Words (&x)[kBeside]) {
  x[0] = load_words(rows[0] + i, count);
  x[1] = load_words(rows[0] + i + kLanes, count - kLanes);
}
// Quarters of a register are interleaved each by itself.
inline void load_beside(const bf16* const* rows, int64_t i, int64_t count, Words (&x)[kBeside]) {
  const __mmask32 there = count >= 32 ? __mmask32(0xffffffff) : __mmask32((1u << count) - 1);
  const __m512i low = _mm512_maskz_loadu_epi16(there, rows[0] + i), high = _mm512_maskz_loadu_epi16(there, rows[1] + i);
  x[0].all = _mm512_unpacklo_epi16(low, high);
  x[1].all = _mm512_unpackhi_epi16(low, high);
}
inline void in_order(float, Floats&, Floats&) {}
inline void in_order(bf16, Floats& first, Floats& second) {
  const __m512 one = _mm512_shuffle_f32x4(first.all, second.all, 0x44), two = _mm512_shuffle_f32x4(first.all, second.all, 0xee);
  first.all = _mm512_shuffle_f32x4(one, one, 0xd8);
  second.all = _mm512_shuffle_f32x4(two, two, 0xd8);
}

}  // namespace baton
