// A whole step: every layer, from token ids to logits, in one call.
//
// With few rows a step costs what it costs to read all weights once, so the products serve that stream: weights lie in
// tiles in the order in which they are read, each thread reads tiles of its own from end to end, and while it computes
// with one block of a tile it asks for the next, across tiles and from one product into the following one. With many rows
// threads take tiles, and parts of the rows, as they get to them, and a layer is run on a block of rows at a time: what one
// part of it has written is in the cache for the next.
//
// A tile is 64 outputs of a product: [steps][64] words of four bytes, a word being one input of a float32 weight or two
// adjoining ones of a bf16 weight, as the bf16 dot product takes them. oneDNN packs weights for itself in just this order.
// An output is summed over its inputs in their order, however many rows there are.
//
// A tile of codes has for each group of inputs 64 scales, perhaps 64 minimums, and the codes. A group is summed by itself,
// in the order of its inputs, then scaled and added to those before it.
#include <chrono>
#include <thread>

#include "attention.h"
#include "pool.h"
#include "tiles.h"

namespace baton {
namespace {

constexpr int kTile = kTileOutputs;
constexpr int kStepBytes = 256;    // of a tile for one word of input
constexpr int kBlockSteps = 64;    // 16 KiB, which stay in the first-level cache while rows pass over them
// The next block is asked for into the second level: the first has few places for lines under way, so requests into it
// made a step that reads all weights from memory a fifth longer. Where the first level is small (on AMD's processors),
// weights that are passed over once are foreseen better by the processor itself than it follows requests for every line,
// but for the first lines of each page.
constexpr int kPageSteps = 16;     // 4 KiB, beyond whose end processors foresee nothing
constexpr int kPageStart = 6;      // lines from which they see what comes
constexpr int kPageStartsOnly = -1;
template <class T>                 // weights and inputs may be two vectors each
constexpr bool kTwo = sizeof(Factors<T>) > sizeof(Floats);
template <class T>                 // what registers hold: 6 × 4 sums, or 8 × 2, and vectors of weights and of input
constexpr int kPassRows = kMany ? (kTwo<T> ? 8 : 6) : kTwo<T> ? 4 : 6;
template <class T>
constexpr int kPassSums = (kMany ? 24 : kPassRows<T>) / (kApart<T> ? 2 : 1);
template <class T, int R>          // vectors of outputs at a time
constexpr int kColumns = R * 4 <= kPassSums<T> / (kTwo<T> ? 2 : 1) ? 4 : R * 2 <= kPassSums<T> ? 2 : 1;
template <class T>                 // of codes, which are made factors anew in each pass
constexpr int kCodeRows = kMany && !kTwo<T> ? 8 : kPassRows<T>;
constexpr int64_t kFewRows = 64;     // that each thread norms for itself: it costs less than waiting for each other would
constexpr int64_t kBlockRows = kHasTiles ? 512 : 256;  // with fewer, weights are read more often; with more, less is cached
constexpr int64_t kShares = 8;       // for each thread, so that none waits long for another
constexpr int64_t kPartBytes = 1 << 20;  // of inputs that all tiles pass over in turn: they stay in the second-level cache
constexpr int kMostThreads = 256;
constexpr int64_t kTilesFrom = 5;     // rows that are multiplied in tiles of AMX
constexpr int64_t kCodeTilesFrom = 8;   // likewise with codes
constexpr int64_t kTilesAhead = 16384;  // bytes of weights that are asked for before they are read
constexpr int64_t kCodesAhead = 16384;  // bytes of codes that are asked for before they are read, by many rows
constexpr int64_t kFewAhead = 4096;     // likewise by few rows
constexpr int64_t kFewSoon = 1024;      // bytes before which few rows ask for them a second time, into the first level
constexpr int64_t kLeastGroup = 16;  // inputs
constexpr int64_t kBlockInputs = 128;  // of codes that are made factors at a time, for many rows; groups are no larger
constexpr int64_t kPartGroups = 4;     // whose scales and minimums registers hold, for two vectors of outputs
static_assert(kBlockInputs >= 2 * kBlockSteps);

}  // namespace

// What `forward.py` tells; the structures there are the same, field by field.
extern "C" {
struct Weight {
  const void* tiles;         // null: there is none
  int64_t bits;              // of a code; 0: words in the place of codes
  int64_t floats;            // 1: codes are E4M3, and scales 256 times what they are
  int64_t group;             // inputs
  int64_t wide;              // 1: scales are float32, or else fp16
  int64_t minimums;          // 1: there are some, in float32
  const int32_t* order;      // [inputs]: which of a row's numbers each input is; null: they follow one another
};

struct Expert {
  Weight gate_up;            // gate's tiles, then up's
  Weight down;
};

struct Layer {
  const float* input_norm;   // [hidden]
  Weight qkv;
  const float* qkv_bias;     // [outputs], or null, as all biases
  const float* qk_norm;      // [heads + kv_heads][head_dim], or null
  Weight output;             // none: of the last layer K and V are all that is needed, and `qkv` makes no queries
  const float* output_bias;
  const float* output_norm;  // [hidden], or null: of what attention adds to the residual stream
  const float* mlp_norm;     // [hidden]
  Weight gate_up;            // gate's tiles, then up's
  const float* gate_up_bias;
  Weight down;
  const float* down_bias;
  const float* down_norm;    // as `output_norm`
  int64_t window;            // positions attended to; 0: all
  int64_t rope;              // which of the model's
  Weight router;             // of experts, in the place of `gate_up` and `down`; or none
  const Expert* experts;     // [expert_count]
  int64_t expert_count, top_k;
  int64_t renormalise;       // 1: the shares of a row's experts add up to one
};

struct Model {
  int64_t dtype, hidden, inner, heads, kv_heads, head_dim, layers, vocab, page_size;
  int64_t gelu;              // 1: in the place of SiLU
  int64_t ropes, half;       // how many rotations there are, and how many pairs of a head turn
  int64_t most_experts, most_top_k, expert_inner;
  double norm_eps, embedding_scale, attention_scale;
  const void* embedding;     // [vocab][hidden]
  const float* frequencies;  // [ropes][half]
  const float* rope_factors; // [ropes]: of cosine and sine
  const float* norm;         // [hidden]
  Weight head;
  const Layer* layer;        // [layers]
  char* pool;                // [pages][kv_heads][layers] parts, as `Shape` says
  int64_t element, fp8;      // as `Shape` says
  int64_t ordered;           // the most inputs of a product that has an order
};

// Processes that compute chunks of one prompt at a time, layer behind layer, through slots that they share. A slot lies as a
// page does. Each process has a mark: of which ring it is, and how far it is. A mark is written after what it tells of.
struct Mark {
  alignas(64) std::atomic<int64_t> ring;
  std::atomic<int64_t> progress;  // number of the chunk · 2^32 + its layers that lie in slots
};
static_assert(sizeof(Mark) == 64);

struct Ring {
  Mark* marks;
  char* slots;
  int64_t name, place, number;       // of the ring; where this process's mark is; of the chunk
  int64_t awaits;                    // where the mark of the chunk before is; -1: this is the first chunk
  int64_t patience;                  // nanoseconds from the beginning of the step
  int64_t give_count, take_count;
  const int64_t* copies;             // [give_count + take_count][2]: pages with their slots
  int64_t broken;                    // 1: the chunk before did not come, and this step has left its layers
};

struct Batch {
  int64_t rows, sample_count, begun_count;
  const int64_t* ints;  // what follows, end to end
  void* hidden;         // [sample_count][hidden]: the normed hidden states of the sample rows
  float* logits;        // [sample_count][vocab], or null
  int64_t* best;        // [sample_count]: the likeliest token, of equal ones the lowest
  int64_t moved;        // 1: places are not positions
  int64_t observed_count;
  float* weights;       // [observed_count][weights_stride], zeros at first: what these rows attend to, by page
  int64_t weights_stride;
  Ring* ring;           // or null

  const int64_t* tokens() const { return ints; }                                // [rows]
  const int64_t* positions() const { return tokens() + rows; }                  // [rows]
  const int64_t* tables() const { return positions() + rows; }                  // [rows]: addresses of block tables
  const int64_t* sample_rows() const { return tables() + rows; }                // [sample_count], ascending
  const int64_t* begun() const { return sample_rows() + sample_count; }         // [begun_count]: pages to be zeroed first
  // [rows]: where in what they attend to the rows stand
  const int64_t* places() const { return moved ? begun() + begun_count : positions(); }
  // [observed_count], ascending
  const int64_t* observed() const { return begun() + begun_count + (moved ? rows : 0); }
};
}

namespace {

// --- products --------------------------------------------------------------------------------------------------------

// Rows of numbers, `stride` apart.
template <class T>
struct Rows {
  const T* at;
  int64_t stride;
  Rows from(int64_t row, int64_t number = 0) const { return {at + row * stride + number, stride}; }
};
template <class T>
using Inputs = Rows<Kept<T>>;

// How far apart rows of inputs begin: an odd number of cache lines. With 4 KiB, say, what a tile reads of its rows would have
// room in one set of the first-level cache alone.
template <class T>
int64_t stride_of(int64_t inputs) {
  return ((inputs * int64_t{sizeof(T)} + 63) / 64 | 1) * (64 / sizeof(T));
}

// Inputs as a pass reads them: as they are, or kept in `room`, [kPassRows][kBlockInputs].
template <class T>
Inputs<T> kept_inputs(const Rows<T>& x, int64_t rows, int64_t count, Kept<T>* room) {
  if constexpr (std::is_same_v<T, Kept<T>>) {
    return x;
  } else {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = 0; i < count; i += kLanes) store16(room + r * kBlockInputs + i, load16(x.from(r, i).at, count - i));
    return {room, kBlockInputs};
  }
}

// One pass of R rows over a block of a tile. `sums` is [R][kTile]. Each step asks for `Lines` cache lines from `ahead` on, or
// for one of those that the block's next page starts with.
template <class T, int R, int Lines>
void pass(const char* weights, const Inputs<T>& x, int64_t steps, bool first, float* sums, const char* ahead) {
  constexpr int V = kColumns<T, R>;
  constexpr int kAsked = (Lines * V + 3) / 4;  // lines meanwhile, at each step
  for (int column = 0, asked = 0; column < kTile; column += V * kLanes, asked += kAsked) {
    Floats sum[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < V; ++j) sum[r][j] = first ? zeros() : load16(sums + r * kTile + column + j * kLanes);
    add_words<T>(steps, sum, [&](int64_t s, Part<T>(&part)[R][V]) {
      Factors<T> w[V];
#pragma GCC unroll 4
      for (int j = 0; j < V; ++j) w[j] = factors<T>(load_words(weights + s * kStepBytes + column * 4 + j * 64));
      if constexpr (Lines == kPageStartsOnly) {
        if (column == 0 && s % kPageSteps < kPageStart)
          _mm_prefetch(weights + (s / kPageSteps + 1) * kPageSteps * kStepBytes + s % kPageSteps * 64, _MM_HINT_T1);
      } else if (asked + kAsked <= Lines) {
#pragma GCC unroll 4
        for (int line = asked; line < asked + kAsked; ++line)
          _mm_prefetch(ahead + (s * Lines + line) * 64, _MM_HINT_T1);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Factors<T> word = kept(T{}, x.at + r * x.stride, s);
#pragma GCC unroll 4
        for (int j = 0; j < V; ++j) part[r][j] = add_products(T{}, w[j], word, part[r][j]);
      }
    });
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < V; ++j) store16(sums + r * kTile + column + j * kLanes, sum[r][j]);
  }
}

template <class T, int Lines>
void pass(int64_t rows, const char* weights, const Inputs<T>& x, int64_t steps, bool first, float* sums, const char* ahead) {
  with_count<kPassRows<T>>(rows, [&](auto some) { pass<T, some, Lines>(weights, x, steps, first, sums, ahead); });
}

// As `tile` below, in tiles of AMX, and what is left of a span in vectors.
void tile_in_tiles(const char* weights, const Rows<bf16>& x, int64_t rows, int64_t steps, float* sums, const char* next,
                   Kept<bf16>* room, Tiles& tiles) {
  const int64_t passes = (rows + kTiledRows - 1) / kTiledRows, rest = steps % kSpan;
  const int64_t block = rows <= kTiledRows ? steps - rest : kBlockSteps;
  for (int64_t from = 0; from < steps - rest; from += block) {
    const int64_t spans = least(steps - rest - from, block) / kSpan;
    const char* const at = weights + from * kStepBytes;
    // Between them the passes ask for the next block, or if there is one pass, for what comes some spans later.
    const int64_t lines = (64 + passes - 1) / passes;
    const char* ahead = at + (passes == 1 ? kTilesAhead : spans * kSpan * kStepBytes);
    for (int64_t p = 0; p < passes; ++p) {
      const int64_t row = p * kTiledRows;
      tiles.multiply(at, x.from(row, from * 2).at, x.stride, least(rows - row, kTiledRows), spans, from == 0,
                     sums + row * kTile, ahead + p * spans * lines * 64, lines);
    }
  }
  if (!rest) return;
  for (int64_t row = 0, n; row < rows; row += n) {
    n = least(rows - row, kPassRows<bf16>);
    const Inputs<bf16> input = kept_inputs(x.from(row, (steps - rest) * 2), n, rest * 2, room);
    pass<bf16, 0>(n, weights + (steps - rest) * kStepBytes, input, rest, steps == rest, sums + row * kTile, next);
  }
}

// One tile for all rows: `x` [rows][steps] words → `sums` [rows][kTile]. `next` is what this thread reads after it.
template <class T>
void tile(const char* weights, const Rows<T>& x, int64_t rows, int64_t steps, float* sums, const char* next, Kept<T>* room,
          Tiles& tiles) {
  if constexpr (kApart<T>)
    if (rows >= kTilesFrom && tiles.allowed()) return tile_in_tiles(weights, x, rows, steps, sums, next, room, tiles);
  const int64_t passes = (rows + kPassRows<T> - 1) / kPassRows<T>;
  for (int64_t from = 0; from < steps; from += kBlockSteps) {
    const int64_t count = least(steps - from, kBlockSteps);
    const char* block = weights + from * kStepBytes;
    const char* ahead = from + count < steps ? block + count * kStepBytes : next;
    for (int64_t p = 0; p < passes; ++p) {
      const Range own = share(rows, static_cast<int>(p), static_cast<int>(passes));
      const int64_t n = own.last - own.first;
      const Inputs<T> input = kept_inputs(x.from(own.first, from * kWord<T>), n, count * kWord<T>, room);
      float* output = sums + own.first * kTile;
      // Between them the passes ask for the four lines of every step of the next block, once each.
      if (passes == 1) {
        pass<T, kLargeCache ? 4 : kPageStartsOnly>(n, block, input, count, from == 0, output, ahead);
      } else if (passes <= 3 && p < 2) {
        pass<T, 2>(n, block, input, count, from == 0, output, ahead + p * count * 128);
      } else if (passes > 3 && p < 4) {
        pass<T, 1>(n, block, input, count, from == 0, output, ahead + p * count * 64);
      } else {
        pass<T, 0>(n, block, input, count, from == 0, output, ahead);
      }
    }
  }
}

// --- products with codes ---------------------------------------------------------------------------------------------

int64_t scale_bytes(const Weight& weight) { return kTile * ((weight.wide ? 4 : 2) + (weight.minimums ? 4 : 0)); }
int64_t group_bytes(const Weight& weight) { return scale_bytes(weight) + weight.group / 2 * kTile * 2 * weight.bits / 8; }

// Where the factors of a group come from: its codes, or a block of those made before. Passes ask for what comes later: with
// codes for as many bytes as they read, `Columns` vectors of outputs at a time, and else for one line with each word.
template <class T, class Bits>
struct Codes {
  const char *at, *ahead;
  Factors<T> operator()(int64_t step, int vector) const { return decoded(T{}, Bits{}, at, step, vector); }
  template <int Columns>
  void ask(int64_t step, int column) const {
    constexpr int64_t kBytes = kWord<T> * Bits::kPairBytes / 2, kLine = kBytes < 64 ? kBytes : 64;
    for (int line = 0; line < Columns; ++line)
      if (const int64_t place = step * kBytes + (column + line) * kLine; (column + line) * kLine < kBytes) {
        _mm_prefetch(ahead + place, _MM_HINT_T1);
        _mm_prefetch(at + kFewSoon + place, _MM_HINT_T0);
      }
  }
};
template <class T>
struct Decoded {
  const Factors<T>* at;
  const char* ahead;
  const Factors<T>& operator()(int64_t step, int vector) const { return at[step * (kTile / kLanes) + vector]; }
  template <int>
  void ask(int64_t step, int column) const {
    if (column == 0) _mm_prefetch(ahead + step * 64, _MM_HINT_T1);
  }
};

// What a group multiplies its sums with.
struct Scales {
  const Weight& weight;
  const char* at;
  Floats scale(int column) const {
    return weight.wide ? load16(reinterpret_cast<const float*>(at) + column) : load16(reinterpret_cast<const fp16*>(at) + column);
  }
  Floats minimum(int column) const {
    return load16(reinterpret_cast<const float*>(at + kTile * (weight.wide ? 4 : 2)) + column);
  }
};

// What the inputs of each row's groups come to, for minimums; rows are `stride` apart.
struct Totals {
  const float* at;
  int64_t stride;
};

template <class T>
float total(const T* x, int64_t count) {
  Floats sum = zeros();
  for (int64_t i = 0; i < count; i += kLanes) sum = sum + load16(x + i);
  return sum_of(sum);
}

// One pass of R rows over a group of a tile. `sums` is [R][kTile].
template <class T, int R, class From>
void group_pass(const From& from, const Scales& scales, const Inputs<T>& x, const Totals& totals, int64_t group, bool first,
                float* sums) {
  constexpr int V = kColumns<T, R>;
  for (int column = 0; column < kTile; column += V * kLanes) {
    Floats sum[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < V; ++j) sum[r][j] = zeros();
    add_words<T>(group / kWord<T>, sum, [&](int64_t s, Part<T>(&part)[R][V]) {
      Factors<T> w[V];
#pragma GCC unroll 4
      for (int j = 0; j < V; ++j) w[j] = from(s, column / kLanes + j);
      from.template ask<V>(s, column / kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Factors<T> word = kept(T{}, x.at + r * x.stride, s);
#pragma GCC unroll 4
        for (int j = 0; j < V; ++j) part[r][j] = add_products(T{}, w[j], word, part[r][j]);
      }
    });
    Floats scale[V], minimum[V];
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) {
      scale[j] = scales.scale(column + j * kLanes);
      if (scales.weight.minimums) minimum[j] = scales.minimum(column + j * kLanes);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < V; ++j) {
        float* const to = sums + r * kTile + column + j * kLanes;
        Floats so_far = fma(sum[r][j], scale[j], first ? zeros() : load16(to));
        if (scales.weight.minimums) so_far = fma(filled(totals.at[r * totals.stride]), minimum[j], so_far);
        store16(to, so_far);
      }
  }
}

#ifdef BATON_TILES
// Adds what G groups came to, [G][rows][columns], to sums, scaled; with M and minimums.
template <int G, bool M>
inline void add_groups(const Weight& weight, const char* tile, const float* part, const Totals& totals, int64_t rows,
                       int64_t column, int64_t columns, bool first, float* sums) {
  for (int64_t c = 0; c < columns; c += 2 * kLanes) {
    Floats scale[G][2], minimum[G][2];
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g)
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        const Scales scales{weight, tile + g * group_bytes(weight)};
        scale[g][v] = scales.scale(column + c + v * kLanes);
        if (M) minimum[g][v] = scales.minimum(column + c + v * kLanes);
      }
    for (int64_t r = 0; r < rows; ++r) {
      float* const to = sums + r * kTile + column + c;
      Floats so_far[2] = {first ? zeros() : load16(to), first ? zeros() : load16(to + kLanes)};
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) {
        const Floats total = M ? filled(totals.at[r * totals.stride + g]) : zeros();
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
          so_far[v] = fma(load16(part + (g * rows + r) * columns + c + v * kLanes), scale[g][v], so_far[v]);
          if (M) so_far[v] = fma(total, minimum[g][v], so_far[v]);
        }
      }
      store16(to, so_far[0]);
      store16(to + kLanes, so_far[1]);
    }
  }
}

// As `code_tile` below, in tiles of AMX. While these multiply the last rows of a block of inputs, vectors make the codes of the
// next block bf16. `words` is for [kBlockInputs] codes made so, and behind them for what their groups come to.
template <class Bits>
inline void code_tile_in_tiles(const Weight& weight, const char* tile, const Rows<bf16>& x, const Totals& totals, int64_t rows,
                               int64_t inputs, float* sums, const char* next, uint32_t* words, Tiles& tiles) {
  const int64_t group = weight.group, bytes = group_bytes(weight), length = least(group / 2, kSpan), spans = group / 2 / length;
  const int64_t all = inputs / 2 / length, block = least(kBlockInputs / group, kPartGroups) * spans;  // in spans
  auto* const part = reinterpret_cast<float*>(words + kBlockInputs / 2 * kTile);  // [groups of a block][32][32]
  const auto make = [&](int64_t span) {
    if (span >= all) return;
    const int64_t at = span * bytes / spans, later = at + kCodesAhead - all / spans * bytes;
    const char* const codes = tile + span / spans * bytes + scale_bytes(weight);
    const char* const ahead = later < 0 ? tile + at + kCodesAhead : next + later;
    for (int64_t line = 0; line < bytes / spans / 64; ++line) _mm_prefetch(ahead + line * 64, _MM_HINT_T1);
    uint32_t* const to = words + span % block * length * kTile;
    for (int64_t s = 0, step = span % spans * length; s < length; ++s, ++step)
#pragma GCC unroll 4
      for (int j = 0; j < kTile / kLanes; ++j) store_words(to + s * kTile + j * kLanes, word_of(Bits{}, codes, step, j));
  };
  for (int64_t span = 0; span < block; ++span) make(span);
  for (int64_t begin = 0, count; begin < all; begin += count) {
    count = least(all - begin, block);
    const int64_t first = begin / spans, groups = count / spans;
    for (int64_t row = 0; row < rows; row += kTiledRows) {
      const int64_t n = least(rows - row, kTiledRows), columns = tiles.columns_of_part(n);
      const Totals own{totals.at + row * totals.stride + first, totals.stride};
      for (int64_t column = 0; column < kTile; column += columns) {
        const bool makes = row + n == rows && column + columns == kTile;
        tiles.multiply_groups(words + column, x.from(row, first * group).at, x.stride, n, length, spans, groups, part,
                              [&](int64_t span) {
                                if (makes) make(begin + block + span);
                              });
        with_count<kPartGroups>(groups, [&](auto some) {
          const auto add = weight.minimums ? add_groups<some, true> : add_groups<some, false>;
          add(weight, tile + first * bytes, part, own, n, column, columns, begin == 0, sums + row * kTile);
        });
      }
    }
  }
}
#endif

// One tile of codes for all rows: `x` [rows][inputs] → `sums` [rows][kTile]. Few rows have factors made in registers, many in
// `block`, for [kBlockInputs][kTile] codes. `next` is what this thread reads after it.
template <class T, class Bits>
void code_tile(const Weight& weight, const char* tile, const Rows<T>& x, const Totals& totals, int64_t rows, int64_t inputs,
               float* sums, const char* next, Factors<T>* block, Kept<T>* room, Tiles& tiles) {
#ifdef BATON_TILES
  if constexpr (kApart<T>)
    if (rows >= kCodeTilesFrom && tiles.allowed())
      return code_tile_in_tiles<Bits>(weight, tile, x, totals, rows, inputs, sums, next, reinterpret_cast<uint32_t*>(block),
                                      tiles);
#endif
  const int64_t group = weight.group, bytes = group_bytes(weight), steps = group / kWord<T>;
  const bool few = rows <= kCodeRows<T>;
  const int64_t most = few ? kCodeRows<T> : kPassRows<T>, passes = (rows + most - 1) / most;
  for (int64_t begin = 0; begin < inputs; begin += kBlockInputs) {
    const int64_t count = least(begin + kBlockInputs, inputs) - begin;
    const auto at = [&](int64_t i) { return tile + (begin + i) / group * bytes; };
    const int64_t distance = few ? kFewAhead : kCodesAhead;
    const auto codes = [&](int64_t i) {
      const int64_t later = (begin + i) / group * bytes + distance - inputs / group * bytes;
      return Codes<T, Bits>{at(i) + scale_bytes(weight), later < 0 ? at(i) + distance : next + later};
    };
    const auto made = [&](int64_t i) { return block + i / kWord<T> * (kTile / kLanes); };
    for (int64_t i = 0; !few && i < count; i += group) {
      const Codes<T, Bits> from = codes(i);
      for (int64_t s = 0; s < steps; ++s)
#pragma GCC unroll 4
        for (int j = 0; j < kTile / kLanes; ++j) made(i)[s * (kTile / kLanes) + j] = from(s, j);
    }
    for (int64_t p = 0; p < passes; ++p) {
      const Range own = share(rows, static_cast<int>(p), static_cast<int>(passes));
      const int64_t n = own.last - own.first;
      const Inputs<T> input = kept_inputs(x.from(own.first, begin), n, count, room);
      const auto pass = [&](auto some, const auto& from) {
        for (int64_t i = 0; i < count; i += group)
          group_pass<T, some>(from(i), {weight, at(i)}, {input.at + i, input.stride},
                              {totals.at + own.first * totals.stride + (begin + i) / group, totals.stride}, group,
                              begin + i == 0, sums + own.first * kTile);
      };
      if (few)
        with_count<kCodeRows<T>>(n, [&](auto some) { pass(some, codes); });
      else
        with_count<kPassRows<T>>(n, [&](auto some) {
          pass(some, [&](int64_t i) {
            const int64_t asked = p * steps * 64;
            return Decoded<T>{made(i), asked < bytes ? codes(i).ahead + asked : reinterpret_cast<const char*>(made(i))};
          });
        });
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
  T* normed;          // [up to kFewRows][hidden_stride_]
  Factors<T>* block;  // of [kBlockInputs][kTile] codes
  float* totals;      // of inputs, [as many rows as in `sums`][groups]
  const T* totalled;  // what those inputs are; null: none
  Kept<T>* room;      // inputs, [as many rows as a pass has][kBlockInputs]
  float* sums;        // [rows of a block, or samples][kTile]
  float* more_sums;   // likewise
  float* best;        // [samples][kLanes]: the largest logit of each lane so far
  int32_t* best_ids;  // likewise
  Scratch* scratch;
  Tiles* tiles;
};

// What attends together: some rows, where they came from, and the work that they make.
struct Group {
  int64_t rows, run_count, unit_count;
  const int64_t* from;  // [rows]: of the batch; null: those of the block
  Run* runs;
  Unit* units;
};

// One of the experts of a row.
struct Choice {
  int64_t expert, slot;  // where among all that experts compute it is
  float share;
};

// A matrix. Behind it there may be another one, of which each tile belongs to one of the first.
struct Matrix {
  Weight weight;
  int64_t outputs, inputs;
  bool twice = false;
};

constexpr int64_t kClosed = INT64_MAX;  // progress of a process that has left its ring

template <class T>
class Step {
 public:
  Step(const Model& model, const Batch& batch, Pool* pool, char* memory)
      : m(model), b(batch), pool_(pool), threads_(pool->threads()),
        shape_{m.heads, m.kv_heads, m.head_dim, m.page_size, m.layers, m.element, m.fp8} {
    qkv_size_ = round_up((m.heads + 2 * m.kv_heads) * m.head_dim, kTile);
    hidden_stride_ = stride_of<T>(m.hidden);
    attended_stride_ = stride_of<T>(m.heads * m.head_dim);
    const int64_t rows = least(b.rows, block_end(0, b.rows) + kBlockRows / 4), few = least(rows, kFewRows);
    const int64_t group = shape_.group(), samples = b.logits ? b.sample_count : 0;
    const int64_t drawn = least(samples, m.layers ? kFewRows : kBlockRows * 5 / 4);  // at a time
    int64_t longest = 0;
    for (int64_t row = 0; row < b.rows; ++row) longest = std::max(longest, b.places()[row]);
    const int64_t segments = longest / kSegment + 1;
    const int64_t most_inputs = std::max({m.hidden, m.heads * m.head_dim, m.inner, m.expert_inner});
    Carver carve(memory);
    x_ = carve.take<float>(b.rows * m.hidden);
    cos_ = carve.take<float>(m.ropes * b.rows * m.half);
    sin_ = carve.take<float>(m.ropes * b.rows * m.half);
    picked_ = carve.take<float>(rows * m.hidden);
    added_ = carve.take<float>(m.layer[0].output_norm ? rows * m.hidden : 0);
    normed_ = carve.take<T>(b.rows > kFewRows ? rows * hidden_stride_ : 0);
    qkv_ = carve.take<float>(rows * qkv_size_);
    queries_ = carve.take<T>(rows * m.heads * shape_.padded());
    attended_ = carve.take<T>(rows * attended_stride_);
    const int64_t routed = rows * m.most_top_k;
    activated_ = carve.take<T>(std::max(rows * stride_of<T>(m.inner), routed * stride_of<T>(m.expert_inner)));
    likely_ = carve.take<float>(rows * round_up(m.most_experts, kTile));
    chosen_ = carve.take<Choice>(routed);
    arranged_ = carve.take<T>(std::max(rows, drawn) * stride_of<T>(m.ordered));
    begin_of_ = carve.take<int64_t>(m.most_experts + 1);
    busy_ = carve.take<int64_t>(m.most_experts);
    gathered_ = carve.take<T>(routed * hidden_stride_);
    made_ = carve.take<float>(routed * m.hidden);
    ended_ = carve.take<std::atomic<int32_t>>(rows * m.kv_heads);
    slot_ = carve.take<int64_t>(rows);
    runs_ = carve.take<Run>(rows);
    units_ = carve.take<Unit>(rows * m.kv_heads * (segments + group / kWide + 1));
    parts_ = carve.take<float>(segments > 1 ? rows * m.heads * segments * (shape_.padded() + 2) : 0);
    for (int thread = 0; thread < threads_; ++thread) {
      Private<T>& own = own_[thread];
      own.normed = carve.take<T>(few * hidden_stride_);
      own.block = carve.take<Factors<T>>(kBlockInputs / kWord<T> * (kTile / kLanes));
      own.totals = carve.take<float>(std::max(rows, drawn) * most_inputs / kLeastGroup);
      own.room = carve.take<Kept<T>>(kPassRows<T> * kBlockInputs);
      own.sums = carve.take<float>(std::max(rows, drawn) * kTile);
      own.more_sums = carve.take<float>(rows * kTile);
      own.best = carve.take<float>(samples * kLanes);
      own.best_ids = carve.take<int32_t>(samples * kLanes);
      own.scratch = carve.take<Scratch>(1);
    }
    memory_used_ = carve.used();
  }

  int64_t memory_used() const { return memory_used_; }

  void run() {
    for (int64_t i = 0; i < least(b.rows, kBlockRows * 5 / 4) * m.kv_heads; ++i) ended_[i].store(0, std::memory_order_relaxed);
    pool_->run([this](int thread) { work(thread); });
  }

  // Only the product with the head: of `hidden`.
  void run_head() {
    pool_->run([this](int thread) {
      const FlushDenormals flush;
      Tiles tiles;
      own_[thread].tiles = &tiles;
      multiply_head(thread);
      if (thread == 0) choose();
    });
  }

  // The product of `hidden` with the head, with `bias` where there is one, to where logits lie otherwise, in this type.
  void run_product(const float* bias) {
    T* const to = static_cast<T*>(static_cast<void*>(b.logits));
    pool_->run([this, bias, to](int thread) {
      const FlushDenormals flush;
      Tiles tiles;
      own_[thread].tiles = &tiles;
      const Matrix matrix{m.head, m.vocab, m.hidden};
      const Rows<T> all{static_cast<const T*>(b.hidden), m.hidden}, input{arranged_, stride_of<T>(m.hidden)};
      for (int64_t begin = 0, end; begin < b.sample_count; begin = end) {
        end = block_end(begin, b.sample_count);
        const Range own = share(end - begin, thread, threads_);
        for (int64_t row = own.first; row < own.last; ++row)
          std::memcpy(arranged_ + row * input.stride, all.from(begin + row).at, m.hidden * sizeof(T));
        meet();
        multiply(matrix, input, end - begin, matrix, thread,
                 [&](int64_t column, int64_t first, int64_t rows, const float* sums, const float*) {
                   const Floats added = bias16(bias, column, m.vocab);
                   for (int64_t row = 0; row < rows; ++row)
                     store16(to + (begin + first + row) * m.vocab + column, load16(sums + row * kTile) + added, m.vocab - column);
                 });
        meet();
      }
    });
  }

 private:
  struct Block {
    int64_t first, last;    // rows of the batch
    int64_t sample, samples;  // the first of its sample rows, and how many there are
    int64_t rows() const { return last - first; }
  };

  // Where a block ends that begins at `first`; the last takes in a remainder too small to be worth reading all weights
  // once more.
  static int64_t block_end(int64_t first, int64_t rows) {
    return rows - first >= kBlockRows * 5 / 4 ? first + kBlockRows : rows;
  }

  void work(int thread) {
    const FlushDenormals flush;
    Tiles tiles;
    own_[thread].tiles = &tiles;
    const bool draws = m.layer[m.layers - 1].output.tiles;
    begin(thread);
    for (int64_t l = 0; l < m.layers; ++l) {
      const bool last = l + 1 == m.layers;
      if (b.ring && !take(*b.ring, l, thread)) return;
      Block block{0, 0, 0, 0};
      for (; block.last < b.rows; block.sample += block.samples) {
        block.first = block.last;
        block.last = block_end(block.first, b.rows);
        block.samples = 0;
        while (draws && block.sample + block.samples < b.sample_count && b.sample_rows()[block.sample + block.samples] < block.last)
          ++block.samples;
        run_block(l, last, block, thread);
      }
    }
    if (!draws || !b.logits || !b.sample_count) return;
    multiply_head(thread);
    if (thread == 0) choose();
  }

  void run_block(int64_t l, bool last, const Block& block, int thread) {
    const Layer& layer = m.layer[l];
    const bool only = b.rows == block.rows();
    const bool some = last && block.samples < block.rows();
    if (thread == 0 && (l == 0 || some || !only)) plan(block, some);  // read after the first meeting
    float* const x = x_ + block.first * m.hidden;
    const Rows<T> normed = norm(x, block.rows(), layer.input_norm, thread);
    const int64_t made = (layer.output.tiles ? m.heads + 2 * m.kv_heads : 2 * m.kv_heads) * m.head_dim;
    const Weight& after = last && !block.samples ? m.layer[0].qkv : layer.output;
    multiply({layer.qkv, made, m.hidden}, normed, block.rows(), {after, m.hidden, m.heads * m.head_dim}, thread,
             [&](int64_t column, int64_t first, int64_t rows, const float* sums, const float*) {
               const Floats bias = bias16(layer.qkv_bias, column, made);
               for (int64_t row = 0; row < rows; ++row)
                 store16(qkv_ + (first + row) * qkv_size_ + column, load16(sums + row * kTile) + bias);
             });
    meet();
    place(layer, l, block, thread);
    if (last) pick(block, thread);
    meet();
    if (b.ring && block.last == b.rows) give(*b.ring, l, thread);
    if (!last && b.observed_count) observe(layer, l, block, thread);
    if (!last) return finish(layer, l, x, block.rows(), m.layer[l + 1], thread);
    if (!block.samples) return;
    finish(layer, l, picked_, block.samples, m.layer[0], thread);
    const Range rows = share(block.samples, thread, threads_);
    for (int64_t row = rows.first; row < rows.last; ++row)
      norm_row(picked_ + row * m.hidden, m.norm, static_cast<T*>(b.hidden) + (block.sample + row) * m.hidden, m.hidden,
               m.norm_eps);
    meet();
  }

  // Waits for the chunks before to have come to a layer, and copies it from their slots. False: they don't.
  bool take(Ring& ring, int64_t l, int thread) {
    if (thread == 0) {
      Mark& own = ring.marks[ring.place];
      if (l == 0) patient_until_ = std::chrono::steady_clock::now() + std::chrono::nanoseconds(ring.patience);
      if (own.ring.load(std::memory_order_relaxed) != ring.name) {
        own.progress.store(0, std::memory_order_relaxed);
        own.ring.store(ring.name, std::memory_order_release);
      }
      ring.broken = ring.awaits >= 0 && !comes(ring, ((ring.number - 1) << 32) + l + 1);
    }
    meet();
    if (ring.broken) return false;
    copy_parts(ring, ring.give_count, ring.take_count, l, thread, [](char* page, char* slot, int64_t size) {
      std::memcpy(page, slot, size);
    });
    return true;
  }

  bool comes(const Ring& ring, int64_t progress) const {
    const Mark& mark = ring.marks[ring.awaits];
    while (true) {
      const int64_t now = mark.ring.load(std::memory_order_acquire) == ring.name ? mark.progress.load(std::memory_order_acquire) : 0;
      if (now == kClosed) return false;
      if (now >= progress) return true;
      if (std::chrono::steady_clock::now() > patient_until_) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }

  // A layer of this chunk is in its pages: copies it to slots.
  void give(Ring& ring, int64_t l, int thread) {
    copy_parts(ring, 0, ring.give_count, l, thread, [](char* page, char* slot, int64_t size) {
      std::memcpy(slot, page, size);
    });
    meet();
    if (thread == 0) ring.marks[ring.place].progress.store((ring.number << 32) + l + 1, std::memory_order_release);
  }

  template <class Copy>
  void copy_parts(const Ring& ring, int64_t first, int64_t count, int64_t l, int thread, const Copy& copy) {
    const Range own = share(count * m.kv_heads, thread, threads_);
    for (int64_t i = own.first; i < own.last; ++i) {
      const int64_t* const pair = ring.copies + 2 * (first + i / m.kv_heads);
      copy(m.pool + shape_.part(pair[0], i % m.kv_heads, l), ring.slots + shape_.part(pair[1], i % m.kv_heads, l),
           shape_.part_bytes());
    }
  }

  // A layer from attention on, for rows of `x`.
  void finish(const Layer& layer, int64_t l, float* x, int64_t rows, const Layer& next, int thread) {
    const Matrix gate_up{layer.gate_up, m.inner, m.hidden, true};
    const Matrix output{layer.output, m.hidden, m.heads * m.head_dim}, down{layer.down, m.hidden, m.inner};
    attend(layer, l, thread);
    meet();
    add(output, {attended_, attended_stride_}, rows, gate_up, x, layer.output_bias, layer.output_norm, thread);
    const Rows<T> normed = norm(x, rows, layer.mlp_norm, thread);
    if (layer.router.tiles) return mix(layer, x, rows, normed, thread);
    multiply(gate_up, normed, rows, down, thread, activates(layer.gate_up_bias, m.inner));
    meet();
    const Matrix head{m.head, m.vocab, m.hidden}, qkv{next.qkv, qkv_size_, m.hidden};
    const Rows<T> activated{activated_, stride_of<T>(m.inner)};
    add(down, activated, rows, l + 1 == m.layers ? head : qkv, x, layer.down_bias, layer.down_norm, thread);
  }

  // What makes gate and up the input of `down`.
  auto activates(const float* bias, int64_t inner) const {
    return [this, bias, inner, stride = stride_of<T>(inner)](int64_t column, int64_t first, int64_t count, const float* gate,
                                                             const float* up) {
      const Floats gate_bias = bias16(bias, column, 2 * inner), up_bias = bias16(bias, inner + column, 2 * inner);
      for (int64_t row = 0; row < count; ++row) {
        const Floats g = load16(gate + row * kTile) + gate_bias, u = load16(up + row * kTile) + up_bias;
        store16(activated_ + (first + row) * stride + column, (m.gelu ? gelu<T>(g) : silu<T>(g)) * u);
      }
    };
  }

  void meet() { pool_->meet(); }

  // Calls work(index) for all, on whichever thread is free. Threads come here equally often, and each takes one number more
  // than there is work.
  template <class Work>
  void share_out(int64_t count, int thread, const Work& work) {
    int64_t& taken = taken_[thread].before;
    for (int64_t index; (index = next_.fetch_add(1, std::memory_order_relaxed) - taken) < count;) work(index);
    taken += count + threads_;
  }

  // The first meeting of the threads comes before anybody reads what is made here.
  void begin(int thread) {
    for (int64_t i = thread; i < b.begun_count; i += threads_)
      std::memset(m.pool + b.begun()[i] * shape_.page_bytes(), 0, shape_.page_bytes());
    const Range rows = share(b.rows, thread, threads_);
    for (int64_t row = rows.first; row < rows.last; ++row) {
      copy_row(static_cast<const T*>(m.embedding) + b.tokens()[row] * m.hidden, x_ + row * m.hidden, m.hidden,
               static_cast<float>(m.embedding_scale));
      const auto position = static_cast<float>(b.positions()[row]);
      for (int64_t rope = 0; rope < m.ropes; ++rope)
        for (int64_t i = 0; i < m.half; ++i) {
          const float angle = position * m.frequencies[rope * m.half + i];
          const int64_t at = (rope * b.rows + row) * m.half + i;
          cos_[at] = m.rope_factors[rope] * std::cos(angle);
          sin_[at] = m.rope_factors[rope] * std::sin(angle);
        }
    }
    meet();
  }

  // RMSNorm of rows: of few, every thread's own.
  Rows<T> norm(const float* x, int64_t rows, const float* weight, int thread) {
    const bool many = rows > kFewRows;
    T* const to = many ? normed_ : own_[thread].normed;
    const Range own = many ? share(rows, thread, threads_) : Range{0, rows};
    for (int64_t row = own.first; row < own.last; ++row)
      norm_row(x + row * m.hidden, weight, to + row * hidden_stride_, m.hidden, m.norm_eps);
    if (many) meet();
    return {to, hidden_stride_};
  }

  static const char* tile_of(const Matrix& matrix, int64_t index) {
    const Weight& weight = matrix.weight;
    const int64_t bytes = weight.bits ? matrix.inputs / weight.group * group_bytes(weight) : matrix.inputs / kWord<T> * kStepBytes;
    return static_cast<const char*>(weight.tiles) + index * bytes;
  }
  static int64_t tiles_of(const Matrix& matrix) { return (matrix.outputs + kTile - 1) / kTile; }

  // The tile with which a thread begins when it has few rows.
  const char* own_tiles(const Matrix& matrix, int thread) const {
    return tile_of(matrix, share(tiles_of(matrix), thread, threads_).first);
  }

  // Calls done(column, first row, rows, sums, those of the second matrix) for 16 outputs at a time, whose sums are kTile
  // apart. `after` is the matrix that is read next.
  template <class Done>
  void multiply(const Matrix& matrix, Rows<T> x, int64_t rows, const Matrix& after, int thread, const Done& done) {
    const int64_t tiles = tiles_of(matrix);
    own_[thread].totalled = nullptr;
    if (matrix.weight.order) {
      const Range own = share(rows, thread, threads_);
      for (int64_t row = own.first; row < own.last; ++row)
        arrange(x.from(row).at, matrix.weight.order, arranged_ + row * stride_of<T>(matrix.inputs), matrix.inputs);
      x = {arranged_, stride_of<T>(matrix.inputs)};  // which is read until the next meeting
      meet();
    }
    const auto one = [&](int64_t t, int64_t first, int64_t count, const char* next) {
      multiply_tile(matrix, t, x, first, count, next, thread, done);
    };
    if (rows <= kFewRows) {
      const Range mine = share(tiles, thread, threads_);
      for (int64_t t = mine.first; t < mine.last; ++t)
        one(t, 0, rows, t + 1 < mine.last ? tile_of(matrix, t + 1) : own_tiles(after, thread));
      return;
    }
    const int64_t large = rows * x.stride * int64_t{sizeof(T)} / kPartBytes;
    const int64_t cuts = least(std::max((kShares * threads_ + tiles - 1) / tiles, large), rows / (8 * kPassRows<T>));
    share_out(tiles * cuts, thread, [&](int64_t index) {
      const Range part = share(rows, static_cast<int>(index / tiles), static_cast<int>(cuts));
      one(index % tiles, part.first, part.last - part.first, tile_of(matrix, (index + threads_) % tiles));
    });
  }

  static void arrange(const T* from, const int32_t* order, T* to, int64_t count) {
    if (!order) std::memcpy(to, from, count * sizeof(T));
    for (int64_t i = 0; order && i < count; ++i) to[i] = from[order[i]];
  }

  template <class Done>
  void multiply_tile(const Matrix& matrix, int64_t t, const Rows<T>& x, int64_t first, int64_t count, const char* next,
                     int thread, const Done& done) {
    Private<T>& own = own_[thread];
    const Rows<T> input = x.from(first);
    const Totals totals{own.totals, matrix.weight.minimums ? matrix.inputs / matrix.weight.group : 0};
    if (totals.stride && own.totalled != input.at) {  // for the same rows come in the same parts
      own.totalled = input.at;
      for (int64_t row = 0; row < count; ++row)
        for (int64_t g = 0; g < totals.stride; ++g)
          own.totals[row * totals.stride + g] = total(input.from(row, g * matrix.weight.group).at, matrix.weight.group);
    }
    const auto one = [&](int64_t index, float* sums, const char* then) {
      const char* const tiles = tile_of(matrix, index);
      if (!matrix.weight.bits) return tile<T>(tiles, input, count, matrix.inputs / kWord<T>, sums, then, own.room, *own.tiles);
      const auto multiply_codes = matrix.weight.bits == 4 ? code_tile<T, FourBits>
                                  : matrix.weight.floats  ? code_tile<T, E4m3Bits>
                                                          : code_tile<T, EightBits>;
      multiply_codes(matrix.weight, tiles, input, totals, count, matrix.inputs, sums, then, own.block, own.room, *own.tiles);
    };
    const int64_t second = t + tiles_of(matrix);
    one(t, own.sums, matrix.twice ? tile_of(matrix, second) : next);
    if (matrix.twice) one(second, own.more_sums, next);
    for (int64_t i = 0; i < kTile && t * kTile + i < matrix.outputs; i += kLanes)
      done(t * kTile + i, first, count, own.sums + i, own.more_sums + i);
  }

  static Floats bias16(const float* bias, int64_t column, int64_t outputs) {
    return bias ? load16(bias + column, outputs - column) : zeros();
  }

  // Adds a product, normed where there is a norm, to the residual stream.
  void add(const Matrix& matrix, const Rows<T>& input, int64_t rows, const Matrix& after, float* x, const float* bias,
           const float* norm, int thread) {
    multiply(matrix, input, rows, after, thread,
             [&](int64_t column, int64_t first, int64_t count, const float* sums, const float*) {
               const int64_t left = m.hidden - column;
               const Floats added = bias16(bias, column, m.hidden);
               for (int64_t row = 0; row < count; ++row) {
                 const int64_t at = (first + row) * m.hidden + column;
                 const Floats sum = load16(sums + row * kTile) + added;
                 if (norm)
                   store16(added_ + at, sum, left);
                 else
                   store16(x + at, load16(x + at, left) + sum, left);
               }
             });
    meet();
    if (!norm) return;
    const Range own = share(rows, thread, threads_);
    for (int64_t row = own.first; row < own.last; ++row) {
      float *const from = added_ + row * m.hidden, *const to = x + row * m.hidden;
      norm_row(from, norm, from, m.hidden, m.norm_eps);
      for (int64_t i = 0; i < m.hidden; i += kLanes)
        store16(to + i, load16(to + i, m.hidden - i) + load16(from + i, m.hidden - i), m.hidden - i);
    }
    meet();
  }

  // --- experts --------------------------------------------------------------------------------------------------------

  // What the experts of each row make of it, into the residual stream.
  void mix(const Layer& layer, float* x, int64_t rows, const Rows<T>& normed, int thread) {
    const Matrix router{layer.router, layer.expert_count, m.hidden};
    const int64_t wide = round_up(layer.expert_count, kTile), routed = rows * layer.top_k;
    multiply(router, normed, rows, router, thread,
             [&](int64_t column, int64_t first, int64_t count, const float* sums, const float*) {
               for (int64_t row = 0; row < count; ++row)
                 store16(likely_ + (first + row) * wide + column, load16(sums + row * kTile));
             });
    meet();
    const Range own = share(rows, thread, threads_), choices = share(routed, thread, threads_);
    for (int64_t row = own.first; row < own.last; ++row)
      choose_experts(layer, likely_ + row * wide, chosen_ + row * layer.top_k);
    meet();
    if (thread == 0) sort_by_expert(layer, routed);
    meet();
    for (int64_t i = choices.first; i < choices.last; ++i)
      arrange(normed.from(i / layer.top_k).at, layer.experts[chosen_[i].expert].gate_up.order,
              gathered_ + chosen_[i].slot * hidden_stride_, m.hidden);
    meet();
    const Rows<T> gathered{gathered_, hidden_stride_}, activated{activated_, stride_of<T>(m.expert_inner)};
    multiply_experts(m.expert_inner, m.hidden, gathered, thread, activates(nullptr, m.expert_inner), [&](int64_t expert) {
      return Matrix{layer.experts[expert].gate_up, m.expert_inner, m.hidden, true};
    });
    meet();
    const auto keep = [&](int64_t column, int64_t first, int64_t count, const float* sums, const float*) {
      for (int64_t row = 0; row < count; ++row)
        store16(made_ + (first + row) * m.hidden + column, load16(sums + row * kTile), m.hidden - column);
    };
    multiply_experts(m.hidden, m.expert_inner, activated, thread, keep, [&](int64_t expert) {
      return Matrix{layer.experts[expert].down, m.hidden, m.expert_inner};
    });
    meet();
    for (int64_t row = own.first; row < own.last; ++row)
      for (int64_t i = 0; i < m.hidden; i += kLanes) {
        const int64_t left = m.hidden - i;
        Floats sum = zeros();
        for (const Choice* one = chosen_ + row * layer.top_k; one < chosen_ + (row + 1) * layer.top_k; ++one)
          sum = fma(filled(one->share), load16(made_ + one->slot * m.hidden + i, left), sum);
        store16(x + row * m.hidden + i, load16(x + row * m.hidden + i, left) + sum, left);
      }
    meet();
  }

  // The likeliest experts of a row, by number, of equal ones those with the lowest.
  void choose_experts(const Layer& layer, float* likely, Choice* to) const {
    float most = kNever, sum = 0, chosen = 0;
    for (int64_t i = 0; i < layer.expert_count; ++i) most = std::max(most, likely[i]);
    for (int64_t i = 0; i < layer.expert_count; i += kLanes) {
      const Floats weight = exponential(load16(likely + i, layer.expert_count - i) - filled(most));
      store16(likely + i, weight, layer.expert_count - i);
    }
    for (int64_t i = 0; i < layer.expert_count; ++i) sum += likely[i];
    for (Choice* one = to; one < to + layer.top_k; ++one) {
      const int64_t best = std::max_element(likely, likely + layer.expert_count) - likely;
      *one = {best, 0, likely[best] / sum};
      chosen += one->share;
      likely[best] = -1;
    }
    std::sort(to, to + layer.top_k, [](const Choice& a, const Choice& c) { return a.expert < c.expert; });
    if (layer.renormalise)
      for (Choice* one = to; one < to + layer.top_k; ++one) one->share /= chosen;
  }

  // Gives each choice a slot: those of one expert side by side, in the order of their rows.
  void sort_by_expert(const Layer& layer, int64_t routed) {
    std::fill(begin_of_, begin_of_ + layer.expert_count + 1, 0);
    for (int64_t i = 0; i < routed; ++i) ++begin_of_[chosen_[i].expert + 1];
    busy_count_ = 0;
    for (int64_t expert = 0; expert < layer.expert_count; ++expert) {
      if (begin_of_[expert + 1]) busy_[busy_count_++] = expert;
      begin_of_[expert + 1] += begin_of_[expert];
    }
    for (int64_t i = 0; i < routed; ++i) chosen_[i].slot = begin_of_[chosen_[i].expert]++;
    std::copy_backward(begin_of_, begin_of_ + layer.expert_count, begin_of_ + layer.expert_count + 1);
    begin_of_[0] = 0;
  }

  // The product of each expert's rows with its matrix.
  template <class Done, class Of>
  void multiply_experts(int64_t outputs, int64_t inputs, const Rows<T>& x, int thread, const Done& done, const Of& matrix_of) {
    const int64_t tiles = tiles_of({{}, outputs, inputs}), count = busy_count_ * tiles;
    own_[thread].totalled = nullptr;
    share_out(count, thread, [&](int64_t index) {
      const int64_t expert = busy_[index / tiles], then = (index + threads_) % count;
      const char* const next = tile_of(matrix_of(busy_[then / tiles]), then % tiles);
      multiply_tile(matrix_of(expert), index % tiles, x, begin_of_[expert], begin_of_[expert + 1] - begin_of_[expert], next,
                    thread, done);
    });
  }

  // --- attention -----------------------------------------------------------------------------------------------------

  // Which rows of a block attend, where their queries go, and the work that they make, most first.
  void plan(const Block& block, bool some) {
    const int64_t rows = some ? block.samples : block.rows(), group = shape_.group();
    const auto row_of = [&](int64_t i) { return some ? b.sample_rows()[block.sample + i] : block.first + i; };
    std::fill(slot_, slot_ + block.rows(), -1);
    int64_t many = 0, part = 0;
    run_count_ = unit_count_ = 0;
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t row = row_of(i), position = b.places()[row], table = b.tables()[row];
      slot_[row - block.first] = i;
      Run* const run = runs_ + run_count_ - 1;
      if (run_count_ && run->end() == position && reinterpret_cast<int64_t>(run->pages) == table)
        ++run->rows;
      else
        runs_[run_count_++] = {i, 1, position, reinterpret_cast<const int64_t*>(table), 0};
    }
    for (Run* run = runs_; run < runs_ + run_count_; ++run)
      if (is_few(*run)) {
        run->part = part;
        part += m.kv_heads * run->segments() * run->rows * group * (shape_.padded() + 2);
      } else {
        many += m.kv_heads * ((run->rows * group + kWides * kWide - 1) / (kWides * kWide));
      }
    wides_ = many >= 4 * threads_ ? kWides : many >= 2 * threads_ ? kWides / 2 : 1;
    for (int64_t r = 0; r < run_count_; ++r) {
      const Run& run = runs_[r];
      const int64_t queries = run.rows * group, each = wides_ * kWide;
      const int64_t units = is_few(run) ? run.segments() : (queries + each - 1) / each;
      for (int64_t at = 0; at < units; ++at)
        for (int64_t head = 0; head < m.kv_heads; ++head) {
          const int64_t cost = is_few(run) ? queries * least(run.end() - at * kSegment, kSegment)
                                           : each * (run.position + (at + 1) * each / group);
          units_[unit_count_++] = {r, cost, static_cast<int32_t>(head), static_cast<int32_t>(is_few(run) ? at : at * each)};
        }
    }
    std::stable_sort(units_, units_ + unit_count_, [](const Unit& a, const Unit& c) { return a.cost > c.cost; });
  }

  bool is_few(const Run& run) const { return run.rows * shape_.group() <= kFew; }

  // Norms and rotates queries and keys, and writes keys and values into their pages.
  void place(const Layer& layer, int64_t l, const Block& block, int thread) {
    const int64_t heads = layer.output.tiles ? m.heads : 0, all = heads + 2 * m.kv_heads, rest = m.head_dim - 2 * m.half;
    const int64_t group = shape_.group();
    const Range rows = share(block.rows(), thread, threads_);
    int64_t r = 0;
    for (int64_t i = rows.first; i < rows.last; ++i) {
      const int64_t row = block.first + i, position = b.places()[row], slot = slot_[i];
      const int64_t page = reinterpret_cast<const int64_t*>(b.tables()[row])[position / m.page_size];
      const int64_t offset = position % m.page_size;
      while (slot >= 0 && runs_[r].row + runs_[r].rows <= slot) ++r;
      for (int64_t head = slot >= 0 ? 0 : heads; head < all; ++head) {
        float* const x = qkv_ + i * qkv_size_ + head * m.head_dim;
        const int64_t kv_head = head - heads;
        if (kv_head >= m.kv_heads) {
          write(x, m.pool + shape_.part(page, kv_head - m.kv_heads, l), m.page_size + offset);
          continue;
        }
        const float* const norm = layer.qk_norm + (kv_head < 0 ? head : m.heads + kv_head) * m.head_dim;
        if (layer.qk_norm) norm_row(x, norm, x, m.head_dim, m.norm_eps);
        const int64_t angles = (layer.rope * b.rows + row) * m.half;
        if (kv_head >= 0) {
          rotate(x, cos_ + angles, sin_ + angles, x, m.half);
          write(x, m.pool + shape_.part(page, kv_head, l), offset);
          continue;
        }
        T* const query = queries_ + (runs_[r].row * m.heads + (head / group * runs_[r].rows + slot - runs_[r].row) * group +
                                     head % group) * shape_.padded();
        rotate(x, cos_ + angles, sin_ + angles, query, m.half);
        if (rest) copy_row(x + 2 * m.half, query + 2 * m.half, rest);
      }
    }
  }

  // Puts K or V of a token into a part of its page.
  void write(const float* x, char* part, int64_t row) const {
    char* const to = part + row * shape_.row_bytes();
    if (!shape_.codes()) return copy_row(x, reinterpret_cast<T*>(to), m.head_dim);
    const float scale = shape_.fp8 ? quantise(x, reinterpret_cast<e4m3*>(to), m.head_dim)
                                   : quantise(x, reinterpret_cast<int8_t*>(to), m.head_dim);
    std::memcpy(part + shape_.scales_at() + row * sizeof scale, &scale, sizeof scale);
  }

  // The residual stream of the block's sample rows.
  void pick(const Block& block, int thread) {
    const Range rows = share(block.samples, thread, threads_);
    for (int64_t i = rows.first; i < rows.last; ++i)
      copy_row(x_ + b.sample_rows()[block.sample + i] * m.hidden, picked_ + i * m.hidden, m.hidden);
  }

  void attend(const Layer& layer, int64_t l, int thread) {
    const Attention<T> attention{shape_, m.pool, queries_, attended_, attended_stride_, parts_, ended_, l, layer.window,
                                static_cast<float>(m.attention_scale)};
    share_out(unit_count_, thread, [&](int64_t index) {
      const Unit& unit = units_[index];
      const int64_t next = index + threads_;  // likely
      const Run& run = runs_[unit.run];
      Scratch& scratch = *own_[thread].scratch;
      if (!is_few(run)) {
        const int64_t queries = run.rows * shape_.group();
        return attention.attend_many(run, unit.head, unit.at, least(unit.at + wides_ * kWide, queries), scratch,
                                     *own_[thread].tiles);
      }
      const Unit* const then = next < unit_count_ && is_few(runs_[units_[next].run]) ? units_ + next : nullptr;
      attention.attend_few(run, unit.run, unit, scratch, then ? runs_ + then->run : nullptr, then);
    });
  }

  // Adds what the observed rows of a block attend to in this layer, each row on one thread, so always in one order.
  void observe(const Layer& layer, int64_t l, const Block& block, int thread) {
    const Attention<T> attention{shape_, m.pool, queries_, nullptr, 0, nullptr, nullptr, l, layer.window,
                                static_cast<float>(m.attention_scale)};
    const Range rows = share(b.observed_count, thread, threads_);
    for (int64_t i = rows.first; i < rows.last; ++i) {
      const int64_t row = b.observed()[i] - block.first;
      if (row < 0 || row >= block.rows()) continue;
      const Run* run = runs_;
      while (run->row + run->rows <= row) ++run;
      for (int64_t head = 0; head < m.kv_heads; ++head)
        attention.observe(*run, head, row - run->row, b.weights + i * b.weights_stride, *own_[thread].scratch);
    }
  }

  // --- head ----------------------------------------------------------------------------------------------------------

  void multiply_head(int thread) {
    const Private<T>& own = own_[thread];
    std::fill(own.best, own.best + b.sample_count * kLanes, kNever);
    std::fill(own.best_ids, own.best_ids + b.sample_count * kLanes, 0);
    const Matrix head{m.head, m.vocab, m.hidden};
    for (int64_t from = 0, rows; from < b.sample_count; from += rows) {
      rows = least(b.sample_count - from, kFewRows);
      const Rows<T> hidden{static_cast<const T*>(b.hidden) + from * m.hidden, m.hidden};
      multiply(head, hidden, rows, {m.layer[0].qkv, qkv_size_, m.hidden}, thread,
               [&](int64_t column, int64_t, int64_t count, const float* sums, const float*) {
                 for (int64_t row = 0; row < count; ++row) keep_logits(from + row, column, sums + row * kTile, own);
               });
      meet();
    }
  }

  void keep_logits(int64_t row, int64_t column, const float* sums, const Private<T>& own) {
    const int64_t left = m.vocab - column;
    const Floats logits = load16(sums);
    store16(b.logits + row * m.vocab + column, logits, left);
    float* best = own.best + row * kLanes;
    int32_t* ids = own.best_ids + row * kLanes;
    const Mask better = greater(logits, load16(best)) & first_lanes(left);
    store16(best, select(better, logits, load16(best)));
    store_words(ids, select(better, counted() + filled(static_cast<int32_t>(column)), load_words(ids)));
  }

  void choose() {
    for (int64_t row = 0; row < b.sample_count; ++row) {
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
      b.best[row] = id;
    }
  }

  const Model& m;
  const Batch& b;
  Pool* const pool_;
  const int threads_;
  const Shape shape_;
  std::chrono::steady_clock::time_point patient_until_;
  int64_t qkv_size_, hidden_stride_, attended_stride_, wides_ = 1, run_count_ = 0, unit_count_ = 0, memory_used_ = 0;
  float* x_;       // [rows][hidden], the residual stream
  float* picked_;  // likewise of a block's sample rows
  T* normed_;      // [rows of a block][hidden_stride_]
  T* arranged_;    // [rows of a block][stride_of(ordered)]: inputs of a product in its order
  float* qkv_;     // [rows of a block][qkv_size_]
  T* queries_;     // of each run in turn [kv_heads][its rows][group][padded]
  float* added_;   // [rows of a block][hidden]: a product that is normed before it is added
  float* cos_;     // [ropes][rows][half]
  float* sin_;     // likewise
  T* attended_;    // [rows of a block][attended_stride_]
  T* activated_;   // [rows of a block][stride_of(inner)]
  float* likely_;    // [rows of a block][experts]: how the router likes them
  Choice* chosen_;   // [rows of a block][top_k], by number
  int64_t* begin_of_;  // the first slot of each expert
  int64_t* busy_;    // the experts that have slots
  T* gathered_;      // [slots][hidden_stride_]: their input
  float* made_;      // [slots][hidden]: and output
  int64_t busy_count_ = 0;
  std::atomic<int32_t>* ended_;
  int64_t* slot_;  // [rows of a block]: which of those that attend it is; −1: none
  Run* runs_;
  Unit* units_;
  float* parts_;
  std::atomic<int64_t> next_{0};
  struct alignas(64) Taken {
    int64_t before = 0;
  } taken_[kMostThreads];
  Private<T> own_[kMostThreads];
};

template <class Work>
int64_t with_step(const Model* model, const Batch* batch, Pool* pool, char* memory, int64_t size, const Work& work) {
  const auto run = [&](auto as) {
    using Own = Step<decltype(as)>;
    const int64_t needed = Own(*model, *batch, pool, nullptr).memory_used();
    if (needed <= size) work(Own(*model, *batch, pool, memory));
    return needed;
  };
  return model->dtype == kBfloat16 ? run(bf16{}) : run(float{});
}

}  // namespace
}  // namespace baton

extern "C" {

// One step. `memory`, aligned to 128 bytes, has `size` bytes. Returns how many are needed; where
// that is more, nothing was done.
int64_t baton_forward(const baton::Model* model, const baton::Batch* batch, baton::Pool* pool, char* memory, int64_t size) {
  return baton::with_step(model, batch, pool, memory, size, [](auto&& step) { step.run(); });
}

// The product of `batch->hidden`, [sample_count][hidden], with the head alone; `rows` is 0. Otherwise as above.
int64_t baton_head(const baton::Model* model, const baton::Batch* batch, baton::Pool* pool, char* memory, int64_t size) {
  return baton::with_step(model, batch, pool, memory, size, [](auto&& step) { step.run_head(); });
}

// A product by itself: likewise, of a model without layers, with `bias`, [vocab], or null, to `logits` in the model's type.
int64_t baton_product(const baton::Model* model, const baton::Batch* batch, const float* bias, baton::Pool* pool, char* memory,
                      int64_t size) {
  return baton::with_step(model, batch, pool, memory, size, [&](auto&& step) { step.run_product(bias); });
}
}
