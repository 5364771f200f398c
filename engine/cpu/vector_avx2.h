// 16 lanes in two registers, on CPUs with AVX2 and FMA: what `vector.h` promises.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace baton {

constexpr int kRegisters = 8;

struct Floats {
  __m256 low, high;
};
struct Words {
  __m256i low, high;
};
struct Mask {
  __m256i low, high;  // all bits of a lane, or none
};

// --- lanes -----------------------------------------------------------------------------------------------------------

inline Words counted() { return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)}; }
inline Words filled(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Mask greater(Words a, Words b) { return {_mm256_cmpgt_epi32(a.low, b.low), _mm256_cmpgt_epi32(a.high, b.high)}; }
inline Mask first_lanes(int64_t count) { return greater(filled(count < kLanes ? int32_t(count) : kLanes), counted()); }
template <int Predicate>
Mask compared(Floats a, Floats b) {
  return {_mm256_castps_si256(_mm256_cmp_ps(a.low, b.low, Predicate)),
          _mm256_castps_si256(_mm256_cmp_ps(a.high, b.high, Predicate))};
}
inline Mask greater(Floats a, Floats b) { return compared<_CMP_GT_OQ>(a, b); }
inline Mask unequal(Floats a, Floats b) { return compared<_CMP_NEQ_UQ>(a, b); }
inline Mask operator&(Mask a, Mask b) { return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)}; }
inline Mask operator~(Mask a) {
  const __m256i ones = _mm256_set1_epi32(-1);
  return {_mm256_xor_si256(a.low, ones), _mm256_xor_si256(a.high, ones)};
}
inline Floats select(Mask mask, Floats yes, Floats no) {
  return {_mm256_blendv_ps(no.low, yes.low, _mm256_castsi256_ps(mask.low)),
          _mm256_blendv_ps(no.high, yes.high, _mm256_castsi256_ps(mask.high))};
}
inline Words select(Mask mask, Words yes, Words no) {
  return {_mm256_blendv_epi8(no.low, yes.low, mask.low), _mm256_blendv_epi8(no.high, yes.high, mask.high)};
}

// --- arithmetic ------------------------------------------------------------------------------------------------------

inline Floats zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Floats filled(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats operator+(Floats a, Floats b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline Floats fma(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Floats fms(Floats a, Floats b, Floats c) {
  return {_mm256_fmsub_ps(a.low, b.low, c.low), _mm256_fmsub_ps(a.high, b.high, c.high)};
}
inline Floats fnma(Floats a, Floats b, Floats c) {
  return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}
inline Floats max(Floats a, Floats b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline Floats min(Floats a, Floats b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
inline Floats whole(Floats x) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.low, kNearest), _mm256_round_ps(x.high, kNearest)};
}
inline __m256 power_of_two(__m256i n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
// In two halves of n, so that what is too small for an exponent still gets its last bits, and what is too large is ∞.
inline __m256 times_power_of_two(__m256 x, __m256 n) {
  const __m256i all = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(all, 1);
  return _mm256_mul_ps(_mm256_mul_ps(x, power_of_two(half)), power_of_two(_mm256_sub_epi32(all, half)));
}
inline Floats times_power_of_two(Floats x, Floats n) {
  n = max(min(n, filled(250.0f)), filled(-250.0f));
  return {times_power_of_two(x.low, n.low), times_power_of_two(x.high, n.high)};
}
inline float sum_of(Floats x) { return sum_of(_mm256_add_ps(x.low, x.high)); }
inline float largest_of(Floats x) {
  const __m256 eight = _mm256_max_ps(x.low, x.high);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

inline Words operator+(Words a, Words b) { return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)}; }
inline Words operator-(Words a, Words b) { return {_mm256_sub_epi32(a.low, b.low), _mm256_sub_epi32(a.high, b.high)}; }
inline Words operator&(Words a, Words b) { return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)}; }
inline Words operator|(Words a, Words b) { return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)}; }
template <int N>
Words shifted_left(Words x) {
  return {_mm256_slli_epi32(x.low, N), _mm256_slli_epi32(x.high, N)};
}
template <int N>
Words shifted_right(Words x) {
  return {_mm256_srli_epi32(x.low, N), _mm256_srli_epi32(x.high, N)};
}
template <int N>
Words signed_right(Words x) {
  return {_mm256_srai_epi32(x.low, N), _mm256_srai_epi32(x.high, N)};
}
inline Words shifted_left(Words x, int n) {
  return {_mm256_sll_epi32(x.low, _mm_cvtsi32_si128(n)), _mm256_sll_epi32(x.high, _mm_cvtsi32_si128(n))};
}
inline Words shifted_right(Words x, int n) {
  return {_mm256_srl_epi32(x.low, _mm_cvtsi32_si128(n)), _mm256_srl_epi32(x.high, _mm_cvtsi32_si128(n))};
}
inline Floats to_floats(Words x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }
inline Floats as_floats(Words x) { return {_mm256_castsi256_ps(x.low), _mm256_castsi256_ps(x.high)}; }
inline Words as_words(Floats x) { return {_mm256_castps_si256(x.low), _mm256_castps_si256(x.high)}; }

// --- memory ----------------------------------------------------------------------------------------------------------

inline Words load_words(const void* from) {
  const auto* at = static_cast<const __m256i*>(from);
  return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
inline Words load_words(const void* from, int64_t count) {
  if (count >= kLanes) return load_words(from);
  const auto* at = static_cast<const int*>(from);
  const Mask mask = first_lanes(count);
  return {_mm256_maskload_epi32(at, mask.low), _mm256_maskload_epi32(at + 8, mask.high)};
}
inline void store_words(void* to, Words x) {
  auto* at = static_cast<__m256i*>(to);
  _mm256_storeu_si256(at, x.low);
  _mm256_storeu_si256(at + 1, x.high);
}
inline void store_words(void* to, Words x, int64_t count) {
  if (count >= kLanes) return store_words(to, x);
  auto* at = static_cast<int*>(to);
  const Mask mask = first_lanes(count);
  _mm256_maskstore_epi32(at, mask.low, x.low);
  _mm256_maskstore_epi32(at + 8, mask.high, x.high);
}

// There is no mask for two bytes: what is less than a vector goes through one in memory.
inline Words load_halves(const bf16* from, int64_t count) {
  bf16 part[kLanes];
  if (count < kLanes) {
    std::memset(part, 0, sizeof part);
    if (count > 0) std::memcpy(part, from, count * sizeof(bf16));
    from = part;
  }
  const auto* at = reinterpret_cast<const __m128i*>(from);
  return {_mm256_cvtepu16_epi32(_mm_loadu_si128(at)), _mm256_cvtepu16_epi32(_mm_loadu_si128(at + 1))};
}

inline Floats load16(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline Floats load16(const bf16* from) { return as_floats(shifted_left<16>(load_halves(from, kLanes))); }
inline Floats load16(const fp16* from) {
  const auto* at = reinterpret_cast<const __m128i*>(from);
  return {_mm256_cvtph_ps(_mm_loadu_si128(at)), _mm256_cvtph_ps(_mm_loadu_si128(at + 1))};
}
inline Floats load16(const float* from, int64_t count) { return as_floats(load_words(from, count)); }
inline Floats load16(const bf16* from, int64_t count) { return as_floats(shifted_left<16>(load_halves(from, count))); }
inline __m128i load_bytes(const void* from, int64_t count) {
  int8_t part[kLanes] = {};
  if (count < kLanes) {
    if (count > 0) std::memcpy(part, from, count);
    from = part;
  }
  return _mm_loadu_si128(static_cast<const __m128i*>(from));
}
inline Floats load16(const int8_t* from, int64_t count) {
  const __m128i codes = load_bytes(from, count);
  return to_floats({_mm256_cvtepi8_epi32(codes), _mm256_cvtepi8_epi32(_mm_srli_si128(codes, 8))});
}
// As fp16, of which no number is too small, with an exponent that is 8 too low.
inline Floats parts_of_256(__m128i codes) {
  const __m256i halves = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);
  const __m256i there = _mm256_and_si256(halves, _mm256_set1_epi16(static_cast<int16_t>(0xbfff)));
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(there)), _mm256_cvtph_ps(_mm256_extracti128_si256(there, 1))};
}
inline Floats load16(const e4m3* from, int64_t count) { return parts_of_256(load_bytes(from, count)) * filled(256.0f); }

// As float32 with the lower half yet to be cut off; what is no number stays none.
inline Words rounded(Floats x) {
  const Words bits = as_words(x), odd = shifted_right<31>(shifted_left<15>(bits));
  return select(unequal(x, x), bits | filled(0x00400000), bits + filled(0x7fff) + odd);
}
inline Words upper_halves() { return filled(static_cast<int32_t>(0xffff0000)); }
inline Floats as_bf16(Floats x) { return as_floats(rounded(x) & upper_halves()); }
inline Words pairs(Floats low, Floats high) { return shifted_right<16>(rounded(low)) | (rounded(high) & upper_halves()); }

inline void store16(float* to, Floats x) { store_words(to, as_words(x)); }
inline void store16(bf16* to, Floats x) {
  const Words halves = shifted_right<16>(rounded(x));
  const __m256i mixed = _mm256_packus_epi32(halves.low, halves.high);  // of each in turn a quarter
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(mixed, 0xd8));
}
inline void store16(float* to, Floats x, int64_t count) { store_words(to, as_words(x), count); }
inline void store16(bf16* to, Floats x, int64_t count) {
  if (count >= kLanes) return store16(to, x);
  bf16 part[kLanes];
  store16(part, x);
  if (count > 0) std::memcpy(to, part, count * sizeof(bf16));
}
inline void store_bytes(void* to, Words x, int64_t count) {
  const __m256i mixed = _mm256_packs_epi32(x.low, x.high);
  const __m256i halves = _mm256_permute4x64_epi64(mixed, 0xd8);
  int8_t part[kLanes];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(part),
                   _mm_packs_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
  if (count > 0) std::memcpy(to, part, count < kLanes ? count : kLanes);
}
inline void store16(int8_t* to, Floats x, int64_t count) {
  store_bytes(to, {_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)}, count);
}

// --- codes -----------------------------------------------------------------------------------------------------------

inline Floats number(FourBits, const char* codes, int64_t input, int vector) {
  const Words all = load_words(codes + input / 2 * FourBits::kPairBytes);
  return to_floats((shifted_right(all, 4 * vector + 16 * static_cast<int>(input % 2)) & filled(15)) - filled(8));
}
inline Floats number(EightBits, const char* codes, int64_t input, int vector) {
  const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + input * kTileOutputs + vector * kLanes));
  return to_floats(Words{_mm256_cvtepi8_epi32(all), _mm256_cvtepi8_epi32(_mm_srli_si128(all, 8))});
}
inline Floats number(E4m3Bits, const char* codes, int64_t input, int vector) {
  return parts_of_256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + input * kTileOutputs + vector * kLanes)));
}

// --- across lanes ----------------------------------------------------------------------------------------------------

// Rows of 8 words into columns.
inline void transpose8(__m256i (&x)[8]) {
  __m256i y[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    y[i] = _mm256_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm256_unpackhi_epi32(x[i], x[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4)
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      x[i + 2 * j] = _mm256_unpacklo_epi64(y[i + j], y[i + j + 2]);
      x[i + 2 * j + 1] = _mm256_unpackhi_epi64(y[i + j], y[i + j + 2]);
    }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    y[j] = _mm256_permute2x128_si256(x[j], x[4 + j], 0x20);
    y[4 + j] = _mm256_permute2x128_si256(x[j], x[4 + j], 0x31);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) x[i] = y[i];
}

inline void transpose(Words (&x)[kLanes]) {
  __m256i quarter[4][8];
  for (int i = 0; i < 8; ++i) {
    quarter[0][i] = x[i].low;
    quarter[1][i] = x[8 + i].low;
    quarter[2][i] = x[i].high;
    quarter[3][i] = x[8 + i].high;
  }
  for (auto& one : quarter) transpose8(one);
  for (int i = 0; i < 8; ++i) {
    x[i] = {quarter[0][i], quarter[1][i]};
    x[8 + i] = {quarter[2][i], quarter[3][i]};
  }
}

}  // namespace baton
