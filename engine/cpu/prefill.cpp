// Steps with many rows: the parts of a layer.
//
// Everything here runs on the threads that torch's own work runs on, which its OpenMP owns: after their work they spin for
// more, and threads of our own would wait for the cores behind them.
//
// Products are of weights as oneDNN packs them where it has no matrix unit to pack for: tiles of 64 outputs, in each of
// them the inputs one after the other (`tiled` in linear.py). Six rows by 64 outputs fill 32 registers.
//
// Attention reads K and V where they lie in pages. It goes over the keys in blocks with a running maximum and sum
// (Milakov and Gimelshein, 2018; Dao et al., 2022), and keeps queries in the lanes of its vectors: a key's scores for 48
// queries are three vectors, so K is used as it lies, element pairs broadcast, and no maximum or sum crosses lanes.
#include <atomic>
#include <limits>

#include "kernels.h"

namespace baton {
namespace {

// What `GOMP_parallel` is: calls work(data) on so many threads, and returns when all have.
using Parallel = void (*)(void (*work)(void*), void* data, unsigned threads, unsigned flags);

struct Team {
  Parallel parallel;
  int64_t threads;
};

struct Shape {
  int64_t dtype, heads, kv_heads, head_dim, page_size, num_layers;
};

// Some rows of one sequence. Its units of work are numbered from `first_unit` on.
struct Piece {
  int64_t row, rows;     // in the queries
  int64_t position;      // of the first of them, in the sequence
  const int64_t* pages;  // of its sequence, in the order of its positions
  int64_t first_unit;
};

constexpr int kVectors = 3;                // of queries that are attended for together
constexpr int kWide = kVectors * kLanes;   // so many queries
constexpr int kVectorsAtOnce = kMany ? kVectors : 1;  // of those, in registers at a time: 8 × 3 sums or 4,
constexpr int kTile = kMany ? 8 : 4;       // with so many keys, or elements of a head
constexpr int kKeys = 64;                  // to a block: its scores and its V stay in the L1 cache
constexpr int kMostHeadDim = 256;
constexpr float kNever = -std::numeric_limits<float>::infinity();

alignas(64) const float kZeros[kMostHeadDim] = {};

// Calls work(unit, worker) for each unit once, in order, on whichever thread is free; workers are 0 to threads − 1.
template <class Work>
void share_out(const Team* team, int64_t units, const Work& work) {
  struct Shared {
    const Work& work;
    const int64_t units;
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> workers{0};
  } shared{work, units};
  const auto serve = [](void* data) {
    auto& shared = *static_cast<Shared*>(data);
    const int64_t worker = shared.workers.fetch_add(1, std::memory_order_relaxed);
    for (int64_t unit; (unit = shared.next.fetch_add(1, std::memory_order_relaxed)) < shared.units;)
      shared.work(unit, worker);
  };
  const int64_t threads = units < team->threads ? units : team->threads;
  if (threads > 1) {
    team->parallel(serve, &shared, unsigned(threads), 0);
  } else {
    serve(&shared);
  }
}

// As `share_out`, for rows, some at a time.
template <class Work>
void share_rows(const Team* team, int64_t rows, const Work& work) {
  constexpr int64_t kAtOnce = 16;
  share_out(team, (rows + kAtOnce - 1) / kAtOnce, [&](int64_t unit, int64_t) {
    const int64_t end = (unit + 1) * kAtOnce < rows ? (unit + 1) * kAtOnce : rows;
    for (int64_t row = unit * kAtOnce; row < end; ++row) work(row);
  });
}

// ---- What differs between the two types of elements. A "cell" is 32 bits: one float, or two bf16.

template <class T>
struct Cells;

template <>
struct Cells<float> {
  static constexpr int kStep = 1;  // elements in a cell
  static constexpr float kExponent = 1.0f;
  static Floats power(Floats x) { return exponential(x); }
  static Floats rounded(Floats x) { return x; }
  static Floats silu(Floats x) { return baton::silu(x); }
};

template <>
struct Cells<bf16> {
  static constexpr int kStep = 2;
  static constexpr float kExponent = 1.44269504f;  // `power` is one of two: less work, and exact enough for 8 bits
  // 2^x for x up to 127 and from −126 on, below which it stays: x = n + r, with a polynomial for 2^r whose greatest
  // relative error is the least that its degree allows, 7.5e-5, a fiftieth of what rounding to bf16 then adds. Adding
  // 1.5 · 2²³ rounds x to n, which is left in the lowest bits; from there it is added to the exponent.
  static Floats power(Floats x) {
    const Floats rounder = filled(12582912.0f);
    x = max(x, filled(-126.0f));
    const Floats shifted = x + rounder;
    const Floats r = x - (shifted - rounder);
    Floats sum = filled(5.517154555e-2f);
    sum = fma(sum, r, filled(2.426111127e-1f));
    sum = fma(sum, r, filled(6.932610083e-1f));
    sum = fma(sum, r, filled(9.999280747e-1f));
    const Words exponent = shifted_left<23>(as_words(shifted));
    return as_floats(as_words(sum) + exponent);
  }
  static Floats rounded(Floats x) { return as_bf16(x); }
  // x · sigmoid(x), to the 14 bits of the reciprocal. Of less than −87 it is nearly zero, as it should be.
  static Floats silu(Floats x) {
    const Floats turned = power(min(x * filled(-kExponent), filled(126.0f)));
    return x * reciprocal(filled(1.0f) + turned);
  }
};

// ---- Attention

// Up to 48 queries and what is known of their output. The lanes in use fill `vectors` vectors.
struct Lanes {
  alignas(64) int32_t queries[kMostHeadDim * kWide];  // [cells of a head][48]
  alignas(64) float output[kMostHeadDim * kWide];     // [head_dim][48], not yet divided by `sum`
  alignas(64) int32_t last[kWide];                    // the last position that each one sees
  alignas(64) float most[kWide];                      // the largest exponent so far
  alignas(64) float sum[kWide];
  alignas(64) float shrink[kWide];  // what the output so far is worth once this block's maximum is known
  int64_t first_position, last_position;
  int vectors;
};

// Memory that is needed soon and lies where no prefetcher foresees it. It is asked for a few lines at a time, between
// other work: a core waits for a line once it has more on their way than it can keep track of.
struct Ahead {
  static constexpr int64_t kLine = 64;

  void clear() { count = at = lines = 0; }

  void add(const void* from, int64_t bytes) {
    stretches[count++] = {static_cast<const char*>(from), bytes};
    lines += (bytes + kLine - 1) / kLine;
  }

  void ask(int64_t most) {
    for (; most > 0 && at < count; ++at) {
      Stretch& next = stretches[at];
      for (; most > 0 && next.bytes > 0; --most, next.from += kLine, next.bytes -= kLine)
        _mm_prefetch(next.from, _MM_HINT_T0);
      if (next.bytes > 0) return;
    }
  }

  struct Stretch {
    const char* from;
    int64_t bytes;
  };
  Stretch stretches[2 * kKeys];
  int count, at;
  int64_t lines;  // of all
};

struct Scratch {
  Lanes lanes[4];
  Ahead ahead;
  alignas(64) float scores[kKeys * kWide];
  alignas(64) int32_t weights[kKeys * kWide];       // [key cells][48]
  alignas(64) int32_t values[kKeys * kMostHeadDim];  // [key cells][head_dim], a cell holds what two keys have there
  const void* keys[kKeys];
};
constexpr int64_t kMostLanes = 4 * kWide;

// V vectors of queries times kTile keys.
template <class T, int V>
void score(const void* const* keys, const int32_t* queries, int cells, float* scores) {
  Floats sums[kTile][V];
  const int32_t* rows[kTile];
#pragma GCC unroll 8
  for (int key = 0; key < kTile; ++key) {
    rows[key] = static_cast<const int32_t*>(keys[key]);
    for (int v = 0; v < V; ++v) sums[key][v] = zeros();
  }
  for (int cell = 0; cell < cells; ++cell) {
    Factors<T> query[V];
    for (int v = 0; v < V; ++v) query[v] = factors<T>(load_words(queries + cell * kWide + v * kLanes));
#pragma GCC unroll 8
    for (int key = 0; key < kTile; ++key) {
      const Factors<T> both = factors<T>(filled(rows[key][cell]));
      for (int v = 0; v < V; ++v) sums[key][v] = add_products(T{}, both, query[v], sums[key][v]);
    }
  }
#pragma GCC unroll 8
  for (int key = 0; key < kTile; ++key)
    for (int v = 0; v < V; ++v) store16(scores + key * kWide + v * kLanes, sums[key][v]);
}

// V vectors of weights times a block's values, added to the output, which shrinks first.
template <class T, int V>
void weigh(const int32_t* values, const int32_t* weights, int cells, int head_dim, const float* shrink, float* output) {
  for (int element = 0; element < head_dim; element += kTile) {
    Floats sums[kTile][V];
#pragma GCC unroll 8
    for (int i = 0; i < kTile; ++i)
      for (int v = 0; v < V; ++v) {
        const Floats before = load16(output + (element + i) * kWide + v * kLanes);
        sums[i][v] = before * load16(shrink + v * kLanes);
      }
    for (int cell = 0; cell < cells; ++cell) {
      const int32_t* value = values + cell * head_dim + element;
      Factors<T> weight[V];
      for (int v = 0; v < V; ++v) weight[v] = factors<T>(load_words(weights + cell * kWide + v * kLanes));
#pragma GCC unroll 8
      for (int i = 0; i < kTile; ++i) {
        const Factors<T> both = factors<T>(filled(value[i]));
        for (int v = 0; v < V; ++v) sums[i][v] = add_products(T{}, both, weight[v], sums[i][v]);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kTile; ++i)
      for (int v = 0; v < V; ++v) store16(output + (element + i) * kWide + v * kLanes, sums[i][v]);
  }
}

// Calls work(first, V) until `vectors` are done, V of them at a time, which is a constant.
template <class Work>
void by_vectors(int vectors, const Work& work) {
  for (int first = 0; first < vectors; first += kVectorsAtOnce)
    with_count<kVectorsAtOnce>(vectors - first, [&](auto some) { work(first, some); });
}

// From a block's scores to weights; `count` keys from position `first` on, of which a lane sees those up to its last
// and, with a window, the last `window` of those.
template <class T>
void soften(Lanes& lanes, float* scores, int32_t* weights, int64_t first, int count, int64_t window, float scale) {
  const int tiled = (count + kTile - 1) / kTile * kTile;
  const bool all_seen = tiled == count && first + count - 1 <= lanes.first_position &&
                        (!window || first > lanes.last_position - window);
  const Floats factor = filled(scale * Cells<T>::kExponent);
  for (int v = 0; v < lanes.vectors; ++v) {
    float* const column = scores + v * kLanes;
    Floats most = filled(kNever);
    if (all_seen) {
      Floats each[kTile];  // so that no maximum waits for the one before
      for (int i = 0; i < kTile; ++i) each[i] = load16(column + i * kWide);
      for (const float* tile = column + kTile * kWide; tile < column + count * kWide; tile += kTile * kWide)
#pragma GCC unroll 8
        for (int i = 0; i < kTile; ++i) each[i] = max(each[i], load16(tile + i * kWide));
      for (const Floats one : each) most = max(most, one);
    } else {
      const Words last = load_words(lanes.last + v * kLanes);
      const Words before = last - filled(window ? int(window) : INT32_MAX);
      for (int key = 0; key < tiled; ++key) {
        const Words position = filled(int(first) + key);
        const Mask seen = ~greater(position, key < count ? last : filled(-1)) & greater(position, before);
        const Floats score = select(seen, load16(column + key * kWide), filled(kNever));
        store16(column + key * kWide, score);
        most = max(most, score);
      }
    }
    const Floats old = load16(lanes.most + v * kLanes);
    most = max(old, most * factor);
    store16(lanes.most + v * kLanes, most);
    // A lane that has seen nothing yet: −∞ less −∞ is no number.
    const Floats base = select(unequal(most, filled(kNever)), most, zeros());
    const Floats shrink = Cells<T>::power(old - base);
    store16(lanes.shrink + v * kLanes, shrink);
    Floats sum = load16(lanes.sum + v * kLanes) * shrink;
#pragma GCC unroll 4
    for (int key = 0; key < tiled; key += 2) {
      const Floats one = Cells<T>::power(fms(load16(column + key * kWide), factor, base));
      const Floats two = Cells<T>::power(fms(load16(column + (key + 1) * kWide), factor, base));
      sum = sum + (one + two);
      if constexpr (Cells<T>::kStep == 2) {
        store_words(weights + key / 2 * kWide + v * kLanes, pairs(one, two));
      } else {
        store_words(weights + key * kWide + v * kLanes, as_words(one));
        store_words(weights + (key + 1) * kWide + v * kLanes, as_words(two));
      }
    }
    store16(lanes.sum + v * kLanes, sum);
  }
}

// V of two keys side by side; for float32, of one key.
inline void pack_values(int32_t* to, const bf16* first, const bf16* second, int64_t head_dim) {
  for (int64_t i = 0; i < head_dim; i += kLanes) {
    const Words low = load_halves(first + i, head_dim - i), high = load_halves(second + i, head_dim - i);
    store_words(to + i, low | shifted_left<16>(high), head_dim - i);
  }
}
inline void pack_values(int32_t* to, const float* first, const float* second, int64_t head_dim) {
  std::memcpy(to, first, size_t(head_dim) * sizeof(float));
  std::memcpy(to + head_dim, second, size_t(head_dim) * sizeof(float));
}

template <class T>
struct Attention {
  const Shape& shape;
  const T* queries;  // rows of `query_stride` elements, which begin with [heads, head_dim]
  int64_t query_stride;
  T* output;  // [rows, heads, head_dim]
  const T* pool;
  int64_t layer;
  int64_t window;
  float scale;

  int64_t group() const { return shape.heads / shape.kv_heads; }

  // The queries of a piece that share a KV head, in the order of their rows, are its lanes; here those from `first` on.
  void begin(Lanes& lanes, const Piece& piece, int64_t head, int64_t first, int64_t count) const {
    const int cells = int(shape.head_dim) / Cells<T>::kStep;
    lanes.vectors = int((count + kLanes - 1) / kLanes);
    lanes.first_position = piece.position + first / group();
    lanes.last_position = piece.position + (first + count - 1) / group();
    for (int v = 0; v < lanes.vectors; ++v) {
      const T* rows[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        // Lanes beyond the last repeat it, and their output is not read.
        const int64_t lane = first + (v * kLanes + i < count ? v * kLanes + i : count - 1);
        const int64_t row = lane / group(), of_group = lane % group();
        rows[i] = queries + (piece.row + row) * query_stride + (head * group() + of_group) * shape.head_dim;
        lanes.last[v * kLanes + i] = int(piece.position + row);
      }
      for (int cell = 0; cell < cells; cell += kLanes) {
        const int64_t left = cells - cell;
        Words block[kLanes];
        for (int i = 0; i < kLanes; ++i)
          block[i] = load_words(reinterpret_cast<const int32_t*>(rows[i]) + cell, left);
        transpose(block);
        for (int i = 0; i < kLanes && cell + i < cells; ++i)
          store_words(lanes.queries + (cell + i) * kWide + v * kLanes, block[i]);
      }
      store16(lanes.most + v * kLanes, filled(kNever));
      store16(lanes.sum + v * kLanes, zeros());
      for (int i = 0; i < shape.head_dim; ++i)
        store16(lanes.output + i * kWide + v * kLanes, zeros());
    }
  }

  void end(const Lanes& lanes, const Piece& piece, int64_t head, int64_t first, int64_t count) const {
    for (int v = 0; v < lanes.vectors; ++v) {
      const Floats share = filled(1.0f) / load16(lanes.sum + v * kLanes);
      for (int element = 0; element < shape.head_dim; element += kLanes) {
        const int64_t left = shape.head_dim - element;
        Words block[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          const float* column = lanes.output + (element + i) * kWide + v * kLanes;
          block[i] = element + i < shape.head_dim ? as_words(load16(column) * share)
                                                  : filled(0);
        }
        transpose(block);
        for (int i = 0; i < kLanes && v * kLanes + i < count; ++i) {
          const int64_t lane = first + v * kLanes + i;
          T* to = output + ((piece.row + lane / group()) * shape.heads + head * group() + lane % group()) * shape.head_dim;
          store16(to + element, as_floats(block[i]), left);
        }
      }
    }
  }

  // K of the sequence's page `index`, from `offset` on; V lies page_size rows later.
  const T* key(const Piece& piece, int64_t head, int64_t index, int64_t offset) const {
    const int64_t block = (piece.pages[index] * shape.kv_heads + head) * shape.num_layers + layer;
    return pool + (block * 2 * shape.page_size + offset) * shape.head_dim;
  }

  // Where K of `tiled` positions from `first` on lies, of which `count` are there.
  void find(const Piece& piece, int64_t head, int64_t first, int count, int tiled, const void** keys) const {
    int64_t index = first / shape.page_size, offset = first % shape.page_size;
    for (int i = 0; i < count; ++index, offset = 0) {
      const T* at = key(piece, head, index, offset);
      for (; i < count && offset < shape.page_size; ++i, ++offset, at += shape.head_dim) keys[i] = at;
    }
    for (int i = count; i < tiled; ++i) keys[i] = kZeros;
  }

  // K and V of the positions from `first` on are needed next.
  void look(const Piece& piece, int64_t head, int64_t first, int64_t end, Ahead& ahead) const {
    ahead.clear();
    int64_t index = first / shape.page_size, offset = first % shape.page_size;
    for (int64_t rows; first < end; first += rows, ++index, offset = 0) {
      rows = shape.page_size - offset < end - first ? shape.page_size - offset : end - first;
      const T* const keys = key(piece, head, index, offset);
      const int64_t bytes = rows * shape.head_dim * int64_t(sizeof(T));
      ahead.add(keys, bytes);
      ahead.add(keys + shape.page_size * shape.head_dim, bytes);
    }
  }

  // `lines` of what is needed next are asked for with each tile of scores.
  void step(Lanes& lanes, Scratch& scratch, int64_t first, int count, int64_t lines) const {
    const int cells = int(shape.head_dim) / Cells<T>::kStep;
    const int tiled = (count + kTile - 1) / kTile * kTile;
    for (int i = 0; i < tiled; i += kTile) {
      scratch.ahead.ask(lines);
      by_vectors(lanes.vectors, [&](int v, auto vectors) {
        score<T, vectors>(scratch.keys + i, lanes.queries + v * kLanes, cells, scratch.scores + i * kWide + v * kLanes);
      });
    }
    soften<T>(lanes, scratch.scores, scratch.weights, first, count, window, scale);
    by_vectors(lanes.vectors, [&](int v, auto vectors) {
      weigh<T, vectors>(scratch.values, scratch.weights + v * kLanes, tiled / Cells<T>::kStep, int(shape.head_dim),
                        lanes.shrink + v * kLanes, lanes.output + v * kLanes);
    });
  }

  // Lanes `first` to `last` − 1 of one KV head, at most kMostLanes, over all that they see.
  void attend(const Piece& piece, int64_t head, int64_t first, int64_t last, Scratch& scratch) const {
    int groups = 0;
    for (int64_t lane = first; lane < last; lane += kWide, ++groups)
      begin(scratch.lanes[groups], piece, head, lane, last - lane < kWide ? last - lane : kWide);
    const int64_t end_position = scratch.lanes[groups - 1].last_position + 1;
    int64_t position = window ? scratch.lanes[0].first_position - window + 1 : 0;
    position = position < 0 ? 0 : position / shape.page_size * shape.page_size;
    for (; position < end_position; position += kKeys) {
      const int count = int(end_position - position < kKeys ? end_position - position : kKeys);
      const int tiled = (count + kTile - 1) / kTile * kTile;
      find(piece, head, position, count, tiled, scratch.keys);
      const int64_t next_end = position + 2 * kKeys < end_position ? position + 2 * kKeys : end_position;
      look(piece, head, position + kKeys, next_end, scratch.ahead);
      const int64_t tiles = groups * tiled / kTile, lines = (scratch.ahead.lines + tiles - 1) / tiles;
      for (int i = 0; i < tiled; i += 2) {
        const auto value = [&](int j) {
          const T* k = static_cast<const T*>(scratch.keys[j]);
          return j < count ? k + shape.page_size * shape.head_dim : k;
        };
        pack_values(scratch.values + i / Cells<T>::kStep * shape.head_dim, value(i), value(i + 1), shape.head_dim);
      }
      for (int i = 0; i < groups; ++i) {
        Lanes& lanes = scratch.lanes[i];
        const bool later = position > lanes.last_position;
        const bool earlier = window && position + count <= lanes.first_position - window + 1;
        if (later || earlier) continue;
        const int64_t seen = lanes.last_position + 1 - position;
        step(lanes, scratch, position, int(seen < count ? seen : count), lines);
      }
    }
    for (int i = 0; i < groups; ++i) {
      const int64_t lane = first + i * kWide;
      end(scratch.lanes[i], piece, head, lane, last - lane < kWide ? last - lane : kWide);
    }
  }

  void run(const Team* team, const Piece* pieces, int64_t count, int64_t units, int64_t lanes, char* scratch) const {
    share_out(team, units, [&](int64_t unit, int64_t worker) {
      int64_t low = 0, high = count;  // the last piece whose units begin at or before this one
      while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        (pieces[middle].first_unit <= unit ? low : high) = middle;
      }
      const Piece& piece = pieces[low];
      const int64_t all = piece.rows * group(), cuts = (all + lanes - 1) / lanes;
      const int64_t at = unit - piece.first_unit;
      const int64_t cut = cuts - 1 - at / shape.kv_heads;  // what sees most first, so that no thread ends late
      const int64_t last = (cut + 1) * lanes < all ? (cut + 1) * lanes : all;
      attend(piece, at % shape.kv_heads, cut * lanes, last, reinterpret_cast<Scratch*>(scratch)[worker]);
    });
  }
};

// ---- Products

enum class Into : int64_t { kNew = 0, kSum = 1, kGate = 2 };

constexpr int kPanel = 64;  // outputs that a tile of weights is for
template <class T>          // in few registers, the weights and inputs of bf16 are two vectors each
constexpr int kRows = kMany || sizeof(T) == 4 ? 6 : 4;
constexpr int kPanelVectors = kMany ? 4 : 1;  // of its four, those whose sums are kept in registers with so many rows

// sums[row][0 to 1] and [2 to 3] are the products of a row with the 32 outputs at `left` and at `right`.
template <class T, int R>
inline __attribute__((always_inline)) void multiply(const int32_t* x, int64_t stride, const int32_t* left,
                                                    const int32_t* right, int64_t cells, Floats (&sums)[R][4]) {
  const int32_t* const columns[4] = {left, left + kLanes, right, right + kLanes};
#pragma GCC unroll 4
  for (int first = 0; first < 4; first += kPanelVectors) {
    Floats sum[R][kPanelVectors];
#pragma GCC unroll 6
    for (int row = 0; row < R; ++row)
#pragma GCC unroll 4
      for (int v = 0; v < kPanelVectors; ++v) sum[row][v] = zeros();
    for (int64_t cell = 0; cell < cells; ++cell) {
      Factors<T> weights[kPanelVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kPanelVectors; ++v) weights[v] = factors<T>(load_words(columns[first + v] + cell * kPanel));
#pragma GCC unroll 6
      for (int row = 0; row < R; ++row) {
        const Factors<T> both = factors<T>(filled(x[row * stride + cell]));
#pragma GCC unroll 4
        for (int v = 0; v < kPanelVectors; ++v) sum[row][v] = add_products(T{}, both, weights[v], sum[row][v]);
      }
    }
#pragma GCC unroll 6
    for (int row = 0; row < R; ++row)
#pragma GCC unroll 4
      for (int v = 0; v < kPanelVectors; ++v) sums[row][first + v] = sum[row][v];
  }
}

template <class T>
struct Product {
  const T* x;  // [rows, inputs]
  const int32_t* tiles;
  const T* bias;  // [outputs] or null
  T* out;         // [rows, outputs], or half as many outputs where they gate one another
  int64_t rows, inputs, outputs;
  Into into;

  bool gates() const { return into == Into::kGate; }
  int64_t width() const { return gates() ? outputs / 2 : outputs; }  // of `out`
  int64_t cells() const { return inputs / Cells<T>::kStep; }
  // The tile's column for an output: its first input; the next inputs follow kPanel cells apart.
  const int32_t* column(int64_t output) const {
    return tiles + output / kPanel * kPanel * cells() + output % kPanel;
  }

  template <int R>
  void run_rows(int64_t row, int64_t first) const {
    const int64_t second = gates() ? width() + first : first + kPanel / 2;
    Floats sums[R][4];
    multiply<T, R>(reinterpret_cast<const int32_t*>(x + row * inputs), cells(), column(first),
                   column(second), cells(), sums);
    const int64_t at[4] = {first, first + kLanes, second, second + kLanes};
    if (bias) {
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        const Floats added = load16(bias + (at[v] < outputs ? at[v] : 0), outputs - at[v]);
#pragma GCC unroll 6
        for (int i = 0; i < R; ++i) sums[i][v] = sums[i][v] + added;
      }
    }
#pragma GCC unroll 6
    for (int i = 0; i < R; ++i) {
      T* const to = out + (row + i) * width();
      if (gates()) {
        store16(to + first, Cells<T>::silu(sums[i][0]) * sums[i][2]);
        store16(to + first + kLanes, Cells<T>::silu(sums[i][1]) * sums[i][3]);
        continue;
      }
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        if (at[v] >= outputs) continue;
        const Floats before = into == Into::kSum ? load16(to + at[v], outputs - at[v]) : zeros();
        store16(to + at[v], before + sums[i][v], outputs - at[v]);
      }
    }
  }

  // Rows `row` to `end` − 1 of the outputs from `first` on: 64, or 32 gates with what they gate.
  void run_panel(int64_t row, int64_t end, int64_t first) const {
    for (; row + kRows<T> <= end; row += kRows<T>) run_rows<kRows<T>>(row, first);
    if (row < end) with_count<kRows<T> - 1>(end - row, [&](auto some) { run_rows<some>(row, first); });
  }

  void run(const Team* team) const {
    constexpr int64_t kUnits = 4;  // for each thread, so that none waits long for another
    const int64_t step = gates() ? kPanel / 2 : kPanel, panels = (width() + step - 1) / step;
    const int64_t wanted = (kUnits * team->threads + panels - 1) / panels, groups = (rows + kRows<T> - 1) / kRows<T>;
    const int64_t cuts = wanted < groups ? wanted : groups;
    share_out(team, panels * cuts, [&](int64_t unit, int64_t) {
      const int64_t cut = unit % cuts, row = groups * cut / cuts * kRows<T>, end = groups * (cut + 1) / cuts * kRows<T>;
      run_panel(row, end < rows ? end : rows, unit / cuts * step);
    });
  }
};

// ---- What goes row by row

template <class T>
void norm_row(T* x, const T* delta, const T* weight, T* out, int64_t width, float eps) {
  Floats squares[2] = {zeros(), zeros()};
  for (int64_t i = 0; i < width; i += kLanes) {
    const int64_t left = width - i;
    Floats value = load16(x + i, left);
    if (delta) {
      value = Cells<T>::rounded(value + load16(delta + i, left));
      store16(x + i, value, left);
    }
    squares[i / kLanes % 2] = fma(value, value, squares[i / kLanes % 2]);
  }
  const float mean = sum_of(squares[0] + squares[1]) / float(width);
  const Floats factor = filled(1.0f / __builtin_sqrtf(mean + eps));
  for (int64_t i = 0; i < width; i += kLanes) {
    const int64_t left = width - i;
    const Floats value = load16(x + i, left) * factor;
    store16(out + i, value * load16(weight + i, left), left);
  }
}

template <class T>
void gate_row(const T* gate, const T* up, T* out, int64_t width) {
  for (int64_t i = 0; i < width; i += kLanes) {
    const int64_t left = width - i;
    store16(out + i, Cells<T>::silu(load16(gate + i, left)) * load16(up + i, left), left);
  }
}

// Rotates one head from `x` to `to`, after an RMSNorm of its own where there is a `weight`.
template <class T>
void turn_head(const T* x, T* to, const float* cos, const float* sin, const T* weight, int64_t head_dim, float eps) {
  const int64_t half = head_dim / 2;
  Floats factor = filled(1.0f);
  if (weight) {
    Floats squares = zeros();
    for (int64_t i = 0; i < head_dim; i += kLanes) {
      const Floats value = load16(x + i, head_dim - i);
      squares = fma(value, value, squares);
    }
    factor = filled(1.0f / __builtin_sqrtf(sum_of(squares) / float(head_dim) + eps));
  }
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t left = half - i;
    Floats first = load16(x + i, left), second = load16(x + half + i, left);
    if (weight) {
      first = first * factor * load16(weight + i, left);
      second = second * factor * load16(weight + half + i, left);
    }
    const Floats c = load16(cos + i, left), s = load16(sin + i, left);
    store16(to + i, fms(first, c, second * s), left);
    store16(to + half + i, fma(second, c, first * s), left);
  }
}

template <class T>
void write_row(const Shape& shape, int64_t heads, T* qkv, const float* cos, const float* sin, const T* weight, T* keys,
               float eps) {
  const int64_t head_dim = shape.head_dim, values = shape.page_size * head_dim;
  const int64_t next_head = shape.num_layers * 2 * values;
  const auto of_head = [&](int64_t head) { return weight ? weight + head * head_dim : nullptr; };
  for (int64_t head = 0; head < heads; ++head)
    turn_head(qkv + head * head_dim, qkv + head * head_dim, cos, sin, of_head(head), head_dim, eps);
  const T* const new_keys = qkv + heads * head_dim;
  for (int64_t head = 0; head < shape.kv_heads; ++head) {
    T* const to = keys + head * next_head;
    turn_head(new_keys + head * head_dim, to, cos, sin, of_head(heads + head), head_dim, eps);
    std::memcpy(to + values, new_keys + (shape.kv_heads + head) * head_dim, size_t(head_dim) * sizeof(T));
  }
}

}  // namespace
}  // namespace baton

using namespace baton;

extern "C" {

// Of memory that `baton_prefill_attend` needs for each thread.
int64_t baton_prefill_scratch() { return sizeof(Scratch); }

// x += delta, unless that is null; out = RMSNorm(x) · weight. All [rows, width], weight [width].
void baton_prefill_norm(const Team* team, int64_t dtype, void* x, const void* delta, const void* weight, void* out,
                        int64_t rows, int64_t width, float eps) {
  const auto run = [&](auto* as) {
    using T = std::remove_pointer_t<decltype(as)>;
    share_rows(team, rows, [&](int64_t row) {
      const T* const added = delta ? static_cast<const T*>(delta) + row * width : nullptr;
      norm_row(static_cast<T*>(x) + row * width, added, static_cast<const T*>(weight), static_cast<T*>(out) + row * width,
               width, eps);
    });
  };
  dtype == kBfloat16 ? run(static_cast<bf16*>(nullptr)) : run(static_cast<float*>(nullptr));
}

// out [rows, outputs] = x [rows, inputs] · weightᵀ + bias, or out += that, or, [rows, outputs / 2], out = silu(gate) · up,
// which are the halves of that; then outputs / 2 is a multiple of 32. `bias` may be null.
void baton_prefill_product(const Team* team, int64_t dtype, int64_t into, const void* x, const void* tiles,
                           const void* bias, void* out, int64_t rows, int64_t inputs, int64_t outputs) {
  const auto run = [&](auto* as) {
    using T = std::remove_pointer_t<decltype(as)>;
    Product<T>{static_cast<const T*>(x), static_cast<const int32_t*>(tiles), static_cast<const T*>(bias),
               static_cast<T*>(out), rows, inputs, outputs, Into(into)}
        .run(team);
  };
  dtype == kBfloat16 ? run(static_cast<bf16*>(nullptr)) : run(static_cast<float*>(nullptr));
}

// out [rows, width] = silu(gate) · up, which stand side by side in each row of `gate_up`.
void baton_prefill_gate(const Team* team, int64_t dtype, const void* gate_up, void* out, int64_t rows, int64_t width) {
  const auto run = [&](auto* as) {
    using T = std::remove_pointer_t<decltype(as)>;
    share_rows(team, rows, [&](int64_t row) {
      const T* const gate = static_cast<const T*>(gate_up) + row * 2 * width;
      gate_row(gate, gate + width, static_cast<T*>(out) + row * width, width);
    });
  };
  dtype == kBfloat16 ? run(static_cast<bf16*>(nullptr)) : run(static_cast<float*>(nullptr));
}

// Rotates the `heads` queries of each row of `qkv` where they stand and its keys into their page, and copies its values
// beside them. cos and sin are [rows, head_dim / 2]; `tables` has the address of the block table of each row's sequence;
// `weight`, [heads + kv_heads, head_dim] or null, norms queries and keys first.
void baton_prefill_write(const Team* team, const Shape* shape, int64_t heads, int64_t layer, void* qkv, const float* cos,
                         const float* sin, const void* weight, const int64_t* positions, const int64_t* const* tables,
                         void* pool, int64_t rows, float eps) {
  const int64_t width = (heads + 2 * shape->kv_heads) * shape->head_dim, half = shape->head_dim / 2;
  const int64_t rows_of_page = shape->kv_heads * shape->num_layers * 2 * shape->page_size;
  const auto run = [&](auto* as) {
    using T = std::remove_pointer_t<decltype(as)>;
    share_rows(team, rows, [&](int64_t row) {
      const int64_t page = tables[row][positions[row] / shape->page_size];
      const int64_t slot = page * rows_of_page + layer * 2 * shape->page_size + positions[row] % shape->page_size;
      write_row(*shape, heads, static_cast<T*>(qkv) + row * width, cos + row * half, sin + row * half,
                static_cast<const T*>(weight), static_cast<T*>(pool) + slot * shape->head_dim, eps);
    });
  };
  shape->dtype == kBfloat16 ? run(static_cast<bf16*>(nullptr)) : run(static_cast<float*>(nullptr));
}

// Attention of the rows of `count` pieces, in `units` units of at most `lanes` queries each, a multiple of 48 up to 192.
// A unit of a piece is one KV head's share of a cut of its queries. `window` 0 is none. `scratch` is aligned to 64 bytes.
void baton_prefill_attend(const Team* team, const Shape* shape, int64_t layer, const void* queries, int64_t query_stride,
                          void* output, const void* pool, const Piece* pieces, int64_t count, int64_t units,
                          int64_t lanes, int64_t window, float scale, void* scratch) {
  const auto run = [&](auto* as) {
    using T = std::remove_pointer_t<decltype(as)>;
    Attention<T>{*shape, static_cast<const T*>(queries), query_stride, static_cast<T*>(output),
                 static_cast<const T*>(pool), layer, window, scale}
        .run(team, pieces, count, units, lanes, static_cast<char*>(scratch));
  };
  shape->dtype == kBfloat16 ? run(static_cast<bf16*>(nullptr)) : run(static_cast<float*>(nullptr));
}

}  // extern "C"
