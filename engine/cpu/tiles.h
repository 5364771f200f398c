// Products of bf16 in the tiles of AMX, which come to the bits of `add_words`: 16 rows times 16 columns at a time.
//
// A span is 16 words of inputs. Registers 0 to 3 have sums, those behind them rows of inputs, and the last ones words of
// weights. With up to 16 rows the four are side by side, and else two by two.
#pragma once

#include "kernels.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#define BATON_TILES
#endif

namespace baton {

constexpr int kTiledRows = 32;  // at a time

#ifdef BATON_TILES
constexpr bool kHasTiles = true;

// What one thread needs. Another user of the tiles finds them configured as before.
class Tiles {
 public:
  Tiles() {
    if (allowed()) _tile_storeconfig(before_);
  }
  ~Tiles() {
    if (allowed()) _tile_loadconfig(before_);
  }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  // Whether the system lets this process use tiles. If not, vectors do their work.
  static bool allowed() {
    constexpr int kAsk = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
    static const bool answer = syscall(SYS_arch_prctl, kAsk, kTileData) == 0;
    return answer;
  }

  // Adds the products of up to 32 rows with 64 columns to `sums`, [rows][64]; `first`: to zero. A span of weights is
  // [16][64] words. With each span, `lines` cache lines are asked for from `ahead` on.
  void multiply(const char* weights, const bf16* x, int64_t stride, int64_t rows, int64_t spans, bool first, float* sums,
                const char* ahead, int64_t lines) {
    begin(rows, kSpan);
    const char* const input = reinterpret_cast<const char*>(x);
    const auto ask = [&](int64_t span) {
      for (int64_t i = span * lines; i < (span + 1) * lines; ++i) _mm_prefetch(ahead + i * 64, _MM_HINT_T1);
    };
    stride *= sizeof(bf16);
    if (rows <= 16) return side_by_side(weights, input, stride, kSpan, spans, first, sums, ask);
    two_by_two(weights, kRow, input, stride, 64, kSpan, spans, 1, first, sums, kRow, ask);
    two_by_two(weights + 128, kRow, input, stride, 64, kSpan, spans, 1, first, sums + 32, kRow, [](int64_t) {});
  }

  // How many columns `multiply_groups` takes.
  static int64_t columns_of_part(int64_t rows) { return rows <= 16 ? 64 : 32; }

  // What each of some groups comes to by itself in some of the columns, to [groups][rows][those]. The spans of groups, of
  // `words` words each, follow one another. Calls meanwhile(span) with each of them.
  template <class Meanwhile>
  void multiply_groups(const uint32_t* weights, const bf16* x, int64_t stride, int64_t rows, int64_t words, int64_t spans,
                       int64_t groups, float* part, const Meanwhile& meanwhile) {
    begin(rows, words);
    const char *own = reinterpret_cast<const char*>(weights), *input = reinterpret_cast<const char*>(x);
    stride *= sizeof(bf16);
    if (rows > 16)
      return two_by_two(own, kRow, input, stride, words * 4, words, spans, groups, true, part, kSquareRow, meanwhile);
    for (int64_t group = 0; group < groups; ++group, own += spans * words * kRow, input += spans * words * 4)
      side_by_side(own, input, stride, words, spans, true, part + group * rows * 64,
                   [&](int64_t span) { meanwhile(group * spans + span); });
  }

  // Adds the products of 32 rows, `stride` words apart, with 32 columns, [spans][16][32] words, to `sums`, [32][32]; `first`:
  // to zero.
  void multiply_square(const uint32_t* columns, const uint32_t* rows, int64_t stride, int64_t spans, bool first, float* sums) {
    begin(kTiledRows, kSpan);
    two_by_two(reinterpret_cast<const char*>(columns), kSquareRow, reinterpret_cast<const char*>(rows), stride * 4, 64,
               kSpan, spans, 1, first, sums, kSquareRow, [](int64_t) {});
  }

 private:
  static constexpr int64_t kRow = 256;  // of weights
  static constexpr int64_t kSquareRow = kTiledRows * 4;

  void begin(int64_t rows, int64_t words) {
    asm volatile("" ::: "memory");  // what tiles are loaded from has been written
    if (rows == rows_ && words == words_) return;
    rows_ = rows;
    words_ = words;
    alignas(64) uint8_t config[64] = {1};
    const int64_t upper = rows < 16 ? rows : 16;
    const int64_t count[8] = {upper, upper, rows <= 16 ? upper : rows - 16, rows <= 16 ? upper : rows - 16, upper,
                              rows <= 16 ? words : rows - 16, words, words};
    for (int tile = 0; tile < 8; ++tile) {
      const bool inputs = tile == 4 || (tile == 5 && rows > 16);
      config[16 + 2 * tile] = static_cast<uint8_t>(inputs ? words * 4 : 64);  // bytes of a row
      config[48 + tile] = static_cast<uint8_t>(count[tile]);
    }
    asm volatile("" : : "r"(config) : "memory");  // to the compiler the next line reads 8 bytes: it may leave out the others
    _tile_loadconfig(config);
  }

  // The sums of 32 columns, with rows `apart` bytes apart, or zeros.
  static void load_first(bool first, const float* sums, int64_t apart) {
    if (first) {
      _tile_zero(0);
      _tile_zero(1);
    } else {
      _tile_loadd(0, sums, apart);
      _tile_loadd(1, sums + 16, apart);
    }
  }
  static void load_second(bool first, const float* sums, int64_t apart) {
    if (first) {
      _tile_zero(2);
      _tile_zero(3);
    } else {
      _tile_loadd(2, sums, apart);
      _tile_loadd(3, sums + 16, apart);
    }
  }

  static void store_first(float* sums, int64_t apart) {
    _tile_stored(0, sums, apart);
    _tile_stored(1, sums + 16, apart);
  }
  static void store_second(float* sums, int64_t apart) {
    _tile_stored(2, sums, apart);
    _tile_stored(3, sums + 16, apart);
  }

  template <class Meanwhile>
  static void side_by_side(const char* weights, const char* x, int64_t stride, int64_t words, int64_t spans, bool first,
                           float* sums, const Meanwhile& meanwhile) {
    load_first(first, sums, kRow);
    load_second(first, sums + 32, kRow);
    for (int64_t span = 0; span < spans; ++span, weights += words * kRow, x += words * 4) {
      _tile_loadd(4, x, stride);
      _tile_loadd(5, weights, kRow);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, weights + 64, kRow);
      _tile_dpbf16ps(1, 4, 6);
      _tile_loadd(7, weights + 128, kRow);
      _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(5, weights + 192, kRow);
      _tile_dpbf16ps(3, 4, 5);
      asm volatile("" ::: "memory");  // it may write to what tiles have been loaded from
      meanwhile(span);
    }
    store_first(sums, kRow);
    store_second(sums + 32, kRow);
  }

  // 17 to 32 rows, `stride` bytes apart and those of a span `step` bytes behind those of the one before, times 32 columns; of
  // each group of spans by itself. Half of the sums is stored while the other half is multiplied: a store waits for its products.
  template <class Meanwhile>
  void two_by_two(const char* weights, int64_t row, const char* x, int64_t stride, int64_t step, int64_t words, int64_t spans,
                  int64_t groups, bool first, float* sums, int64_t apart, const Meanwhile& meanwhile) const {
    const int64_t below = 16 * (apart / int64_t{sizeof(float)}), size = rows_ * (apart / int64_t{sizeof(float)});
    for (int64_t group = 0; group < groups; ++group, sums += size) {
      load_first(first, sums, apart);
      for (int64_t span = 0; span < spans; ++span, weights += words * row, x += step) {
        _tile_loadd(4, x, stride);
        _tile_loadd(6, weights, row);
        _tile_loadd(7, weights + 64, row);
        _tile_loadd(5, x + 16 * stride, stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (!span) {
          if (group) store_second(sums - size + below, apart);
          load_second(first, sums + below, apart);
        }
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        if (span + 1 == spans) store_first(sums, apart);
        asm volatile("" ::: "memory");  // it may write to what tiles have been loaded from
        meanwhile(group * spans + span);
      }
    }
    store_second(sums - size + below, apart);
  }

  int64_t rows_ = 0, words_ = 0;
  alignas(64) uint8_t before_[64];
};

#else
constexpr bool kHasTiles = false;

class Tiles {
 public:
  static bool allowed() { return false; }
  void multiply(const char*, const bf16*, int64_t, int64_t, int64_t, bool, float*, const char*, int64_t) {}
  void multiply_square(const uint32_t*, const uint32_t*, int64_t, int64_t, bool, float*) {}
};

#endif

}  // namespace baton
