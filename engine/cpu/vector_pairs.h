// Factors of bf16 as two floats, on CPUs that multiply these quicker than pairs of bf16: what `vector.h` promises.
#pragma once

namespace baton {

struct Pair {
  Floats even, odd;  // the two of each word
};
template <class T>
struct FactorsOf {
  using Type = Floats;
};
template <>
struct FactorsOf<bf16> {
  using Type = Pair;
};
template <class T>
using Factors = typename FactorsOf<T>::Type;
template <class T>
Factors<T> factors(Words x) {
  if constexpr (sizeof(T) == 2)
    return {as_floats(shifted_left<16>(x)), as_floats(x & filled(static_cast<int32_t>(0xffff0000)))};
  else
    return as_floats(x);
}
inline Floats add_products(float, Floats a, Floats b, Floats sum) { return fma(a, b, sum); }
inline Floats add_products(bf16, Pair a, Pair b, Floats sum) { return fma(a.even, b.even, fma(a.odd, b.odd, sum)); }

template <class Bits>
Floats decoded(float, Bits, const char* codes, int64_t step, int vector) {
  return number(Bits{}, codes, step, vector);
}
template <class Bits>
Pair decoded(bf16, Bits, const char* codes, int64_t step, int vector) {
  return {number(Bits{}, codes, 2 * step, vector), number(Bits{}, codes, 2 * step + 1, vector)};
}

template <class T>
using Kept = float;
inline void keep(float, float* to, Floats x) { store16(to, x); }
inline void keep(bf16, float* to, Floats x) { store16(to, as_bf16(x)); }
inline Floats kept(float, const float* from, int64_t word) { return filled(from[word]); }
inline Pair kept(bf16, const float* from, int64_t word) { return {filled(from[2 * word]), filled(from[2 * word + 1])}; }

constexpr int kBeside = 1;
inline void load_beside(const float* const* rows, int64_t i, int64_t count, Floats (&x)[kBeside]) {
  x[0] = load16(rows[0] + i, count);
}
inline void load_beside(const bf16* const* rows, int64_t i, int64_t count, Pair (&x)[kBeside]) {
  x[0] = {load16(rows[0] + i, count), load16(rows[1] + i, count)};
}
template <class T>
void in_order(T, Floats&, Floats&) {}

}  // namespace baton
