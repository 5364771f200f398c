// 16 lanes in one register, on CPUs with AVX512-BF16: what `vector.h` promises.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace baton {

constexpr int kRegisters = 32;

struct Floats {
  __m512 all;
};
struct Words {
  __m512i all;
};
struct Mask {
  __mmask16 all;
};

// --- lanes -----------------------------------------------------------------------------------------------------------

inline Mask first_lanes(int64_t count) {
  return {count >= kLanes ? __mmask16(0xffff) : __mmask16((1u << (count < 0 ? 0 : count)) - 1)};
}
inline Mask greater(Floats a, Floats b) { return {_mm512_cmp_ps_mask(a.all, b.all, _CMP_GT_OQ)}; }
inline Mask greater(Words a, Words b) { return {_mm512_cmpgt_epi32_mask(a.all, b.all)}; }
inline Mask unequal(Floats a, Floats b) { return {_mm512_cmpneq_ps_mask(a.all, b.all)}; }
inline Mask operator&(Mask a, Mask b) { return {__mmask16(a.all & b.all)}; }
inline Mask operator~(Mask a) { return {__mmask16(~a.all)}; }
inline Floats select(Mask mask, Floats yes, Floats no) { return {_mm512_mask_mov_ps(no.all, mask.all, yes.all)}; }
inline Words select(Mask mask, Words yes, Words no) { return {_mm512_mask_mov_epi32(no.all, mask.all, yes.all)}; }

// --- arithmetic ------------------------------------------------------------------------------------------------------

inline Floats zeros() { return {_mm512_setzero_ps()}; }
inline Floats filled(float x) { return {_mm512_set1_ps(x)}; }
inline Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.all, b.all)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm512_sub_ps(a.all, b.all)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.all, b.all)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm512_div_ps(a.all, b.all)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.all, b.all, c.all)}; }
inline Floats fms(Floats a, Floats b, Floats c) { return {_mm512_fmsub_ps(a.all, b.all, c.all)}; }
inline Floats fnma(Floats a, Floats b, Floats c) { return {_mm512_fnmadd_ps(a.all, b.all, c.all)}; }
inline Floats max(Floats a, Floats b) { return {_mm512_max_ps(a.all, b.all)}; }
inline Floats min(Floats a, Floats b) { return {_mm512_min_ps(a.all, b.all)}; }
inline Floats whole(Floats x) { return {_mm512_roundscale_ps(x.all, _MM_FROUND_TO_NEAREST_INT)}; }
inline Floats times_power_of_two(Floats x, Floats n) { return {_mm512_scalef_ps(x.all, n.all)}; }
inline float sum_of(Floats x) {
  return sum_of(_mm256_add_ps(_mm512_castps512_ps256(x.all), _mm512_extractf32x8_ps(x.all, 1)));
}
inline float largest_of(Floats x) { return _mm512_reduce_max_ps(x.all); }

inline Words filled(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline Words counted() { return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)}; }
inline Words operator+(Words a, Words b) { return {_mm512_add_epi32(a.all, b.all)}; }
inline Words operator-(Words a, Words b) { return {_mm512_sub_epi32(a.all, b.all)}; }
inline Words operator&(Words a, Words b) { return {_mm512_and_si512(a.all, b.all)}; }
inline Words operator|(Words a, Words b) { return {_mm512_or_si512(a.all, b.all)}; }
template <int N>
Words shifted_left(Words x) {
  return {_mm512_slli_epi32(x.all, N)};
}
template <int N>
Words signed_right(Words x) {
  return {_mm512_srai_epi32(x.all, N)};
}
inline Words shifted_left(Words x, int n) { return {_mm512_sll_epi32(x.all, _mm_cvtsi32_si128(n))}; }
inline Words shifted_right(Words x, int n) { return {_mm512_srl_epi32(x.all, _mm_cvtsi32_si128(n))}; }
inline Floats to_floats(Words x) { return {_mm512_cvtepi32_ps(x.all)}; }
inline Floats as_floats(Words x) { return {_mm512_castsi512_ps(x.all)}; }
inline Words as_words(Floats x) { return {_mm512_castps_si512(x.all)}; }

// --- memory ----------------------------------------------------------------------------------------------------------

inline Words load_words(const void* from) { return {_mm512_loadu_si512(from)}; }
inline Words load_words(const void* from, int64_t count) {
  return {_mm512_maskz_loadu_epi32(first_lanes(count).all, from)};
}
inline void store_words(void* to, Words x) { _mm512_storeu_si512(to, x.all); }
inline void store_words(void* to, Words x, int64_t count) { _mm512_mask_storeu_epi32(to, first_lanes(count).all, x.all); }

inline Words widened(__m256i halves) { return {_mm512_cvtepu16_epi32(halves)}; }
inline Words load_halves(const bf16* from, int64_t count) {
  return widened(_mm256_maskz_loadu_epi16(first_lanes(count).all, from));
}

inline Floats load16(const float* from) { return {_mm512_loadu_ps(from)}; }
inline Floats load16(const bf16* from) {
  return as_floats(shifted_left<16>(widened(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))));
}
inline Floats load16(const fp16* from) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
}
inline Floats load16(const float* from, int64_t count) { return {_mm512_maskz_loadu_ps(first_lanes(count).all, from)}; }
inline Floats load16(const bf16* from, int64_t count) { return as_floats(shifted_left<16>(load_halves(from, count))); }
inline Floats load16(const int8_t* from, int64_t count) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first_lanes(count).all, from)))};
}

// As fp16, of which no number is too small, with an exponent that is 8 too low.
inline Floats parts_of_256(__m128i codes) {
  const __m256i halves = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);
  return {_mm512_cvtph_ps(_mm256_and_si256(halves, _mm256_set1_epi16(static_cast<int16_t>(0xbfff))))};
}
inline Floats load16(const e4m3* from, int64_t count) {
  return parts_of_256(_mm_maskz_loadu_epi8(first_lanes(count).all, from)) * filled(256.0f);
}

inline __m256i rounded(Floats x) { return (__m256i)_mm512_cvtneps_pbh(x.all); }
inline void store16(float* to, Floats x) { _mm512_storeu_ps(to, x.all); }
inline void store16(bf16* to, Floats x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), rounded(x)); }
inline void store16(float* to, Floats x, int64_t count) { _mm512_mask_storeu_ps(to, first_lanes(count).all, x.all); }
inline void store16(bf16* to, Floats x, int64_t count) {
  _mm256_mask_storeu_epi16(to, first_lanes(count).all, rounded(x));
}
inline void store_bytes(void* to, Words x, int64_t count) {
  _mm_mask_storeu_epi8(to, first_lanes(count).all, _mm512_cvtsepi32_epi8(x.all));
}
inline void store16(int8_t* to, Floats x, int64_t count) { store_bytes(to, {_mm512_cvtps_epi32(x.all)}, count); }

inline Floats as_bf16(Floats x) { return as_floats(shifted_left<16>(widened(rounded(x)))); }
inline Words pairs(Floats low, Floats high) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return {_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(high.all, low.all))};
}

// --- codes -----------------------------------------------------------------------------------------------------------

// A code of four bits has its number looked up, by the lowest bits of a word.
inline Floats number(FourBits, const char* codes, int64_t input, int vector) {
  const __m512 table = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  const __m512i all = load_words(codes + input / 2 * FourBits::kPairBytes).all;
  const int place = 4 * vector + 16 * static_cast<int>(input % 2);
  return {_mm512_permutexvar_ps(_mm512_srlv_epi32(all, _mm512_set1_epi32(place)), table)};
}
inline Floats number(EightBits, const char* codes, int64_t input, int vector) {
  const auto* at = reinterpret_cast<const __m128i*>(codes + input * kTileOutputs + vector * kLanes);
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at)))};
}

// Of two codes their bf16. One of four bits is looked up, by the lowest five bits, of which the fifth is another code's.
inline Words word_of(FourBits, const char* codes, int64_t step, int vector) {
  const __m512i table = _mm512_set_epi16(
      0x40e0, 0x40c0, 0x40a0, 0x4080, 0x4040, 0x4000, 0x3f80, 0, -0x4080, -0x4000, -0x3fc0, -0x3f80, -0x3f60, -0x3f40,
      -0x3f20, -0x3f00, 0x40e0, 0x40c0, 0x40a0, 0x4080, 0x4040, 0x4000, 0x3f80, 0, -0x4080, -0x4000, -0x3fc0, -0x3f80,
      -0x3f60, -0x3f40, -0x3f20, -0x3f00);
  const __m512i all = load_words(codes + step * FourBits::kPairBytes).all;
  const __m512i lowest = _mm512_srlv_epi16(all, _mm512_set1_epi16(static_cast<int16_t>(4 * vector)));
  return {_mm512_permutexvar_epi16(lowest, table)};
}
inline Floats number(E4m3Bits, const char* codes, int64_t input, int vector) {
  return parts_of_256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + input * kTileOutputs + vector * kLanes)));
}
template <class Bits>
inline Words word_of(Bits bits, const char* codes, int64_t step, int vector) {
  const __m512i low = as_words(number(bits, codes, 2 * step, vector)).all;
  return {_mm512_or_si512(_mm512_srli_epi32(low, 16), as_words(number(bits, codes, 2 * step + 1, vector)).all)};
}

// --- across lanes ----------------------------------------------------------------------------------------------------

inline void transpose(Words (&x)[kLanes]) {
  __m512i y[kLanes];
#pragma GCC unroll 8
  for (int i = 0; i < kLanes; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i].all, x[i + 1].all);
    y[i + 1] = _mm512_unpackhi_epi32(x[i].all, x[i + 1].all);
  }
#pragma GCC unroll 8
  for (int i = 0; i < kLanes; i += 4)
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      x[i + 2 * j].all = _mm512_unpacklo_epi64(y[i + j], y[i + j + 2]);
      x[i + 2 * j + 1].all = _mm512_unpackhi_epi64(y[i + j], y[i + j + 2]);
    }
  // x[4 i + j] now has word j of each quarter, of rows 4 i to 4 i + 3.
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512i low = _mm512_shuffle_i32x4(x[j].all, x[4 + j].all, 0x88);
    const __m512i high = _mm512_shuffle_i32x4(x[8 + j].all, x[12 + j].all, 0x88);
    const __m512i low_odd = _mm512_shuffle_i32x4(x[j].all, x[4 + j].all, 0xdd);
    const __m512i high_odd = _mm512_shuffle_i32x4(x[8 + j].all, x[12 + j].all, 0xdd);
    y[j] = _mm512_shuffle_i32x4(low, high, 0x88);
    y[4 + j] = _mm512_shuffle_i32x4(low_odd, high_odd, 0x88);
    y[8 + j] = _mm512_shuffle_i32x4(low, high, 0xdd);
    y[12 + j] = _mm512_shuffle_i32x4(low_odd, high_odd, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) x[i].all = y[i];
}

}  // namespace baton
