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

#include "kernels.h"
#include "pool.h"

namespace baton {
namespace {

constexpr int kTile = 64;          // outputs
constexpr int kStepBytes = 256;    // of a tile for one word of input
constexpr int kBlockSteps = 64;    // 16 KiB, which stay in the first-level cache while rows pass over them
// Where the next block fits in there as well it is asked for into it, and so are keys and values. Where not, it would push
// this one out: all are asked for into the second level, but for weights that are passed over once. Those the processor
// foresees better by itself than it follows requests for every line, but for the first lines of each page.
constexpr bool kTwoBlocksFit = FIRST_LEVEL_CACHE > 2 * kBlockSteps * kStepBytes;
constexpr int kPageSteps = 16;     // 4 KiB, beyond whose end processors foresee nothing
constexpr int kPageStart = 6;      // lines from which they see what comes
constexpr int kPageStartsOnly = -1;
template <class T>                 // what many registers hold: 6 × 4 sums, 4 vectors of weights and one of input
constexpr int kPassRows = kMany || sizeof(T) == 4 ? 6 : 4;
template <class T>                 // in few, the weights and the input of bf16 are two vectors each
constexpr int kPassSums = kMany ? 24 : kPassRows<T>;
constexpr int kPositions = 256;    // of a context attended to between two adjustments of the softmax's maximum
constexpr int kAhead = 4;          // pieces of up to 16 keys, or values, that are asked for before one is computed with
constexpr int kStretch = 512;      // positions below which a context is not divided between threads
constexpr int kTogether = 8;       // rows of a run that pass over a block of its context at a time
constexpr int kKeysAtOnce = kMany ? 16 : 4;      // of a piece's 16, those that one query is multiplied with together
constexpr int kColumnsAtOnce = kMany ? 12 : 4;   // queries that share a piece's keys in registers
constexpr int kGatheredAtOnce = kMany ? 12 : 2;  // and its values: two sums each, two vectors of values and a weight
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
  double rope_factor;        // of cosine and sine
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
  const int64_t* tables() const { return positions() + rows; }                  // [rows]: addresses of block tables
  const int64_t* sample_rows() const { return tables() + rows; }                // [sample_count]
  const int64_t* begun() const { return sample_rows() + sample_count; }         // [begun_count]: pages to be zeroed first
  // The pages of the row's sequence, in the order of its positions.
  const int64_t* pages(int64_t row) const { return reinterpret_cast<const int64_t*>(tables()[row]); }
};
}

namespace {

int64_t round_up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

// --- products --------------------------------------------------------------------------------------------------------

// One pass of R rows over a block of a tile. `x` is the rows' words, `stride` words apart; `sums` is [R][kTile]. Each step
// asks for `Lines` cache lines from `ahead` on, or for one of those that the block's next page starts with.
template <class T, int R, int Lines>
void pass(const char* weights, const uint32_t* x, int64_t stride, int64_t steps, bool first, float* sums, const char* ahead) {
  constexpr int V = R * 4 <= kPassSums<T> ? 4 : R * 2 <= kPassSums<T> ? 2 : 1;  // vectors of outputs at a time
  constexpr int kAsked = (Lines * V + 3) / 4;                                    // lines meanwhile, at each step
  for (int column = 0, asked = 0; column < kTile; column += V * kLanes, asked += kAsked) {
    Floats sum[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < V; ++j) sum[r][j] = first ? zeros() : load16(sums + r * kTile + column + j * kLanes);
    for (int64_t s = 0; s < steps; ++s) {
      Factors<T> w[V];
#pragma GCC unroll 4
      for (int j = 0; j < V; ++j) w[j] = factors<T>(load_words(weights + s * kStepBytes + column * 4 + j * 64));
      if constexpr (Lines == kPageStartsOnly) {
        if (column == 0 && s % kPageSteps < kPageStart)
          _mm_prefetch(weights + (s / kPageSteps + 1) * kPageSteps * kStepBytes + s % kPageSteps * 64, _MM_HINT_T1);
      } else if (asked + kAsked <= Lines) {
#pragma GCC unroll 4
        for (int line = asked; line < asked + kAsked; ++line)
          _mm_prefetch(ahead + (s * Lines + line) * 64, kTwoBlocksFit ? _MM_HINT_T0 : _MM_HINT_T1);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Factors<T> word = factors<T>(filled(static_cast<int32_t>(x[r * stride + s])));
#pragma GCC unroll 4
        for (int j = 0; j < V; ++j) sum[r][j] = add_products(T{}, w[j], word, sum[r][j]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < V; ++j) store16(sums + r * kTile + column + j * kLanes, sum[r][j]);
  }
}

template <class T, int Lines>
void pass(int64_t rows, const char* weights, const uint32_t* x, int64_t stride, int64_t steps, bool first, float* sums,
          const char* ahead) {
  with_count<kPassRows<T>>(rows, [&](auto some) {
    pass<T, some, Lines>(weights, x, stride, steps, first, sums, ahead);
  });
}

// One tile for all rows: `x` [rows][steps] words → `sums` [rows][kTile]. `next` is what this thread reads after it.
template <class T>
void tile(const char* weights, const T* x, int64_t rows, int64_t steps, float* sums, const char* next) {
  const auto* words = reinterpret_cast<const uint32_t*>(x);
  const int64_t passes = (rows + kPassRows<T> - 1) / kPassRows<T>;
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
        pass<T, kTwoBlocksFit ? 4 : kPageStartsOnly>(n, block, input, steps, count, from == 0, output, ahead);
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
        const int64_t left = m.hidden - i;
        store16(to + i, load16(from + i, left), left);
      }
      const auto position = static_cast<float>(s.positions()[row]);
      const auto factor = static_cast<float>(m.rope_factor);
      for (int64_t i = 0; i < m.head_dim / 2; ++i) {
        const float angle = position * m.frequencies[i];
        cos_[row * (m.head_dim / 2) + i] = factor * std::cos(angle);
        sin_[row * (m.head_dim / 2) + i] = factor * std::sin(angle);
      }
    }
    meet();
  }

  // Root mean square of `count` numbers, as what to multiply them with.
  float inverse_rms(const float* x, int64_t count) const {
    Floats sum = zeros();
    for (int64_t i = 0; i < count; i += kLanes) {
      const Floats part = load16(x + i, count - i);
      sum = fma(part, part, sum);
    }
    const float mean = sum_of(sum) / static_cast<float>(count);
    return 1.0f / std::sqrt(mean + static_cast<float>(m.norm_eps));
  }

  void norm_row(const float* x, const float* weight, T* to) const {
    const Floats scale = filled(inverse_rms(x, m.hidden));
    for (int64_t i = 0; i < m.hidden; i += kLanes) {
      const int64_t left = m.hidden - i;
      store16(to + i, load16(x + i, left) * scale * load16(weight + i, left), left);
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
        const Floats bias = bias16(layer.qkv_bias, column, outputs);
        for (int64_t row = 0; row < s.rows; ++row)
          store16(qkv_ + row * qkv_size_ + column, load16(own.sums + row * kTile + i) + bias);
      }
    }
  }

  static Floats bias16(const float* bias, int64_t column, int64_t outputs) {
    return bias ? load16(bias + column, outputs - column) : zeros();
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
        const int64_t left = m.hidden - column;
        const Floats added = bias16(bias, column, m.hidden);
        for (int64_t row = 0; row < s.rows; ++row) {
          float* x = x_ + row * m.hidden + column;
          const Floats sum = load16(own.sums + row * kTile + i) + added;
          store16(x, load16(x, left) + sum, left);
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
        const Floats gate_bias = bias16(layer.gate_up_bias, column, 2 * m.inner);
        const Floats up_bias = bias16(layer.gate_up_bias, m.inner + column, 2 * m.inner);
        for (int64_t row = 0; row < s.rows; ++row) {
          const Floats g = load16(own.sums + row * kTile + i) + gate_bias;
          const Floats u = load16(own.more_sums + row * kTile + i) + up_bias;
          store16(activated_ + row * m.inner + column, silu(g) * u);
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
        page = key_page(s.pages(row)[position / m.page_size], kv_head, l) + position % m.page_size * m.head_dim;
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
      const int64_t left = m.head_dim - i;
      store16(to + i, load16(x + i, left), left);
    }
  }

  void norm_head(float* x, const float* weight) const {
    const Floats scale = filled(inverse_rms(x, m.head_dim));
    for (int64_t i = 0; i < m.head_dim; i += kLanes) {
      const int64_t left = m.head_dim - i;
      store16(x + i, load16(x + i, left) * scale * load16(weight + i, left), left);
    }
  }

  void rotate(const float* x, int64_t row, T* to) const {
    const int64_t half = m.head_dim / 2;
    for (int64_t i = 0; i < half; i += kLanes) {
      const int64_t left = half - i;
      const Floats a = load16(x + i, left), b = load16(x + half + i, left);
      const Floats c = load16(cos_ + row * half + i, left), d = load16(sin_ + row * half + i, left);
      store16(to + i, fms(a, c, b * d), left);
      store16(to + half + i, fma(b, c, a * d), left);
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
  static void prefetch(const char* from) {
    if (kTwoBlocksFit)
      asm volatile("prefetcht0 %0" : : "m"(*from));
    else
      asm volatile("prefetcht1 %0" : : "m"(*from));
  }

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
      with_head_dim([&](auto dim) { attend_task<dim>(task, layer, l, thread, ahead, more ? &next : nullptr); });
      if (stretches_ == 1 || parts_.ended[pair].fetch_add(1, std::memory_order_acq_rel) % stretches_ == stretches_ - 1)
        join(task.run, task.head);
      if (!more) return;
      if (ahead.task.part == task.part) ahead = Ahead(next);
      task = next;
    }
  }

  // `work` gets head_dim where it is one of the usual, and 0 otherwise: where it is a constant, addresses and masks are, too.
  template <class Work>
  void with_head_dim(const Work& work) const {
    if (m.head_dim == 64) return work(std::integral_constant<int, 64>{});
    if (m.head_dim == 128) return work(std::integral_constant<int, 128>{});
    work(std::integral_constant<int, 0>{});
  }

  // The unscaled output, the largest score and the sum of the exponentials relative to it (Milakov and Gimelshein,
  // "Online normalizer calculation for softmax", 2018), of every query.
  template <int Dim>
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
          score<Dim>(queries + from * padded_head_, count, keys, n, scores + at - begin, own_[thread].keys, ahead);
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
          gather<Dim>(scores + at - begin, count, keys + m.page_size * m.head_dim, n, output + from * padded_head_, ahead);
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
    return key_page(s.pages(task.run.row)[at / m.page_size], task.head, l) + offset * m.head_dim;
  }

  // `count` queries times n keys, at most 16, → scores [count][kPositions].
  template <int Dim>
  void score(const T* queries, int64_t count, const T* keys, int64_t n, float* scores, uint32_t* columns,
             Ahead& ahead) const {
    const int64_t left = n;
    if (count >= kTurned) {
      into_columns(keys, n, columns);
      for (int64_t q = 0; q < count; q += kColumnsAtOnce)
        with_count<kColumnsAtOnce>(count - q, [&](auto some) {
          Floats sums[some];
          column_dots<some>(queries + q * padded_head_, columns, sums, ahead);
          for (int i = 0; i < some; ++i) store16(scores + (q + i) * kPositions, sums[i], left);
        });
      return;
    }
    const int64_t lines = (kLanes + count - 1) / count;  // which is all of a piece, spread over the queries
    for (int64_t q = 0; q < count; ++q) {
      const T* query = queries + q * padded_head_;
      const Floats found = n == kLanes ? dots<Dim, true>(query, keys, n, lines, ahead)
                                       : dots<Dim, false>(query, keys, n, lines, ahead);
      store16(scores + q * kPositions, found, left);
    }
  }

  // Some queries times 16 keys, of which each word lies in one column.
  template <int Q>
  void column_dots(const T* queries, const uint32_t* columns, Floats* sums, Ahead& ahead) const {
    const auto* words = reinterpret_cast<const uint32_t*>(queries);
    const int64_t stride = padded_head_ / kWord;
    Floats sum[Q];
#pragma GCC unroll 16
    for (int q = 0; q < Q; ++q) sum[q] = zeros();
    for (int64_t w = 0; w < m.head_dim / kWord; ++w) {
      const Factors<T> column = factors<T>(load_words(columns + w * kLanes));
      ahead.ask(1);  // a piece has as many lines as a head has words
#pragma GCC unroll 16
      for (int q = 0; q < Q; ++q)
        sum[q] = add_products(T{}, factors<T>(filled(static_cast<int32_t>(words[q * stride + w]))), column, sum[q]);
    }
#pragma GCC unroll 16
    for (int q = 0; q < Q; ++q) sums[q] = sum[q];
  }

  // Rows of words into columns, 16 by 16, with zeros for keys that are missing.
  void into_columns(const T* keys, int64_t n, uint32_t* columns) const {
    const int64_t words = m.head_dim / kWord;
    for (int64_t w = 0; w < words; w += kLanes) {
      Words x[kLanes];
#pragma GCC unroll 16
      for (int k = 0; k < kLanes; ++k)
        x[k] = load_words(keys + (k < n ? k : 0) * m.head_dim + w * kWord, k < n ? words - w : 0);
      transpose(x);
      for (int64_t i = 0; i < kLanes && w + i < words; ++i) store_words(columns + (w + i) * kLanes, x[i]);
    }
  }

  // One query times 16 keys. Of fewer, the last is taken again for each that is missing.
  template <int Dim, bool Whole>
  Floats dots(const T* query, const T* keys, int64_t n, int64_t lines, Ahead& ahead) const {
    constexpr int64_t lanes = 64 / sizeof(T);
    const int64_t head_dim = Dim ? Dim : m.head_dim;
    Floats sum[kLanes];
#pragma GCC unroll 4
    for (int from = 0; from < kLanes; from += kKeysAtOnce) {
#pragma GCC unroll 16
      for (int k = from; k < from + kKeysAtOnce; ++k) sum[k] = zeros();
      for (int64_t i = 0; i < head_dim; i += lanes) {
        const Factors<T> q = factors<T>(load_words(query + i));
        const int64_t left = head_dim - i;
        ahead.ask((lines * kKeysAtOnce + kLanes - 1) / kLanes);
#pragma GCC unroll 16
        for (int k = from; k < from + kKeysAtOnce; ++k) {
          const T* key = keys + (Whole || k < n ? k : n - 1) * head_dim + i;
          sum[k] = add_products(T{}, q, factors<T>(load_line(key, left)), sum[k]);
        }
      }
    }
    return sums_of(sum);
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
    const Floats scale = filled(1.0f / std::sqrt(static_cast<float>(m.head_dim)));
    const Floats lowest = filled(kNever);
    Floats largest = lowest;
    for (int64_t i = 0; i < count; i += kLanes) {
      const int64_t left = count - i;
      const Floats scaled = load16(scores + i, left) * scale;
      store16(scores + i, scaled, left);
      largest = max(largest, select(first_lanes(left), scaled, lowest));
    }
    const float now = std::fmax(most, largest_of(largest));
    const Floats base = filled(now);
    Floats sum = zeros();
    for (int64_t i = 0; i < count; i += kLanes) {
      const int64_t left = count - i;
      const Floats weight = select(first_lanes(left), exponential(load16(scores + i, left) - base), zeros());
      store16(scores + i, weight, left);
      sum = sum + weight;
    }
    const float faded = std::exp(most - now);
    if (faded != 1.0f)
      for (int64_t i = 0; i < padded_head_; i += kLanes)
        store16(output + i, load16(output + i) * filled(faded));
    total = total * faded + sum_of(sum);
    most = now;
  }

  // Adds n values, weighted, to the outputs of `count` queries: 32 of head_dim at a time.
  template <int Dim>
  void gather(const float* weights, int64_t count, const T* values, int64_t n, float* output, Ahead& ahead) const {
    for (int64_t q = 0; q < count; q += kGatheredAtOnce)
      with_count<kGatheredAtOnce>(count - q, [&](auto some) {
        gather_some<Dim, some>(weights + q * kPositions, values, n, output + q * padded_head_, ahead);
      });
  }

  template <int Dim, int Q>
  void gather_some(const float* weights, const T* values, int64_t n, float* output, Ahead& ahead) const {
    const int64_t head_dim = Dim ? Dim : m.head_dim, padded = round_up(head_dim, 32);
    for (int64_t i = 0; i < head_dim; i += 32) {
      const int64_t left = head_dim - i;
      Floats sum[Q][2];
#pragma GCC unroll 16
      for (int q = 0; q < Q; ++q) {
        sum[q][0] = load16(output + q * padded + i);
        sum[q][1] = load16(output + q * padded + i + kLanes);
      }
      for (int64_t k = 0; k < n; ++k) {
        ahead.ask(32 * sizeof(T) / 64);  // as many lines as are read
        Floats first, second;
        load_both(values + k * head_dim + i, left, first, second);
#pragma GCC unroll 16
        for (int q = 0; q < Q; ++q) {
          const Floats weight = filled(weights[q * kPositions + k]);
          sum[q][0] = fma(weight, first, sum[q][0]);
          sum[q][1] = fma(weight, second, sum[q][1]);
        }
      }
#pragma GCC unroll 16
      for (int q = 0; q < Q; ++q) {
        store16(output + q * padded + i, sum[q][0]);
        store16(output + q * padded + i + kLanes, sum[q][1]);
      }
    }
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
        Floats first = zeros(), second = first;
        for (int64_t one = part; one < past; one += all) {
          const Floats weight = filled(std::exp(parts_.most[one] - most) / total);
          first = fma(load16(parts_.output + one * padded_head_ + lane), weight, first);
          second = fma(load16(parts_.output + one * padded_head_ + lane + kLanes), weight, second);
        }
        store_both(to + lane, m.head_dim - lane, first, second);
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
    const int64_t left = m.vocab - column;
    const Floats logits = load16(sums);
    store16(s.logits + row * m.vocab + column, logits, left);
    float* best = own.best + row * kLanes;
    int32_t* ids = own.best_ids + row * kLanes;
    const Mask better = greater(logits, load16(best)) & first_lanes(left);
    store16(best, select(better, logits, load16(best)));
    store_words(ids, select(better, counted() + filled(static_cast<int32_t>(column)), load_words(ids)));
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
