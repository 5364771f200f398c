// A whole step for few rows: every layer, from token ids to logits, in one call.
//
// With few rows a step costs what it costs to read all weights once, so everything here serves that stream: weights lie in
// tiles in the order in which they are read, each thread reads tiles of its own from end to end, and while it computes
// with one block of a tile it asks for the next, across tiles and from one product into the following one.
//
// A tile is 64 outputs of a product: [steps][64] words of four bytes, a word being one input of a float32 weight or two
// adjoining ones of a bf16 weight, as the bf16 dot product takes them. oneDNN packs weights for itself in just this order.
//
// Rows of one sequence that follow each other, a run, attend together: its keys and values are read once for all of them.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <type_traits>

#include "kernels.h"
#include "pool.h"

namespace baton {
namespace {

constexpr int kTile = 64;          // outputs
constexpr int kStepBytes = 256;    // of a tile for one word of input
constexpr int kBlockSteps = 64;    // 16 KiB: this and the next block stay in the first-level cache while rows pass over it
constexpr int kPassRows = 6;       // 6 × 4 sums, 4 vectors of weights and one of input fit into 32 registers
constexpr int kPositions = 256;    // of a context attended to between two adjustments of the softmax's maximum
constexpr int kAhead = 4;          // pieces of up to 16 keys, or values, that are asked for before one is computed with
constexpr int kStretch = 512;      // positions below which a context is not divided between threads
constexpr int kTogether = 8;       // rows of a run that pass over a block of its context at a time
constexpr int kAtOnce = 12;        // queries that share a piece's registers: 12 × 2 sums, 2 vectors of values and a weight
constexpr int kTurned = 6;         // queries from which on it pays to turn a piece's keys into columns
constexpr float kNever = -std::numeric_limits<float>::infinity();

}  // namespace

// What `decode.py` tells; the structures there are the same, field by field.
extern "C" {
struct DecodeLayer {
  const float* input_norm;   // [hidden]
  const void* qkv;           // tiles, as all products
  const float* qkv_bias;     // [outputs], or null, as all biases
  const float* qk_norm;      // [heads + kv_heads][head_dim], or null
  const void* output;
  const float* output_bias;
  const float* mlp_norm;     // [hidden]
  const void* gate_up;       // gate's tiles, then up's
  const float* gate_up_bias;
  const void* down;
  const float* down_bias;
  int64_t window;            // positions attended to; 0: all
};

struct DecodeModel {
  int64_t dtype, hidden, inner, heads, kv_heads, head_dim, layers, vocab, page_size;
  double norm_eps;
  const void* embedding;     // [vocab][hidden]
  const float* frequencies;  // [head_dim / 2]
  const float* norm;         // [hidden]
  const void* head;
  const DecodeLayer* layer;  // [layers]
  void* pool;                // [pages][kv_heads][layers][2][page_size][head_dim]
};

struct DecodeStep {
  int64_t rows, sample_count, begun_count;
  const int64_t* ints;  // what follows, end to end
  float* logits;        // [sample_count][vocab]
  int64_t* best;        // [sample_count]: the likeliest token, of equal ones the lowest

  const int64_t* tokens() const { return ints; }                                // [rows]
  const int64_t* positions() const { return tokens() + rows; }                  // [rows]
  const int64_t* tables() const { return positions() + rows; }                  // [rows]: where in `pages` the row's begin
  const int64_t* sample_rows() const { return tables() + rows; }                // [sample_count]
  const int64_t* begun() const { return sample_rows() + sample_count; }         // [begun_count]: pages to be zeroed first
  const int64_t* pages() const { return begun() + begun_count; }                // of all sequences
};
}

namespace {

int64_t round_up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

// --- products --------------------------------------------------------------------------------------------------------

inline __m512 multiply_add(float, __m512i a, __m512i b, __m512 sum) {
  return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
}
inline __m512 multiply_add(bf16, __m512i a, __m512i b, __m512 sum) {
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

// One pass of R rows over a block of a tile. `x` is the rows' words, `stride` words apart; `sums` is [R][kTile]. Each step
// asks for `Lines` cache lines from `ahead` on.
template <class T, int R, int Lines>
void pass(const char* weights, const uint32_t* x, int64_t stride, int64_t steps, bool first, float* sums, const char* ahead) {
  __m512 sum[R][4];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) sum[r][j] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + r * kTile + j * kLanes);
  for (int64_t s = 0; s < steps; ++s) {
    __m512i w[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) w[j] = _mm512_loadu_si512(weights + s * kStepBytes + j * 64);
#pragma GCC unroll 4
    for (int line = 0; line < Lines; ++line) _mm_prefetch(ahead + (s * Lines + line) * 64, _MM_HINT_T0);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m512i word = _mm512_set1_epi32(static_cast<int>(x[r * stride + s]));
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) sum[r][j] = multiply_add(T{}, w[j], word, sum[r][j]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) _mm512_storeu_ps(sums + r * kTile + j * kLanes, sum[r][j]);
}

template <class T, int Lines>
void pass(int64_t rows, const char* weights, const uint32_t* x, int64_t stride, int64_t steps, bool first, float* sums,
          const char* ahead) {
  switch (rows) {
    case 1: return pass<T, 1, Lines>(weights, x, stride, steps, first, sums, ahead);
    case 2: return pass<T, 2, Lines>(weights, x, stride, steps, first, sums, ahead);
    case 3: return pass<T, 3, Lines>(weights, x, stride, steps, first, sums, ahead);
    case 4: return pass<T, 4, Lines>(weights, x, stride, steps, first, sums, ahead);
    case 5: return pass<T, 5, Lines>(weights, x, stride, steps, first, sums, ahead);
    default: return pass<T, 6, Lines>(weights, x, stride, steps, first, sums, ahead);
  }
}

// One tile for all rows: `x` [rows][steps] words → `sums` [rows][kTile]. `next` is what this thread reads after it.
template <class T>
void tile(const char* weights, const T* x, int64_t rows, int64_t steps, float* sums, const char* next) {
  const auto* words = reinterpret_cast<const uint32_t*>(x);
  const int64_t passes = (rows + kPassRows - 1) / kPassRows;
  for (int64_t from = 0; from < steps; from += kBlockSteps) {
    const int64_t count = steps - from < kBlockSteps ? steps - from : kBlockSteps;
    const char* block = weights + from * kStepBytes;
    const char* ahead = from + count < steps ? block + count * kStepBytes : next;
    for (int64_t p = 0; p < passes; ++p) {
      const Range own = share(rows, static_cast<int>(p), static_cast<int>(passes));
      const int64_t n = own.last - own.first;
      const uint32_t* input = words + own.first * steps + from;
      float* output = sums + own.first * kTile;
      // Between them the passes ask for the four lines of every step of the next block, once each.
      if (passes == 1) {
        pass<T, 4>(n, block, input, steps, count, from == 0, output, ahead);
      } else if (passes <= 3 && p < 2) {
        pass<T, 2>(n, block, input, steps, count, from == 0, output, ahead + p * count * 128);
      } else if (passes > 3 && p < 4) {
        pass<T, 1>(n, block, input, steps, count, from == 0, output, ahead + p * count * 64);
      } else {
        pass<T, 0>(n, block, input, steps, count, from == 0, output, ahead);
      }
    }
  }
}

// --- one step --------------------------------------------------------------------------------------------------------

// Hands out parts of one piece of memory; with none, only counts how much there would have to be.
class Carver {
 public:
  explicit Carver(char* memory) : memory_(memory) {}
  template <class T>
  T* take(int64_t count) {
    char* taken = memory_ ? memory_ + used_ : nullptr;
    used_ += round_up(count * static_cast<int64_t>(sizeof(T)), 128);  // neighbouring lines are fetched in pairs
    return reinterpret_cast<T*>(taken);
  }
  int64_t used() const { return used_; }

 private:
  char* memory_;
  int64_t used_ = 0;
};

// What one thread alone reads and writes.
template <class T>
struct Private {
  T* normed;          // [rows][hidden]
  float* sums;        // [rows][kTile]
  float* more_sums;   // [rows][kTile]
  float* scores;      // [kTogether · group][kPositions]
  uint32_t* keys;     // [words of a head][kLanes]: a piece's, in columns
  float* best;        // [rows][kLanes]: the largest logit of each lane so far
  int32_t* best_ids;  // [rows][kLanes]
};

// Where the parts of one attention over a context that several threads share are kept. Of each run in turn:
struct Parts {
  float* output;  // [kv_heads][threads][its rows][group][head_dim rounded up to 32]
  float* most;    // [kv_heads][threads][its rows][group]
  float* total;   // likewise
  std::atomic<int32_t>* ended;  // [runs · kv_heads]
  std::atomic<int32_t>* next;   // one
};

// Rows of one sequence, from `row` on; one alone is a run, too.
struct Run {
  int64_t row, rows;
};

template <class T>
class Step {
 public:
  Step(const DecodeModel& model, const DecodeStep& step, int64_t most_rows, Pool* pool, int threads, char* memory)
      : m(model), s(step), pool_(pool), threads_(threads), group_(model.heads / model.kv_heads) {
    padded_head_ = round_up(m.head_dim, 32);
    qkv_size_ = round_up((m.heads + 2 * m.kv_heads) * m.head_dim, kTile);
    Carver carve(memory);
    x_ = carve.take<float>(most_rows * m.hidden);
    qkv_ = carve.take<float>(most_rows * qkv_size_);
    queries_ = carve.take<T>(most_rows * m.heads * padded_head_);
    cos_ = carve.take<float>(most_rows * m.head_dim / 2);
    sin_ = carve.take<float>(most_rows * m.head_dim / 2);
    attended_ = carve.take<T>(most_rows * m.heads * m.head_dim);
    activated_ = carve.take<T>(most_rows * m.inner);
    const int64_t parts = most_rows * m.kv_heads * threads * group_;
    parts_.output = carve.take<float>(parts * padded_head_);
    parts_.most = carve.take<float>(parts);
    parts_.total = carve.take<float>(parts);
    parts_.ended = carve.take<std::atomic<int32_t>>(most_rows * m.kv_heads);
    parts_.next = carve.take<std::atomic<int32_t>>(1);
    runs_ = carve.take<Run>(most_rows);
    run_of_ = carve.take<int64_t>(most_rows);
    for (int thread = 0; thread < threads; ++thread) {
      Private<T> own;
      own.normed = carve.take<T>(most_rows * m.hidden);
      own.sums = carve.take<float>(most_rows * kTile);
      own.more_sums = carve.take<float>(most_rows * kTile);
      own.scores = carve.take<float>(kTogether * group_ * kPositions);
      own.keys = carve.take<uint32_t>(m.head_dim / kWord * kLanes);
      own.best = carve.take<float>(most_rows * kLanes);
      own.best_ids = carve.take<int32_t>(most_rows * kLanes);
      if (thread < kMostThreads) own_[thread] = own;
    }
    memory_used_ = carve.used();
  }

  int64_t memory_used() const { return memory_used_; }

  void run() {
    for (int64_t row = 0; row < s.rows; ++row) {
      if (row == 0 || s.tables()[row] != s.tables()[row - 1]) runs_[run_count_++] = {row, 0};
      run_of_[row] = run_count_ - 1;
      ++runs_[run_count_ - 1].rows;
    }
    stretches_ = 1;
    if (const int64_t tasks = run_count_ * m.kv_heads; tasks < 2 * threads_) {
      int64_t longest = 0;
      for (int64_t row = 0; row < s.rows; ++row) longest = longest > s.positions()[row] ? longest : s.positions()[row];
      stretches_ = round_up(2 * threads_, tasks) / tasks;
      if (stretches_ > 1 + longest / kStretch) stretches_ = 1 + longest / kStretch;
      if (stretches_ > threads_) stretches_ = threads_;
    }
    parts_.next->store(0, std::memory_order_relaxed);
    for (int64_t i = 0; i < run_count_ * m.kv_heads; ++i) parts_.ended[i].store(0, std::memory_order_relaxed);
    if (threads_ == 1) return work(0);
    pool_->run([this](int thread) { work(thread); });
  }

  static constexpr int kMostThreads = 256;

 private:
  static constexpr int64_t kWord = 4 / sizeof(T);  // inputs in a word

  void work(int thread) {
    begin(thread);
    for (int64_t l = 0; l < m.layers; ++l) {
      const DecodeLayer& layer = m.layer[l];
      norm(x_, s.rows, layer.input_norm, own_[thread].normed);
      multiply_qkv(layer, thread);
      meet();
      place(layer, l, thread);
      if (l + 1 == m.layers && s.sample_count == 0) return;
      meet();
      attend(layer, l, thread);
      meet();
      add_product(layer.output, layer.output_bias, attended_, m.heads * m.head_dim,
                  own_tiles(layer.gate_up, m.inner, m.hidden, thread), thread);
      meet();
      norm(x_, s.rows, layer.mlp_norm, own_[thread].normed);
      multiply_gate_up(layer, thread);
      meet();
      add_product(layer.down, layer.down_bias, activated_, m.inner,
                  l + 1 < m.layers ? own_tiles(m.layer[l + 1].qkv, qkv_size_, m.hidden, thread)
                                   : own_tiles(m.head, m.vocab, m.hidden, thread),
                  thread);
      meet();
    }
    multiply_head(thread);
    meet();
    if (thread == 0) choose();
  }

  void meet() {
    if (threads_ > 1) pool_->meet();
  }

  // The first meeting of the threads comes before anybody reads what is made here, but for x, which all read at once.
  void begin(int thread) {
    const int64_t page_elements = m.kv_heads * m.layers * 2 * m.page_size * m.head_dim;
    for (int64_t i = thread; i < s.begun_count; i += threads_)
      std::memset(static_cast<T*>(m.pool) + s.begun()[i] * page_elements, 0, page_elements * sizeof(T));
    const Range rows = share(s.rows, thread, threads_);
    for (int64_t row = rows.first; row < rows.last; ++row) {
      const T* from = static_cast<const T*>(m.embedding) + s.tokens()[row] * m.hidden;
      float* to = x_ + row * m.hidden;
      for (int64_t i = 0; i < m.hidden; i += kLanes) {
        const __mmask16 mask = first_lanes(m.hidden - i);
        store16(to + i, load16(from + i, mask), mask);
      }
      const auto position = static_cast<float>(s.positions()[row]);
      for (int64_t i = 0; i < m.head_dim / 2; ++i) {
        const float angle = position * m.frequencies[i];
        cos_[row * (m.head_dim / 2) + i] = std::cos(angle);
        sin_[row * (m.head_dim / 2) + i] = std::sin(angle);
      }
    }
    meet();
  }

  // Root mean square of `count` numbers, as what to multiply them with.
  float inverse_rms(const float* x, int64_t count) const {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < count; i += kLanes) {
      const __m512 part = load16(x + i, first_lanes(count - i));
      sum = _mm512_fmadd_ps(part, part, sum);
    }
    const float mean = _mm512_reduce_add_ps(sum) / static_cast<float>(count);
    return 1.0f / std::sqrt(mean + static_cast<float>(m.norm_eps));
  }

  void norm_row(const float* x, const float* weight, T* to) const {
    const __m512 scale = _mm512_set1_ps(inverse_rms(x, m.hidden));
    for (int64_t i = 0; i < m.hidden; i += kLanes) {
      const __mmask16 mask = first_lanes(m.hidden - i);
      store16(to + i, _mm512_mul_ps(_mm512_mul_ps(load16(x + i, mask), scale), load16(weight + i, mask)), mask);
    }
  }

  // RMSNorm of all rows, which every thread does for itself: it costs less than waiting for each other would.
  void norm(const float* x, int64_t rows, const float* weight, T* to) const {
    for (int64_t row = 0; row < rows; ++row) norm_row(x + row * m.hidden, weight, to + row * m.hidden);
  }

  // Where a thread's share of a product's tiles begins.
  const char* own_tiles(const void* weights, int64_t outputs, int64_t inputs, int thread) const {
    const Range tiles = share(round_up(outputs, kTile) / kTile, thread, threads_);
    return static_cast<const char*>(weights) + tiles.first * (inputs / kWord) * kStepBytes;
  }

  void multiply_qkv(const DecodeLayer& layer, int thread) {
    const Private<T>& own = own_[thread];
    const int64_t steps = m.hidden / kWord, tile_bytes = steps * kStepBytes;
    const Range tiles = share(qkv_size_ / kTile, thread, threads_);
    const int64_t outputs = (m.heads + 2 * m.kv_heads) * m.head_dim;
    const char* after = own_tiles(layer.output, m.hidden, m.heads * m.head_dim, thread);
    for (int64_t t = tiles.first; t < tiles.last; ++t) {
      const char* weights = static_cast<const char*>(layer.qkv) + t * tile_bytes;
      tile<T>(weights, own.normed, s.rows, steps, own.sums, t + 1 < tiles.last ? weights + tile_bytes : after);
      for (int64_t i = 0; i < kTile; i += kLanes) {
        const int64_t column = t * kTile + i;
        const __m512 bias = bias16(layer.qkv_bias, column, outputs);
        for (int64_t row = 0; row < s.rows; ++row)
          store16(qkv_ + row * qkv_size_ + column, _mm512_add_ps(load16(own.sums + row * kTile + i), bias));
      }
    }
  }

  static __m512 bias16(const float* bias, int64_t column, int64_t outputs) {
    return bias ? load16(bias + column, first_lanes(outputs - column)) : _mm512_setzero_ps();
  }

  // Adds a product to the residual stream.
  void add_product(const void* matrix, const float* bias, const T* input, int64_t inputs, const char* after, int thread) {
    const Private<T>& own = own_[thread];
    const int64_t steps = inputs / kWord, tile_bytes = steps * kStepBytes;
    const Range tiles = share(round_up(m.hidden, kTile) / kTile, thread, threads_);
    for (int64_t t = tiles.first; t < tiles.last; ++t) {
      const char* weights = static_cast<const char*>(matrix) + t * tile_bytes;
      tile<T>(weights, input, s.rows, steps, own.sums, t + 1 < tiles.last ? weights + tile_bytes : after);
      for (int64_t i = 0; i < kTile && t * kTile + i < m.hidden; i += kLanes) {
        const int64_t column = t * kTile + i;
        const __mmask16 mask = first_lanes(m.hidden - column);
        const __m512 added = bias16(bias, column, m.hidden);
        for (int64_t row = 0; row < s.rows; ++row) {
          float* x = x_ + row * m.hidden + column;
          const __m512 sum = _mm512_add_ps(load16(own.sums + row * kTile + i), added);
          store16(x, _mm512_add_ps(load16(x, mask), sum), mask);
        }
      }
    }
  }

  void multiply_gate_up(const DecodeLayer& layer, int thread) {
    const Private<T>& own = own_[thread];
    const int64_t steps = m.hidden / kWord, tile_bytes = steps * kStepBytes;
    const Range tiles = share(m.inner / kTile, thread, threads_);
    const char* after = own_tiles(layer.down, m.hidden, m.inner, thread);
    for (int64_t t = tiles.first; t < tiles.last; ++t) {
      const char* gate = static_cast<const char*>(layer.gate_up) + t * tile_bytes;
      const char* up = gate + m.inner / kTile * tile_bytes;
      tile<T>(gate, own.normed, s.rows, steps, own.sums, up);
      tile<T>(up, own.normed, s.rows, steps, own.more_sums, t + 1 < tiles.last ? gate + tile_bytes : after);
      for (int64_t i = 0; i < kTile; i += kLanes) {
        const int64_t column = t * kTile + i;
        const __m512 gate_bias = bias16(layer.gate_up_bias, column, 2 * m.inner);
        const __m512 up_bias = bias16(layer.gate_up_bias, m.inner + column, 2 * m.inner);
        for (int64_t row = 0; row < s.rows; ++row) {
          const __m512 g = _mm512_add_ps(load16(own.sums + row * kTile + i), gate_bias);
          const __m512 u = _mm512_add_ps(load16(own.more_sums + row * kTile + i), up_bias);
          store16(activated_ + row * m.inner + column, _mm512_mul_ps(silu16(g), u));
        }
      }
    }
  }

  // --- attention -----------------------------------------------------------------------------------------------------

  // K of one head of one layer of one page; V follows page_size · head_dim further on.
  T* key_page(int64_t page, int64_t head, int64_t layer) const {
    return static_cast<T*>(m.pool) + ((page * m.kv_heads + head) * m.layers + layer) * 2 * m.page_size * m.head_dim;
  }

  // Norms and rotates queries and keys, and writes keys and values into their pages.
  void place(const DecodeLayer& layer, int64_t l, int thread) {
    const int64_t all = m.heads + 2 * m.kv_heads;
    const Range tasks = share(s.rows * all, thread, threads_);
    for (int64_t task = tasks.first; task < tasks.last; ++task) {
      const int64_t row = task / all, head = task % all;
      float* x = qkv_ + row * qkv_size_ + head * m.head_dim;
      T* page = nullptr;
      if (head >= m.heads) {
        const int64_t position = s.positions()[row];
        const int64_t kv_head = (head - m.heads) % m.kv_heads;
        page = key_page(s.pages()[s.tables()[row] + position / m.page_size], kv_head, l) + position % m.page_size * m.head_dim;
      }
      if (head >= m.heads + m.kv_heads) {
        copy(x, page + m.page_size * m.head_dim);
      } else {
        if (layer.qk_norm) norm_head(x, layer.qk_norm + head * m.head_dim);
        rotate(x, row, page ? page : queries_of(runs_[run_of_[row]], head / group_, row, head % group_));
      }
    }
  }

  // The queries of a run that share a KV head lie side by side.
  T* queries_of(const Run& run, int64_t kv_head, int64_t row, int64_t g) const {
    return queries_ + (run.row * m.heads + (kv_head * run.rows + row - run.row) * group_ + g) * padded_head_;
  }

  void copy(const float* x, T* to) const {
    for (int64_t i = 0; i < m.head_dim; i += kLanes) {
      const __mmask16 mask = first_lanes(m.head_dim - i);
      store16(to + i, load16(x + i, mask), mask);
    }
  }

  void norm_head(float* x, const float* weight) const {
    const __m512 scale = _mm512_set1_ps(inverse_rms(x, m.head_dim));
    for (int64_t i = 0; i < m.head_dim; i += kLanes) {
      const __mmask16 mask = first_lanes(m.head_dim - i);
      store16(x + i, _mm512_mul_ps(_mm512_mul_ps(load16(x + i, mask), scale), load16(weight + i, mask)), mask);
    }
  }

  void rotate(const float* x, int64_t row, T* to) const {
    const int64_t half = m.head_dim / 2;
    for (int64_t i = 0; i < half; i += kLanes) {
      const __mmask16 mask = first_lanes(half - i);
      const __m512 a = load16(x + i, mask), b = load16(x + half + i, mask);
      const __m512 c = load16(cos_ + row * half + i, mask), d = load16(sin_ + row * half + i, mask);
      store16(to + i, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, d)), mask);
      store16(to + half + i, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, d)), mask);
    }
  }

  // One KV head of one run over positions [from, to). These are the tasks of a layer: runs · kv_heads · stretches_.
  struct Task {
    Run run;
    int64_t head, from, to;
    int64_t part;  // where in `parts_` what comes of it is kept
  };

  Task task_at(int64_t index, const DecodeLayer& layer) const {
    const int64_t pair = index / stretches_, stretch = index % stretches_, head = pair % m.kv_heads;
    const Run& run = runs_[pair / m.kv_heads];
    const int64_t first = first_seen(run.row, layer), end = s.positions()[run.row + run.rows - 1] + 1;
    const Range own = share(end - first, static_cast<int>(stretch), static_cast<int>(stretches_));
    const int64_t part = (run.row * m.kv_heads + head * run.rows) * threads_ + stretch * run.rows;
    return {run, head, first + own.first, first + own.last, part * group_};
  }

  // The first position that a row attends to.
  int64_t first_seen(int64_t row, const DecodeLayer& layer) const {
    const int64_t end = s.positions()[row] + 1;
    return layer.window && end > layer.window ? end - layer.window : 0;
  }

  // How far a thread has asked for keys and values. It asks in the order in which it will read: all keys of a block of
  // kPositions, then its values, of this task and the next. Pages lie anywhere, so the processor can't guess that order;
  // and it asks for a few lines at a time, since beyond some 20 that are on their way it waits before it computes on.
  struct Ahead {
    Task task;
    int64_t begin, at;  // the block's first position, and the piece's
    bool values;
    const char* line = nullptr;  // of the piece, the first not asked for
    const char* last = nullptr;

    explicit Ahead(const Task& task) : task(task), begin(task.from), at(task.from), values(false) {}

    void ask(int64_t lines) {
      for (; lines > 0 && line < last; --lines, line += 64) prefetch(line);
    }
  };

  // GCC takes a function that only asks for memory to do nothing, and leaves it out.
  static void prefetch(const char* from) { asm volatile("prefetcht0 %0" : : "m"(*from)); }

  // Turns to the next piece that `find` finds; `next` follows its task, if there is one and it is not there yet.
  void turn(Ahead& ahead, int64_t l, const Task* next) const {
    ahead.ask(ahead.last - ahead.line);
    if (ahead.begin == ahead.task.to) {
      if (!next || ahead.task.part == next->part) return;
      ahead = Ahead(*next);
    }
    int64_t n;
    const int64_t end = block_end(ahead.task, ahead.begin);
    const T* keys = find(ahead.task, l, ahead.at, end, n);
    const T* piece = ahead.values ? keys + m.page_size * m.head_dim : keys;
    ahead.line = reinterpret_cast<const char*>(piece);
    ahead.last = reinterpret_cast<const char*>(piece + n * m.head_dim);
    ahead.at += n;
    if (ahead.at < end) return;
    if (ahead.values) ahead.begin = end;
    ahead.at = ahead.begin;
    ahead.values = !ahead.values;
  }

  // Tasks differ in length, so but for its first one, which has its own number, a thread takes the next as it gets to it.
  // The counter runs on from layer to layer, and moves by the number of tasks in each.
  void attend(const DecodeLayer& layer, int64_t l, int thread) {
    const int64_t tasks = run_count_ * m.kv_heads * stretches_;
    if (thread >= tasks) return;
    Task task = task_at(thread, layer);
    Ahead ahead(task);
    for (int piece = 0; piece < kAhead; ++piece) turn(ahead, l, nullptr);
    for (int64_t index = thread;;) {
      const int64_t pair = index / stretches_;
      index = threads_ + parts_.next->fetch_add(1, std::memory_order_relaxed) - l * tasks;
      const bool more = index < tasks;
      const Task next = more ? task_at(index, layer) : task;
      attend_task(task, layer, l, thread, ahead, more ? &next : nullptr);
      if (stretches_ == 1 || parts_.ended[pair].fetch_add(1, std::memory_order_acq_rel) % stretches_ == stretches_ - 1)
        join(task.run, task.head);
      if (!more) return;
      if (ahead.task.part == task.part) ahead = Ahead(next);
      task = next;
    }
  }

  // The unscaled output, the largest score and the sum of the exponentials relative to it (Milakov and Gimelshein,
  // "Online normalizer calculation for softmax", 2018), of every query.
  void attend_task(const Task& task, const DecodeLayer& layer, int64_t l, int thread, Ahead& ahead, const Task* next) {
    const int64_t all = task.run.rows * group_;
    float* output = parts_.output + task.part * padded_head_;
    float *most = parts_.most + task.part, *total = parts_.total + task.part;
    std::memset(output, 0, all * padded_head_ * sizeof(float));
    for (int64_t q = 0; q < all; ++q) {
      most[q] = kNever;
      total[q] = 0;
    }
    const T* queries = queries_of(task.run, task.head, task.run.row, 0);
    float* scores = own_[thread].scores;
    for (int64_t begin = task.from; begin < task.to; begin += kPositions) {
      const int64_t end = block_end(task, begin);
      for (int64_t from = 0; from < all; from += kTogether * group_) {
        const int64_t count = all - from < kTogether * group_ ? all - from : kTogether * group_;
        for (int64_t at = begin, n; at < end; at += n) {
          if (from == 0) turn(ahead, l, next);
          const T* keys = find(task, l, at, end, n);
          score(queries + from * padded_head_, count, keys, n, scores + at - begin, own_[thread].keys, ahead);
        }
        for (int64_t q = 0; q < count; ++q) {
          const int64_t row = task.run.row + (from + q) / group_, first = first_seen(row, layer);
          const Range seen{first > begin ? first - begin : 0, (s.positions()[row] < end ? s.positions()[row] + 1 : end) - begin};
          soften(scores + q * kPositions, end - begin, seen, most[from + q], total[from + q],
                 output + (from + q) * padded_head_);
        }
        for (int64_t at = begin, n; at < end; at += n) {
          if (from == 0) turn(ahead, l, next);
          const T* keys = find(task, l, at, end, n);
          gather(scores + at - begin, count, keys + m.page_size * m.head_dim, n, output + from * padded_head_, ahead);
        }
      }
    }
  }

  static int64_t block_end(const Task& task, int64_t begin) {
    return task.to - begin < kPositions ? task.to : begin + kPositions;
  }

  // Where the keys from position `at` on lie, and how many there are side by side, of those before `end` and at most 16.
  const T* find(const Task& task, int64_t l, int64_t at, int64_t end, int64_t& n) const {
    const int64_t offset = at % m.page_size;
    n = m.page_size - offset < kLanes ? m.page_size - offset : kLanes;
    if (n > end - at) n = end - at;
    return key_page(s.pages()[s.tables()[task.run.row] + at / m.page_size], task.head, l) + offset * m.head_dim;
  }

  // `count` queries times n keys, at most 16, → scores [count][kPositions].
  void score(const T* queries, int64_t count, const T* keys, int64_t n, float* scores, uint32_t* columns,
             Ahead& ahead) const {
    const __mmask16 mask = first_lanes(n);
    if (count >= kTurned) {
      into_columns(keys, n, columns);
      for (int64_t q = 0; q < count; q += kAtOnce)
        with_count(count - q, [&](auto some) {
          __m512 sums[some];
          column_dots<some>(queries + q * padded_head_, columns, sums, ahead);
          for (int i = 0; i < some; ++i) store16(scores + (q + i) * kPositions, sums[i], mask);
        });
      return;
    }
    const int64_t lines = (kLanes + count - 1) / count;  // which is all of a piece, spread over the queries
    for (int64_t q = 0; q < count; ++q) {
      const T* query = queries + q * padded_head_;
      store16(scores + q * kPositions,
              n == kLanes ? dots<true>(query, keys, n, lines, ahead) : dots<false>(query, keys, n, lines, ahead), mask);
    }
  }

  // Calls work with `count`, or kAtOnce if that is less, as a constant.
  template <int Most = kAtOnce, class Work>
  static void with_count(int64_t count, const Work& work) {
    if constexpr (Most > 1)
      if (count < Most) return with_count<Most - 1>(count, work);
    work(std::integral_constant<int, Most>{});
  }

  // Some queries times 16 keys, of which each word lies in one column.
  template <int Q>
  void column_dots(const T* queries, const uint32_t* columns, __m512* sums, Ahead& ahead) const {
    const auto* words = reinterpret_cast<const uint32_t*>(queries);
    const int64_t stride = padded_head_ / kWord;
    __m512 sum[Q];
#pragma GCC unroll 16
    for (int q = 0; q < Q; ++q) sum[q] = _mm512_setzero_ps();
    for (int64_t w = 0; w < m.head_dim / kWord; ++w) {
      const __m512i column = _mm512_loadu_si512(columns + w * kLanes);
      ahead.ask(1);  // a piece has as many lines as a head has words
#pragma GCC unroll 16
      for (int q = 0; q < Q; ++q)
        sum[q] = multiply_add(T{}, _mm512_set1_epi32(static_cast<int>(words[q * stride + w])), column, sum[q]);
    }
#pragma GCC unroll 16
    for (int q = 0; q < Q; ++q) sums[q] = sum[q];
  }

  // Rows of words into columns, 16 by 16, with zeros for keys that are missing.
  void into_columns(const T* keys, int64_t n, uint32_t* columns) const {
    const int64_t words = m.head_dim / kWord;
    for (int64_t w = 0; w < words; w += kLanes) {
      __m512i x[kLanes], y[kLanes];
#pragma GCC unroll 16
      for (int k = 0; k < kLanes; ++k)
        x[k] = _mm512_maskz_loadu_epi32(k < n ? first_lanes(words - w) : 0, keys + (k < n ? k : 0) * m.head_dim + w * kWord);
#pragma GCC unroll 8
      for (int i = 0; i < kLanes; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
      }
#pragma GCC unroll 8
      for (int i = 0; i < kLanes; i += 4)
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j) {
          x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + j + 2]);
          x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + j + 2]);
        }
      // x[4 i + j] now has word j of each quarter, of rows 4 i to 4 i + 3.
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const __m512i low = _mm512_shuffle_i32x4(x[j], x[4 + j], 0x88);
        const __m512i high = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0x88);
        const __m512i low_odd = _mm512_shuffle_i32x4(x[j], x[4 + j], 0xdd);
        const __m512i high_odd = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0xdd);
        y[j] = _mm512_shuffle_i32x4(low, high, 0x88);
        y[4 + j] = _mm512_shuffle_i32x4(low_odd, high_odd, 0x88);
        y[8 + j] = _mm512_shuffle_i32x4(low, high, 0xdd);
        y[12 + j] = _mm512_shuffle_i32x4(low_odd, high_odd, 0xdd);
      }
      for (int64_t i = 0; i < kLanes && w + i < words; ++i) _mm512_storeu_si512(columns + (w + i) * kLanes, y[i]);
    }
  }

  // One query times 16 keys. Of fewer, the last is taken again for each that is missing.
  template <bool Whole>
  __m512 dots(const T* query, const T* keys, int64_t n, int64_t lines, Ahead& ahead) const {
    constexpr int64_t lanes = 64 / sizeof(T);
    __m512 sum[kLanes];
#pragma GCC unroll 16
    for (int k = 0; k < kLanes; ++k) sum[k] = _mm512_setzero_ps();
    for (int64_t i = 0; i < m.head_dim; i += lanes) {
      const __m512i q = _mm512_loadu_si512(query + i);
      const int64_t left = m.head_dim - i;
      ahead.ask(lines);
#pragma GCC unroll 16
      for (int k = 0; k < kLanes; ++k) {
        const T* key = keys + (Whole || k < n ? k : n - 1) * m.head_dim + i;
        sum[k] = multiply_add(T{}, q, load_words(key, left), sum[k]);
      }
    }
    return sum_across(sum);
  }

  static __m512i load_words(const float* from, int64_t left) {
    return _mm512_maskz_loadu_epi32(first_lanes(left), from);
  }
  static __m512i load_words(const bf16* from, int64_t left) {
    return _mm512_maskz_loadu_epi16(halves_mask(left), from);
  }

  // Lane k is the sum of all lanes of vector k: pairs are interleaved and added until one vector is left.
  static __m512 sum_across(const __m512 (&x)[kLanes]) {
    __m512 a[8], b[4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)
      a[i] = _mm512_add_ps(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512d even = _mm512_castps_pd(a[2 * i]), odd = _mm512_castps_pd(a[2 * i + 1]);
      b[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(even, odd)), _mm512_castpd_ps(_mm512_unpackhi_pd(even, odd)));
    }
    const __m512 low = _mm512_add_ps(_mm512_shuffle_f32x4(b[0], b[1], 0x88), _mm512_shuffle_f32x4(b[0], b[1], 0xdd));
    const __m512 high = _mm512_add_ps(_mm512_shuffle_f32x4(b[2], b[3], 0x88), _mm512_shuffle_f32x4(b[2], b[3], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
  }

  // Turns `count` scores into exponentials relative to the largest so far, those that are not seen into zeros, and what
  // was summed before to the same.
  void soften(float* scores, int64_t count, Range seen, float& most, float& total, float* output) const {
    if (seen.first >= seen.last) {
      std::memset(scores, 0, count * sizeof(float));
      return;
    }
    std::fill(scores, scores + seen.first, kNever);
    std::fill(scores + seen.last, scores + count, kNever);
    const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(static_cast<float>(m.head_dim)));
    const __m512 lowest = _mm512_set1_ps(kNever);
    __m512 largest = lowest;
    for (int64_t i = 0; i < count; i += kLanes) {
      const __mmask16 mask = first_lanes(count - i);
      const __m512 scaled = _mm512_mul_ps(load16(scores + i, mask), scale);
      store16(scores + i, scaled, mask);
      largest = _mm512_max_ps(largest, _mm512_mask_mov_ps(lowest, mask, scaled));
    }
    const float now = std::fmax(most, _mm512_reduce_max_ps(largest));
    const __m512 base = _mm512_set1_ps(now);
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < count; i += kLanes) {
      const __mmask16 mask = first_lanes(count - i);
      const __m512 weight = _mm512_maskz_mov_ps(mask, exp16(_mm512_sub_ps(load16(scores + i, mask), base)));
      store16(scores + i, weight, mask);
      sum = _mm512_add_ps(sum, weight);
    }
    const float faded = std::exp(most - now);
    if (faded != 1.0f)
      for (int64_t i = 0; i < padded_head_; i += kLanes)
        store16(output + i, _mm512_mul_ps(load16(output + i), _mm512_set1_ps(faded)));
    total = total * faded + _mm512_reduce_add_ps(sum);
    most = now;
  }

  // Adds n values, weighted, to the outputs of `count` queries: 32 of head_dim at a time.
  void gather(const float* weights, int64_t count, const T* values, int64_t n, float* output, Ahead& ahead) const {
    for (int64_t q = 0; q < count; q += kAtOnce)
      with_count(count - q, [&](auto some) {
        gather_some<some>(weights + q * kPositions, values, n, output + q * padded_head_, ahead);
      });
  }

  template <int Q>
  void gather_some(const float* weights, const T* values, int64_t n, float* output, Ahead& ahead) const {
    for (int64_t i = 0; i < m.head_dim; i += 32) {
      const int64_t left = m.head_dim - i;
      __m512 sum[Q][2];
#pragma GCC unroll 16
      for (int q = 0; q < Q; ++q) {
        sum[q][0] = load16(output + q * padded_head_ + i);
        sum[q][1] = load16(output + q * padded_head_ + i + kLanes);
      }
      for (int64_t k = 0; k < n; ++k) {
        ahead.ask(32 * sizeof(T) / 64);  // as many lines as are read
        __m512 first, second;
        load_halves(values + k * m.head_dim + i, left, first, second);
#pragma GCC unroll 16
        for (int q = 0; q < Q; ++q) {
          const __m512 weight = _mm512_set1_ps(weights[q * kPositions + k]);
          sum[q][0] = _mm512_fmadd_ps(weight, first, sum[q][0]);
          sum[q][1] = _mm512_fmadd_ps(weight, second, sum[q][1]);
        }
      }
#pragma GCC unroll 16
      for (int q = 0; q < Q; ++q) {
        store16(output + q * padded_head_ + i, sum[q][0]);
        store16(output + q * padded_head_ + i + kLanes, sum[q][1]);
      }
    }
  }

  // 32 numbers, of which `left` are there, in two vectors: of bf16 those with even and those with odd places, which costs
  // least; `store_halves` puts them back.
  static void load_halves(const float* from, int64_t left, __m512& first, __m512& second) {
    first = load16(from, first_lanes(left));
    second = load16(from + kLanes, first_lanes(left - kLanes));
  }
  static void load_halves(const bf16* from, int64_t left, __m512& first, __m512& second) {
    const __m512i both = load_words(from, left);
    first = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    second = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
  }
  static void store_halves(float* to, int64_t left, __m512 first, __m512 second) {
    store16(to, first, first_lanes(left));
    store16(to + kLanes, second, first_lanes(left - kLanes));
  }
  static void store_halves(bf16* to, int64_t left, __m512 first, __m512 second) {
    const __m512i even = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(first));
    const __m512i odd = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(second));
    _mm512_mask_storeu_epi16(to, halves_mask(left), _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
  }
  static __mmask32 halves_mask(int64_t left) {
    return left >= 32 ? __mmask32(0xffffffff) : __mmask32((1u << left) - 1);
  }

  // The stretches of one context as one, divided by the softmax's sum.
  void join(const Run& run, int64_t head) {
    const int64_t all = run.rows * group_, begin = (run.row * m.kv_heads + head * run.rows) * threads_ * group_;
    for (int64_t part = begin; part < begin + all; ++part) {
      const int64_t past = part + stretches_ * all;
      float most = kNever, total = 0;
      for (int64_t one = part; one < past; one += all) most = std::fmax(most, parts_.most[one]);
      for (int64_t one = part; one < past; one += all) total += parts_.total[one] * std::exp(parts_.most[one] - most);
      const int64_t row = run.row + (part - begin) / group_, g = (part - begin) % group_;
      T* to = attended_ + (row * m.heads + head * group_ + g) * m.head_dim;
      for (int64_t lane = 0; lane < m.head_dim; lane += 32) {
        __m512 first = _mm512_setzero_ps(), second = first;
        for (int64_t one = part; one < past; one += all) {
          const __m512 weight = _mm512_set1_ps(std::exp(parts_.most[one] - most) / total);
          first = _mm512_fmadd_ps(load16(parts_.output + one * padded_head_ + lane), weight, first);
          second = _mm512_fmadd_ps(load16(parts_.output + one * padded_head_ + lane + kLanes), weight, second);
        }
        store_halves(to + lane, m.head_dim - lane, first, second);
      }
    }
  }

  // --- head ----------------------------------------------------------------------------------------------------------

  void multiply_head(int thread) {
    const Private<T>& own = own_[thread];
    const int64_t steps = m.hidden / kWord, tile_bytes = steps * kStepBytes;
    for (int64_t i = 0; i < s.sample_count; ++i)
      norm_row(x_ + s.sample_rows()[i] * m.hidden, m.norm, own.normed + i * m.hidden);
    for (int64_t i = 0; i < s.sample_count * kLanes; ++i) {
      own.best[i] = kNever;
      own.best_ids[i] = 0;
    }
    const Range tiles = share(round_up(m.vocab, kTile) / kTile, thread, threads_);
    for (int64_t t = tiles.first; t < tiles.last; ++t) {
      const char* weights = static_cast<const char*>(m.head) + t * tile_bytes;
      const char* next = t + 1 < tiles.last ? weights + tile_bytes : own_tiles(m.layer[0].qkv, qkv_size_, m.hidden, thread);
      tile<T>(weights, own.normed, s.sample_count, steps, own.sums, next);
      for (int64_t i = 0; i < kTile && t * kTile + i < m.vocab; i += kLanes)
        for (int64_t row = 0; row < s.sample_count; ++row) keep_logits(row, t * kTile + i, own.sums + row * kTile + i, own);
    }
  }

  void keep_logits(int64_t row, int64_t column, const float* sums, const Private<T>& own) {
    const __mmask16 mask = first_lanes(m.vocab - column);
    const __m512 logits = load16(sums);
    store16(s.logits + row * m.vocab + column, logits, mask);
    float* best = own.best + row * kLanes;
    int32_t* ids = own.best_ids + row * kLanes;
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __mmask16 better = _mm512_mask_cmp_ps_mask(mask, logits, load16(best), _CMP_GT_OQ);
    _mm512_mask_storeu_ps(best, better, logits);
    _mm512_mask_storeu_epi32(ids, better, _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(column))));
  }

  void choose() {
    for (int64_t row = 0; row < s.sample_count; ++row) {
      float most = kNever;
      int64_t id = 0;
      for (int thread = 0; thread < threads_; ++thread)
        for (int64_t i = row * kLanes; i < (row + 1) * kLanes; ++i) {
          const float logit = own_[thread].best[i];
          if (logit > most || (logit == most && own_[thread].best_ids[i] < id)) {
            most = logit;
            id = own_[thread].best_ids[i];
          }
        }
      s.best[row] = id;
    }
  }

  const DecodeModel& m;
  const DecodeStep& s;
  Pool* const pool_;
  const int threads_;
  const int64_t group_;  // query heads that share a KV head
  int64_t padded_head_, qkv_size_, stretches_ = 1, run_count_ = 0, memory_used_ = 0;
  float* x_;       // [rows][hidden], the residual stream
  float* qkv_;     // [rows][qkv_size_]
  T* queries_;     // of each run in turn [kv_heads][its rows][group][padded_head_], zeros behind head_dim
  float* cos_;     // [rows][head_dim / 2]
  float* sin_;     // likewise
  T* attended_;    // [rows][heads · head_dim]
  T* activated_;   // [rows][inner]
  Parts parts_;
  Run* runs_;
  int64_t* run_of_;  // [rows]: the run of each
  Private<T> own_[kMostThreads];
};

}  // namespace
}  // namespace baton

extern "C" {

// Bytes that `baton_decode_step` needs to work in, for up to so many rows and threads.
int64_t baton_decode_memory(const baton::DecodeModel* model, int64_t rows, int64_t threads) {
  const baton::DecodeStep none{};
  if (model->dtype == baton::kBfloat16)
    return baton::Step<baton::bf16>(*model, none, rows, nullptr, static_cast<int>(threads), nullptr).memory_used();
  return baton::Step<float>(*model, none, rows, nullptr, static_cast<int>(threads), nullptr).memory_used();
}

// One step. `memory`, zeroed when it was made and aligned to 128 bytes, is for up to `most_rows` rows.
void baton_decode_step(const baton::DecodeModel* model, const baton::DecodeStep* step, int64_t most_rows,
                       baton::Pool* pool, char* memory) {
  if (model->dtype == baton::kBfloat16)
    baton::Step<baton::bf16>(*model, *step, most_rows, pool, pool->threads(), memory).run();
  else
    baton::Step<float>(*model, *step, most_rows, pool, pool->threads(), memory).run();
}
}
