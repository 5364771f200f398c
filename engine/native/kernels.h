// What all kernels share.
//
// Conventions. A function for Python is extern "C", named baton_…, takes plain pointers to contiguous memory, int64_t
// sizes and floats, and a Pool* where it uses threads; it never fails, never throws and never allocates: sizes are checked
// and buffers made in Python. Its ctypes signature stands in the Python module of its own name. Tensors are float or bf16
// as `Dtype` says; sums, norms, softmax and angles are float32 whatever the dtype, as in the torch path.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace baton {

enum Dtype : int64_t { kFloat32 = 0, kBfloat16 = 1 };

// The upper half of a float32.
struct bf16 {
  uint16_t bits;
};

constexpr int kLanes = 16;  // float32 in a vector

inline __mmask16 first_lanes(int64_t count) {
  return count >= kLanes ? __mmask16(0xffff) : __mmask16((1u << (count < 0 ? 0 : count)) - 1);
}

// 16 numbers as float32. Of the masked ones only the lanes of `mask`; the others are zero and not touched in memory.
inline __m512 load16(const float* from) { return _mm512_loadu_ps(from); }
inline __m512 load16(const bf16* from) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline __m512 load16(const float* from, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, from); }
inline __m512 load16(const bf16* from, __mmask16 mask) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from)), 16));
}

// The reverse, rounded to the nearest.
inline void store16(float* to, __m512 x, __mmask16 mask) { _mm512_mask_storeu_ps(to, mask, x); }
inline void store16(bf16* to, __m512 x, __mmask16 mask) {
  _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(x));
}
inline void store16(float* to, __m512 x) { _mm512_storeu_ps(to, x); }
inline void store16(bf16* to, __m512 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(x));
}

// e^x to within 2 units in the last place, zero for −∞ and whatever underflows: x = n·ln 2 + r, and the Taylor series of
// e^r, whose terms from r⁸ on are below a tenth of a unit for |r| ≤ ln 2 / 2 (ln 2 in two parts: Cody and Waite, 1980).
inline __m512 exp16(__m512 x) {
  x = _mm512_max_ps(x, _mm512_set1_ps(-104.0f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 sum = _mm512_set1_ps(1.0f / 5040);
  sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(1.0f / 720));
  sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(1.0f / 120));
  sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(1.0f / 24));
  sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(1.0f / 6));
  sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(0.5f));
  sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(1.0f));
  sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(sum, n);
}

// x · sigmoid(x)
inline __m512 silu16(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  return _mm512_div_ps(x, _mm512_add_ps(one, exp16(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

}  // namespace baton
