// Attention to keys and values where they lie in pages.
//
// A context is gone over in blocks of 64 positions from position 0 on, with a running maximum and sum (Milakov and
// Gimelshein, "Online normalizer calculation for softmax", 2018), and eight blocks make a segment, which begins anew.
// Segments are folded into one result in their order. What a query does not see weighs exactly nothing and changes nothing.
// So a query's result does not depend on which other queries it shared its keys with, nor on who computed which segment.
//
// Two loops compute the same: one for few queries to a KV head, which has keys in the lanes of its vectors, and whose
// segments threads share; and one for many, which has queries in its lanes.
#pragma once

#include <algorithm>
#include <atomic>

#include "tiles.h"

namespace baton {

constexpr int kKeys = 64;      // to a block
constexpr int kSegment = 512;  // positions
constexpr int kFew = 24;       // queries
constexpr int kMostHeadDim = 256;
constexpr int kVectors = kHasTiles ? 2 : 3;  // of many queries that attend together
constexpr int kWide = kVectors * kLanes;     // so many
constexpr int kWides = kHasTiles ? 8 : 4;    // groups of them that share a block
constexpr int kVectorsAtOnce = kMany ? kVectors : 1;  // of those, in registers at a time: 8 × 3 sums or 4,
template <class T>
constexpr int kElements = kMany && !kApart<T> ? 8 : 4;  // with so many keys, or numbers of a head
constexpr int kScoredAtOnce = kMany ? 12 : 4;           // few queries that share 16 keys in registers,
template <class T>  // or with many registers 64, so that one query's sums don't wait for each other,
constexpr int kScoredWide = kApart<T> ? 3 : 6;
constexpr int kGatheredAtOnce = kMany ? 12 : 4;         // and some numbers of values
static_assert(!kHasTiles || kWide == kTiledRows);

alignas(64) const float kZeros[kMostHeadDim] = {};

struct Shape {
  int64_t heads, kv_heads, head_dim, page_size, layers;
  int64_t element;              // bytes of a number in a page; 1: codes, with a scale for each row
  int64_t fp8;                  // 1: codes are e4m3, or else int8
  int64_t group() const { return heads / kv_heads; }  // query heads that share a KV head
  int64_t padded() const { return round_up(head_dim, 32); }

  // A page is [kv_heads][layers] parts. A part is the rows of K of all tokens, then of V, and of codes the rows' scales.
  bool codes() const { return element == 1; }
  int64_t row_bytes() const { return head_dim * element; }
  int64_t scales_at() const { return 2 * page_size * row_bytes(); }
  int64_t part_bytes() const { return scales_at() + (codes() ? 2 * page_size * int64_t{sizeof(float)} : 0); }
  int64_t page_bytes() const { return kv_heads * layers * part_bytes(); }
  int64_t part(int64_t page, int64_t head, int64_t layer) const {
    return ((page * kv_heads + head) * layers + layer) * part_bytes();
  }
};

// Rows of one sequence that follow each other; one alone is a run, too.
struct Run {
  int64_t row, rows, position;  // the first one's
  const int64_t* pages;         // of its sequence, in the order of its positions
  int64_t part;                 // where what its segments come to is kept
  int64_t end() const { return position + rows; }
  int64_t segments() const { return (end() + kSegment - 1) / kSegment; }
};

// What one thread computes at a time: of one KV head a segment of a run of few queries, or all of 192 queries of many.
struct Unit {
  int64_t run, cost;
  int32_t head, at;  // the segment, or the first query
};

// Memory that is needed soon and lies where no prefetcher foresees it. It is asked for a few lines at a time, between
// other work: a core waits for a line once it has more on their way than it can keep track of.
struct Ahead {
  static constexpr int64_t kLine = 64;
  struct Stretch {
    const char* from;
    int64_t bytes;
  };
  Stretch stretches[4 * kKeys];
  int count, at;
  int64_t lines;  // of all

  void clear() { count = at = 0, lines = 0; }
  void add(const void* from, int64_t bytes) {
    stretches[count++] = {static_cast<const char*>(from), bytes};
    lines += (bytes + kLine - 1) / kLine;
  }
  void ask(int64_t most) {
    for (; most > 0 && at < count; ++at) {
      Stretch& next = stretches[at];
      for (; most > 0 && next.bytes > 0; --most, next.from += kLine, next.bytes -= kLine) prefetch(next.from);
      if (next.bytes > 0) return;
    }
  }
};

// Up to 48 queries, or with tiles 32, and what is known of their output. The lanes in use fill `vectors` vectors.
struct Lanes {
  alignas(64) uint32_t queries[kMostHeadDim * kWide];  // [words of a head][48], with zeros up to a multiple of 16 words
  alignas(64) float output[kMostHeadDim * kWide];      // [head_dim][48], of this segment, not divided by `sum`
  alignas(64) float folded[kMostHeadDim * kWide];      // likewise of those before
  alignas(64) int32_t last[kWide];                     // the last position that each one sees
  alignas(64) float most[2 * kWide];                   // the largest exponent so far, of this segment and those before
  alignas(64) float sum[2 * kWide];
  alignas(64) float shrink[kWide];  // what the output so far is worth once this block's maximum is known
  int64_t first_position, last_position;
  int vectors;
};

// What one thread needs.
struct Scratch {
  Lanes lanes[kWides];
  Ahead ahead;
  alignas(64) float scores[kKeys * kWide];                // [64][48], or of few queries [queries][64]
  alignas(64) uint32_t weights[kKeys * kWide];            // [words of keys][48], or [queries][64 numbers]
  alignas(64) uint32_t columns[kKeys * kMostHeadDim];     // values [words of keys][head_dim] or for tiles [head_dim][words
                                                          // of keys], or keys [4][words][16]
  alignas(64) uint32_t rows[kKeys * kMostHeadDim / 2];    // keys for tiles, [64][padded]
  alignas(64) float part[kFew * (kMostHeadDim + 2)];      // what few queries come to
  alignas(64) float numbers[2 * kKeys * kMostHeadDim];    // keys and values of a block whose pages hold codes
  float shrink[kFew];
  const void* keys[kKeys + 1];
  const void* values[kKeys + 1];
};

template <class T>
struct Attention {
  const Shape& shape;
  const char* pool;  // [pages][kv_heads][layers] parts
  const T* queries;  // of each run in turn [kv_heads][its rows][group][padded]
  T* output;         // [rows][heads][head_dim], rows `stride` apart
  int64_t stride;
  float* parts;      // of each run of few queries in turn [kv_heads][segments][its queries][padded + 2]
  std::atomic<int32_t>* ended;  // [runs][kv_heads]: segments of this layer
  int64_t layer, window;        // window 0: all are seen
  float scale;                  // of scores

  // --- what both share ------------------------------------------------------------------------------------------------

  float factor() const { return kExponent<T> * scale; }
  int words() const { return static_cast<int>(shape.head_dim) / kWord<T>; }
  int64_t first_seen(int64_t position) const { return window && position >= window ? position + 1 - window : 0; }
  const T* queries_of(const Run& run, int64_t head) const {
    return queries + (run.row * shape.heads + head * run.rows * shape.group()) * shape.padded();
  }
  T* output_of(const Run& run, int64_t head, int64_t query) const {
    const int64_t group = shape.group();
    return output + (run.row + query / group) * stride + (head * group + query % group) * shape.head_dim;
  }

  // A row of a part; of codes, made numbers in `to`.
  const void* row_of(const char* part, int64_t row, T* to) const {
    const char* const from = part + row * shape.row_bytes();
    if (!shape.codes()) return from;
    float scale;
    std::memcpy(&scale, part + shape.scales_at() + row * sizeof scale, sizeof scale);
    if (shape.fp8)
      copy_row(reinterpret_cast<const e4m3*>(from), to, shape.head_dim, scale);
    else
      copy_row(reinterpret_cast<const int8_t*>(from), to, shape.head_dim, scale);
    return to;
  }

  // Calls with each page's part of [first, end): the first of its keys, and how many. V lies page_size rows later.
  template <class Work>
  void by_page(const Run& run, int64_t head, int64_t first, int64_t end, const Work& work) const {
    for (int64_t rows; first < end; first += rows) {
      const int64_t offset = first % shape.page_size;
      rows = least(shape.page_size - offset, end - first);
      work(pool + shape.part(run.pages[first / shape.page_size], head, layer), offset, rows);
    }
  }

  // Where K and V of the block at `first` lie, of which [from, end) are read and the rest is zeros.
  void find(const Run& run, int64_t head, int64_t first, int64_t from, int64_t end, Scratch& scratch) const {
    int at = 0;
    const auto zeros_until = [&](int64_t until) {
      for (; at < until; ++at) scratch.keys[at] = scratch.values[at] = kZeros;
    };
    zeros_until(from - first);
    auto* to = reinterpret_cast<T*>(scratch.numbers);
    by_page(run, head, from, end, [&](const char* part, int64_t row, int64_t rows) {
      for (const int64_t last = row + rows; row < last; ++row, ++at, to += 2 * shape.head_dim) {
        scratch.keys[at] = row_of(part, row, to);
        scratch.values[at] = row_of(part, shape.page_size + row, to + shape.head_dim);
      }
    });
    zeros_until(kKeys);
  }

  // K and V of [first, end) are needed next.
  void look(const Run& run, int64_t head, int64_t first, int64_t end, Ahead& ahead) const {
    ahead.clear();
    by_page(run, head, first, end, [&](const char* part, int64_t row, int64_t rows) {
      for (int64_t at : {row, shape.page_size + row}) {
        ahead.add(part + at * shape.row_bytes(), rows * shape.row_bytes());
        if (shape.codes()) ahead.add(part + shape.scales_at() + at * sizeof(float), rows * sizeof(float));
      }
    });
  }

  static Floats base_of(Floats most) { return select(unequal(most, filled(kNever)), most, zeros()); }

  // --- few queries ----------------------------------------------------------------------------------------------------

  // Positions of the unit: what the run's first row sees of the segment, and its last.
  void span(const Run& run, const Unit& unit, int64_t& from, int64_t& to) const {
    from = std::max(first_seen(run.position), int64_t{unit.at} * kSegment);
    to = least(run.end(), (int64_t{unit.at} + 1) * kSegment);
  }

  void attend_few(const Run& run, int64_t run_number, const Unit& unit, Scratch& scratch, const Run* next_run,
                  const Unit* next) const {
    const int64_t count = run.rows * shape.group(), padded = shape.padded(), segments = run.segments();
    const bool alone = segments == 1;
    const int64_t size = count * (padded + 2);
    float* const all = parts + run.part + unit.head * segments * size;
    float* const part = alone ? scratch.part : all + unit.at * size;
    float *const most = part + count * padded, *const sum = most + count;
    std::fill(part, most, 0.0f);
    std::fill(most, sum, kNever);
    std::fill(sum, sum + count, 0.0f);
    int64_t from, to;
    span(run, unit, from, to);
    const Kept<T>* const query = kept_queries(queries_of(run, unit.head), count, scratch);
    for (int64_t first = from / kKeys * kKeys; first < to; first += kKeys) {
      const int64_t end = least(first + kKeys, to), begin = std::max(first, from);
      find(run, unit.head, first, begin, end, scratch);
      if (end < to) {
        look(run, unit.head, end, least(end + kKeys, to), scratch.ahead);
      } else if (next) {
        int64_t next_from, next_to;
        span(*next_run, *next, next_from, next_to);
        look(*next_run, next->head, next_from, least(next_from / kKeys * kKeys + kKeys, next_to), scratch.ahead);
      } else {
        scratch.ahead.clear();
      }
      score_few(query, count, static_cast<int>(end - first), scratch);
      for (int64_t q = 0; q < count; ++q) {
        const int64_t position = run.position + q / shape.group();
        soften_few(q, first_seen(position) - first, position + 1 - first, most, sum, scratch);
      }
      gather(count, static_cast<int>(end - first), part, scratch);
    }
    if (alone) return finish(run, unit.head, part);
    if (ended[run_number * shape.kv_heads + unit.head].fetch_add(1, std::memory_order_acq_rel) + 1 < segments) return;
    ended[run_number * shape.kv_heads + unit.head].store(0, std::memory_order_relaxed);
    for (int64_t q = 0; q < count; ++q) fold(all, segments, size, count, q, padded);
    finish(run, unit.head, all);
  }

  // [count][padded]
  const Kept<T>* kept_queries(const T* query, int64_t count, Scratch& scratch) const {
    if constexpr (std::is_same_v<T, Kept<T>>) {
      return query;
    } else {
      auto* const to = reinterpret_cast<Kept<T>*>(scratch.lanes[0].queries);
      for (int64_t i = 0; i < count * shape.padded(); i += kLanes) keep(T{}, to + i, load16(query + i));
      return to;
    }
  }

  // Scores [count][64] of a block, of which `keys` are there.
  void score_few(const Kept<T>* from, int64_t count, int keys, Scratch& scratch) const {
    const int pieces = (keys + kLanes - 1) / kLanes, size = words() * kLanes;
    for (int piece = 0; piece < pieces; ++piece)
      into_columns(scratch.keys + piece * kLanes, scratch.columns + piece * size);
    const int64_t lines = (scratch.ahead.lines / 2 + words() - 1) / words();
    const int64_t stride = shape.padded();
    if constexpr (kMany)
      if (count <= kScoredWide<T> && pieces > 1)
        return with_count<kScoredWide<T>>(count, [&](auto some) {
          dots<some, 4>(from, stride, scratch.columns, size, scratch.scores, scratch.ahead, lines);
        });
    for (int piece = 0; piece < pieces; ++piece)
      for (int64_t q = 0; q < count; q += kScoredAtOnce)
        with_count<kScoredAtOnce>(count - q, [&](auto some) {
          dots<some, 1>(from + q * stride, stride, scratch.columns + piece * size, size,
                        scratch.scores + q * kKeys + piece * kLanes, scratch.ahead, q ? 0 : (lines + pieces - 1) / pieces);
        });
  }

  // Some queries times P · 16 keys, each word of which lies in a column.
  template <int Q, int P>
  void dots(const Kept<T>* query, int64_t stride, const uint32_t* columns, int size, float* scores, Ahead& ahead,
            int64_t lines) const {
    Floats sum[Q][P];
#pragma GCC unroll 16
    for (int q = 0; q < Q; ++q)
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) sum[q][p] = zeros();
    add_words<T>(words(), sum, [&](int64_t w, Part<T>(&part)[Q][P]) {
      Factors<T> column[P];
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) column[p] = factors<T>(load_words(columns + p * size + w * kLanes));
      ahead.ask(lines);
#pragma GCC unroll 16
      for (int q = 0; q < Q; ++q) {
        const Factors<T> word = kept(T{}, query + q * stride, w);
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) part[q][p] = add_products(T{}, column[p], word, part[q][p]);
      }
    });
#pragma GCC unroll 16
    for (int q = 0; q < Q; ++q)
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) store16(scores + q * kKeys + p * kLanes, sum[q][p]);
  }

  // 16 rows of words into columns.
  void into_columns(const void* const* rows, uint32_t* columns) const {
    for (int w = 0; w < words(); w += kLanes) {
      Words x[kLanes];
#pragma GCC unroll 16
      for (int k = 0; k < kLanes; ++k) x[k] = load_words(static_cast<const uint32_t*>(rows[k]) + w, words() - w);
      transpose(x);
      for (int i = 0; i < kLanes && w + i < words(); ++i) store_words(columns + (w + i) * kLanes, x[i]);
    }
  }

  // From a block's scores of one query to weights; it sees [from, to) of the 64.
  void soften_few(int64_t q, int64_t from, int64_t to, float* most, float* sum, Scratch& scratch) const {
    Floats x[kKeys / kLanes], largest = filled(kNever);
    for (int i = 0; i < kKeys / kLanes; ++i) {
      x[i] = load16(scratch.scores + q * kKeys + i * kLanes);
      if (from > 0 || to < kKeys) {
        const Mask seen = first_lanes(to - i * kLanes) & ~first_lanes(from - i * kLanes);
        x[i] = select(seen, x[i], filled(kNever));
      }
      largest = max(largest, x[i]);
    }
    const Floats scale = filled(factor());
    const float old = most[q];
    most[q] = std::max(old, largest_of(largest) * factor());
    const Floats base = base_of(filled(most[q]));
    auto* const weights = reinterpret_cast<Kept<T>*>(scratch.weights) + q * kKeys;
    for (int i = 0; i < kKeys / kLanes; ++i) {
      x[i] = power(T{}, fms(x[i], scale, base));
      keep(T{}, weights + i * kLanes, x[i]);
    }
    float shrink[kLanes];
    store16(shrink, power(T{}, filled(old) - base));
    scratch.shrink[q] = shrink[0];
    sum[q] = sum[q] * shrink[0];
    sum[q] = sum[q] + sum_of(((x[0] + x[1]) + x[2]) + x[3]);
  }

  // Adds a block's values, weighted, to what the queries have so far: 32 of head_dim at a time.
  void gather(int64_t count, int keys, float* part, Scratch& scratch) const {
    const int cells = (keys + kWord<T> - 1) / kWord<T>;
    const int64_t steps = cells * shape.padded() / (kBeside * kLanes), lines = (scratch.ahead.lines + 2 * steps - 1) / (2 * steps);
    for (int64_t q = 0; q < count; q += kGatheredAtOnce)
      with_count<kGatheredAtOnce>(count - q, [&](auto some) {
        gather_some<some>(reinterpret_cast<const Kept<T>*>(scratch.weights) + q * kKeys, cells,
                          scratch.shrink + q, part + q * shape.padded(), scratch, q ? 0 : lines);
      });
  }

  template <int Q>
  void gather_some(const Kept<T>* weights, int cells, const float* shrink, float* part, Scratch& scratch,
                   int64_t lines) const {
    const int64_t padded = shape.padded();
    const auto* values = reinterpret_cast<const T* const*>(scratch.values);
    for (int64_t i = 0; i < shape.head_dim; i += kBeside * kLanes) {
      Floats sum[Q][kBeside];
#pragma GCC unroll 16
      for (int q = 0; q < Q; ++q)
#pragma GCC unroll 2
        for (int v = 0; v < kBeside; ++v) sum[q][v] = load16(part + q * padded + i + v * kLanes) * filled(shrink[q]);
      add_words<T>(cells, sum, [&](int64_t cell, Part<T>(&part)[Q][kBeside]) {
        scratch.ahead.ask(lines);
        Factors<T> value[kBeside];
        load_beside(values + cell * kWord<T>, i, shape.head_dim - i, value);
#pragma GCC unroll 16
        for (int q = 0; q < Q; ++q) {
          const Factors<T> weight = kept(T{}, weights + q * kKeys, cell);
#pragma GCC unroll 2
          for (int v = 0; v < kBeside; ++v) part[q][v] = add_products(T{}, value[v], weight, part[q][v]);
        }
      });
#pragma GCC unroll 16
      for (int q = 0; q < Q; ++q)
#pragma GCC unroll 2
        for (int v = 0; v < kBeside; ++v) store16(part + q * padded + i + v * kLanes, sum[q][v]);
    }
  }

  // A query's segments, into the first.
  void fold(float* part, int64_t segments, int64_t size, int64_t count, int64_t q, int64_t padded) const {
    float *const to = part + q * padded, &most = part[count * padded + q], &sum = part[count * padded + count + q];
    for (int64_t segment = 1; segment < segments; ++segment) {
      const float* const next = part + segment * size;
      const float next_most = next[count * padded + q], next_sum = next[count * padded + count + q];
      const Floats largest = filled(std::max(most, next_most)), base = base_of(largest);
      const Floats mine = power(T{}, filled(most) - base), theirs = power(T{}, filled(next_most) - base);
      for (int64_t i = 0; i < padded; i += kLanes)
        store16(to + i, fma(load16(next + q * padded + i), theirs, load16(to + i) * mine));
      float total[kLanes];
      store16(total, fma(filled(next_sum), theirs, filled(sum) * mine));
      sum = total[0];
      most = std::max(most, next_most);
    }
  }

  void finish(const Run& run, int64_t head, const float* part) const {
    const int64_t count = run.rows * shape.group(), padded = shape.padded();
    const float* const sum = part + count * (padded + 1);
    for (int64_t q = 0; q < count; ++q) {
      const Floats share = filled(1.0f) / filled(sum[q]);
      T* const to = output_of(run, head, q);
      for (int64_t i = 0; i < shape.head_dim; i += 32) {
        const int64_t left = shape.head_dim - i;
        Floats first = load16(part + q * padded + i), second = load16(part + q * padded + i + kLanes);
        in_order(T{}, first, second);
        store16(to + i, first * share, left);
        store16(to + i + kLanes, second * share, left - kLanes);
      }
    }
  }

  // --- observed rows --------------------------------------------------------------------------------------------------

  // Adds to `weights` how much the queries of one KV head in a row of a run attend to each page. The scores are computed
  // twice: for their maximum and sum, and then for the weights.
  void observe(const Run& run, int64_t head, int64_t row, float* weights, Scratch& scratch) const {
    const int64_t group = shape.group(), to = run.position + row + 1, from = first_seen(to - 1);
    const auto by_block = [&](const Kept<T>* query, int64_t count, const auto& work) {
      for (int64_t first = from / kKeys * kKeys; first < to; first += kKeys) {
        const int64_t end = least(first + kKeys, to);
        find(run, head, first, std::max(first, from), end, scratch);
        scratch.ahead.clear();
        score_few(query, count, static_cast<int>(end - first), scratch);
        for (int64_t q = 0; q < count; ++q) work(q, first, end);
      }
    };
    for (int64_t at = 0, count; at < group; at += count) {
      count = least(group - at, kFew);
      float most[kFew], sum[kFew], each[kKeys];
      std::fill(most, most + count, kNever);
      std::fill(sum, sum + count, 0.0f);
      const Kept<T>* const query = kept_queries(queries_of(run, head) + (row * group + at) * shape.padded(), count, scratch);
      by_block(query, count, [&](int64_t q, int64_t first, int64_t) { soften_few(q, from - first, to - first, most, sum, scratch); });
      by_block(query, count, [&](int64_t q, int64_t first, int64_t end) {
        for (int64_t i = 0; i < kKeys; i += kLanes)
          store16(each + i, power(T{}, fms(load16(scratch.scores + q * kKeys + i), filled(factor()), filled(most[q]))));
        for (int64_t key = std::max(first, from); key < end; ++key) weights[key / shape.page_size] += each[key - first] / sum[q];
      });
    }
  }

  // --- many queries ---------------------------------------------------------------------------------------------------

  // Queries `first` to `last` − 1 of one KV head, at most kWides · kWide, over all that they see.
  void attend_many(const Run& run, int64_t head, int64_t first, int64_t last, Scratch& scratch, Tiles& tiles) const {
    const bool tiled = kApart<T> && tiles.allowed();
    int groups = 0;
    for (int64_t query = first; query < last; query += kWide, ++groups)
      begin(scratch.lanes[groups], run, head, query, least(last - query, kWide));
    const int64_t end_position = scratch.lanes[groups - 1].last_position + 1;
    const int64_t from = first_seen(scratch.lanes[0].first_position);
    for (int64_t position = from / kKeys * kKeys; position < end_position; position += kKeys) {
      const int64_t end = least(position + kKeys, end_position), next_end = least(position + 2 * kKeys, end_position);
      const int count = static_cast<int>(end - position);
      const int keys = static_cast<int>(round_up(count, kElements<T>));
      find(run, head, position, std::max(position, from), end, scratch);
      look(run, head, position + kKeys, next_end, scratch.ahead);
      const int64_t parts = groups * (tiled ? 2 : keys / kElements<T>), lines = (scratch.ahead.lines + parts - 1) / parts;
      const auto* values = reinterpret_cast<const T* const*>(scratch.values);
      if (tiled)
        into_tiles(scratch);
      else
        for (int i = 0; i < keys; i += 2)
          pack_values(scratch.columns + i / kWord<T> * shape.head_dim, values[i], values[i + 1]);
      for (int i = 0; i < groups; ++i) {
        Lanes& lanes = scratch.lanes[i];
        if (position > lanes.last_position || end <= first_seen(lanes.first_position)) continue;
        const int seen = static_cast<int>(least(lanes.last_position + 1 - position, count));
        if (tiled)
          step_in_tiles(lanes, scratch, position, seen, lines, tiles);
        else
          step(lanes, scratch, position, seen, lines);
      }
      if ((position + kKeys) % kSegment == 0 || next_end == end)
        for (int i = 0; i < groups; ++i) fold(scratch.lanes[i]);
    }
    for (int i = 0; i < groups; ++i) {
      const int64_t query = first + i * kWide;
      end(scratch.lanes[i], run, head, query, least(last - query, kWide));
    }
  }

  void begin(Lanes& lanes, const Run& run, int64_t head, int64_t first, int64_t count) const {
    lanes.vectors = kHasTiles && kApart<T> ? kVectors : static_cast<int>((count + kLanes - 1) / kLanes);
    lanes.first_position = run.position + first / shape.group();
    lanes.last_position = run.position + (first + count - 1) / shape.group();
    const T* const from = queries_of(run, head);
    for (int v = 0; v < lanes.vectors; ++v) {
      const void* rows[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        // Lanes beyond the last repeat it, and their output is not read.
        const int64_t query = first + least(v * kLanes + i, count - 1);
        rows[i] = from + query * shape.padded();
        lanes.last[v * kLanes + i] = static_cast<int32_t>(run.position + query / shape.group());
      }
      for (int w = 0; w < words(); w += kLanes) {
        Words block[kLanes];
        for (int i = 0; i < kLanes; ++i) block[i] = load_words(static_cast<const uint32_t*>(rows[i]) + w, words() - w);
        transpose(block);
        for (int i = 0; i < kLanes; ++i) store_words(lanes.queries + (w + i) * kWide + v * kLanes, block[i]);
      }
      for (int i = v * kLanes; i < 2 * kWide; i += kWide) {
        store16(lanes.most + i, filled(kNever));
        store16(lanes.sum + i, zeros());
      }
      for (int i = 0; i < shape.padded(); ++i) {
        store16(lanes.output + i * kWide + v * kLanes, zeros());
        store16(lanes.folded + i * kWide + v * kLanes, zeros());
      }
    }
  }

  // `lines` of what is needed next are asked for with each tile of scores.
  void step(Lanes& lanes, Scratch& scratch, int64_t first, int count, int64_t lines) const {
    const int keys = static_cast<int>(round_up(count, kElements<T>));
    for (int i = 0; i < keys; i += kElements<T>) {
      scratch.ahead.ask(lines);
      by_vectors(lanes.vectors, [&](int v, auto vectors) {
        score<vectors>(scratch.keys + i, lanes.queries + v * kLanes, scratch.scores + i * kWide + v * kLanes);
      });
    }
    soften(lanes, scratch, first, count);
    by_vectors(lanes.vectors, [&](int v, auto vectors) {
      weigh<vectors>(scratch.columns, scratch.weights + v * kLanes, keys / kWord<T>, lanes.shrink + v * kLanes,
                     lanes.output + v * kLanes);
    });
  }

  // The same in tiles of AMX.
  void step_in_tiles(Lanes& lanes, Scratch& scratch, int64_t first, int count, int64_t lines, Tiles& tiles) const {
    const int64_t padded = shape.padded(), halves = (count + kTiledRows - 1) / kTiledRows;
    for (int64_t i = 0; i < halves; ++i) {
      scratch.ahead.ask(lines);
      tiles.multiply_square(lanes.queries, scratch.rows + i * kTiledRows * padded / 2, padded / 2, padded / 2 / kSpan, true,
                            scratch.scores + i * kTiledRows * kWide);
    }
    soften(lanes, scratch, first, count);
    for (int v = 0; v < kVectors; ++v) {
      const Floats shrink = load16(lanes.shrink + v * kLanes);
      for (float* to = lanes.output + v * kLanes; to < lanes.output + shape.head_dim * kWide; to += kWide)
        store16(to, load16(to) * shrink);
    }
    for (int64_t i = 0; i < padded; i += kTiledRows)
      tiles.multiply_square(scratch.weights, scratch.columns + i * (kKeys / 2), kKeys / 2, halves, false,
                            lanes.output + i * kWide);
  }

  // Keys of a block into rows side by side, and its values into rows of a number of the head each.
  void into_tiles(Scratch& scratch) const {
    const int64_t padded = shape.padded();
    for (int key = 0; key < kKeys; ++key)
      for (int64_t w = 0; w < padded / 2; w += kLanes)
        store_words(scratch.rows + key * padded / 2 + w,
                    load_words(static_cast<const uint32_t*>(scratch.keys[key]) + w, words() - w));
    const auto* values = reinterpret_cast<const bf16* const*>(scratch.values);
    for (int64_t i = 0; i < padded; i += kLanes)
      for (int key = 0; key < kKeys; key += 2 * kLanes) {
        Words x[kLanes];
#pragma GCC unroll 16
        for (int k = 0; k < kLanes; ++k) x[k] = beside(values[key + 2 * k] + i, values[key + 2 * k + 1] + i, shape.head_dim - i);
        transpose(x);
#pragma GCC unroll 16
        for (int k = 0; k < kLanes; ++k) store_words(scratch.columns + (i + k) * (kKeys / 2) + key / 2, x[k]);
      }
  }

  // Calls work(first, V) until `vectors` are done, V of them at a time, which is a constant.
  template <class Work>
  static void by_vectors(int vectors, const Work& work) {
    for (int first = 0; first < vectors; first += kVectorsAtOnce)
      with_count<kVectorsAtOnce>(vectors - first, [&](auto some) { work(first, some); });
  }

  // V vectors of queries times kElements<T> keys.
  template <int V>
  void score(const void* const* keys, const uint32_t* query, float* scores) const {
    Floats sums[kElements<T>][V];
    const int32_t* rows[kElements<T>];
#pragma GCC unroll 8
    for (int key = 0; key < kElements<T>; ++key) {
      rows[key] = static_cast<const int32_t*>(keys[key]);
      for (int v = 0; v < V; ++v) sums[key][v] = zeros();
    }
    add_words<T>(words(), sums, [&](int64_t w, Part<T>(&part)[kElements<T>][V]) {
      Factors<T> word[V];
      for (int v = 0; v < V; ++v) word[v] = factors<T>(load_words(query + w * kWide + v * kLanes));
#pragma GCC unroll 8
      for (int key = 0; key < kElements<T>; ++key) {
        const Factors<T> all = factors<T>(filled(rows[key][w]));
        for (int v = 0; v < V; ++v) part[key][v] = add_products(T{}, all, word[v], part[key][v]);
      }
    });
#pragma GCC unroll 8
    for (int key = 0; key < kElements<T>; ++key)
      for (int v = 0; v < V; ++v) store16(scores + key * kWide + v * kLanes, sums[key][v]);
  }

  // V vectors of weights times a block's values, added to the output, which shrinks first.
  template <int V>
  void weigh(const uint32_t* values, const uint32_t* weights, int cells, const float* shrink, float* to) const {
    const int head_dim = static_cast<int>(shape.head_dim);
    for (int element = 0; element < head_dim; element += kElements<T>) {
      Floats sums[kElements<T>][V];
#pragma GCC unroll 8
      for (int i = 0; i < kElements<T>; ++i)
        for (int v = 0; v < V; ++v)
          sums[i][v] = load16(to + (element + i) * kWide + v * kLanes) * load16(shrink + v * kLanes);
      add_words<T>(cells, sums, [&](int64_t cell, Part<T>(&part)[kElements<T>][V]) {
        const uint32_t* value = values + cell * head_dim + element;
        Factors<T> weight[V];
        for (int v = 0; v < V; ++v) weight[v] = factors<T>(load_words(weights + cell * kWide + v * kLanes));
#pragma GCC unroll 8
        for (int i = 0; i < kElements<T>; ++i) {
          const Factors<T> all = factors<T>(filled(static_cast<int32_t>(value[i])));
          for (int v = 0; v < V; ++v) part[i][v] = add_products(T{}, all, weight[v], part[i][v]);
        }
      });
#pragma GCC unroll 8
      for (int i = 0; i < kElements<T>; ++i)
        for (int v = 0; v < V; ++v) store16(to + (element + i) * kWide + v * kLanes, sums[i][v]);
    }
  }

  struct Pair {
    Floats even, odd;
  };

  // From a block's scores to weights; `count` keys from position `first` on, of which a lane sees those up to its last and,
  // with a window, the last `window` of those.
  void soften(Lanes& lanes, Scratch& scratch, int64_t first, int count) const {
    const bool all_seen = count == kKeys && first + count - 1 <= lanes.first_position &&
                          first >= first_seen(lanes.last_position);
    const Floats scale = filled(factor());
    for (int v = 0; v < lanes.vectors; ++v) {
      float* const column = scratch.scores + v * kLanes;
      Floats most = filled(kNever);
      if (all_seen) {
        Floats each[kElements<T>];  // so that no maximum waits for the one before
        for (int i = 0; i < kElements<T>; ++i) each[i] = load16(column + i * kWide);
        for (const float* tile = column + kElements<T> * kWide; tile < column + kKeys * kWide; tile += kElements<T> * kWide)
#pragma GCC unroll 8
          for (int i = 0; i < kElements<T>; ++i) each[i] = max(each[i], load16(tile + i * kWide));
        for (const Floats one : each) most = max(most, one);
      } else {
        const Words last = load_words(lanes.last + v * kLanes);
        const Words before = last - filled(window ? static_cast<int32_t>(window) : INT32_MAX);
        for (int key = 0; key < kKeys; ++key) {
          const Words position = filled(static_cast<int32_t>(first) + key);
          const Mask seen = ~greater(position, key < count ? last : filled(-1)) & greater(position, before);
          const Floats score = select(seen, load16(column + key * kWide), filled(kNever));
          store16(column + key * kWide, score);
          most = max(most, score);
        }
      }
      const Floats old = load16(lanes.most + v * kLanes);
      most = max(old, most * scale);
      store16(lanes.most + v * kLanes, most);
      const Floats base = base_of(most), shrink = power(T{}, old - base);
      store16(lanes.shrink + v * kLanes, shrink);
      const Pair sum = weights_of<2>(column, scratch.weights + v * kLanes, scale, base, 0);
      store16(lanes.sum + v * kLanes, load16(lanes.sum + v * kLanes) * shrink + (sum.even + sum.odd));
    }
  }

  // The weights of every 16th key from `key` on, those half, a quarter … of 16 further on, and their neighbours'; returns
  // their sums, added as `soften_few` does.
  template <int Stride>
  static Pair weights_of(const float* column, uint32_t* weights, Floats scale, Floats base, int key) {
    if constexpr (Stride < kLanes) {
      const Pair a = weights_of<2 * Stride>(column, weights, scale, base, key);
      const Pair b = weights_of<2 * Stride>(column, weights, scale, base, key + Stride);
      return {a.even + b.even, a.odd + b.odd};
    } else {
      Pair sum{zeros(), zeros()};
#pragma GCC unroll 4
      for (int at = key; at < kKeys; at += kLanes) {
        const Floats even = power(T{}, fms(load16(column + at * kWide), scale, base));
        const Floats odd = power(T{}, fms(load16(column + (at + 1) * kWide), scale, base));
        sum = {sum.even + even, sum.odd + odd};
        if constexpr (sizeof(T) == 2) {
          store_words(weights + at / 2 * kWide, pairs(even, odd));
        } else {
          store_words(weights + at * kWide, as_words(even));
          store_words(weights + (at + 1) * kWide, as_words(odd));
        }
      }
      return sum;
    }
  }

  // V of two keys side by side; for float32, of one key and then of the other.
  void pack_values(uint32_t* to, const bf16* first, const bf16* second) const {
    for (int64_t i = 0; i < shape.head_dim; i += kLanes) {
      const int64_t left = shape.head_dim - i;
      store_words(to + i, beside(first + i, second + i, left), left);
    }
  }
  static Words beside(const bf16* first, const bf16* second, int64_t count) {
    return load_halves(first, count) | shifted_left<16>(load_halves(second, count));
  }
  void pack_values(uint32_t* to, const float* first, const float* second) const {
    std::memcpy(to, first, size_t(shape.head_dim) * sizeof(float));
    std::memcpy(to + shape.head_dim, second, size_t(shape.head_dim) * sizeof(float));
  }

  // A segment into those before it; the next one begins anew.
  void fold(Lanes& lanes) const {
    for (int v = 0; v < lanes.vectors; ++v) {
      float *const most = lanes.most + v * kLanes, *const sum = lanes.sum + v * kLanes;
      const Floats before = load16(most + kWide), now = load16(most), largest = max(before, now);
      const Floats base = base_of(largest), mine = power(T{}, before - base), theirs = power(T{}, now - base);
      for (int64_t i = v * kLanes; i < shape.head_dim * kWide; i += kWide) {
        store16(lanes.folded + i, fma(load16(lanes.output + i), theirs, load16(lanes.folded + i) * mine));
        store16(lanes.output + i, zeros());
      }
      store16(sum + kWide, fma(load16(sum), theirs, load16(sum + kWide) * mine));
      store16(most + kWide, largest);
      store16(sum, zeros());
      store16(most, filled(kNever));
    }
  }

  void end(const Lanes& lanes, const Run& run, int64_t head, int64_t first, int64_t count) const {
    for (int v = 0; v < lanes.vectors; ++v) {
      const Floats share = filled(1.0f) / load16(lanes.sum + kWide + v * kLanes);
      for (int element = 0; element < shape.head_dim; element += kLanes) {
        const int64_t left = shape.head_dim - element;
        Words block[kLanes];
        for (int i = 0; i < kLanes; ++i)
          block[i] = i < left ? as_words(load16(lanes.folded + (element + i) * kWide + v * kLanes) * share) : filled(0);
        transpose(block);
        for (int i = 0; i < kLanes && v * kLanes + i < count; ++i)
          store16(output_of(run, head, first + v * kLanes + i) + element, as_floats(block[i]), left);
      }
    }
  }
};

}  // namespace baton
