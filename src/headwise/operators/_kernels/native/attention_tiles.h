// Tiles of queries against lists of keys: what the kernels of sparse attention are made of.
//
// Queries are taken 2 L at a time (two vectors; one where there are at most L): scores are kept transposed, [key][query], so
// that a softmax over keys needs no sum across lanes and no remainder, and both matrix products multiply vectors of queries
// by one number of k or v, read where it lies.  Only queries and results, of which each is touched once, are transposed.
// A query alone (a new one against a cache, a leading one that attends to everything) has its lanes along k and d instead.
// A tile lists the keys it meets as pointers; masked keys are not listed, and whatever they hold is never read.  Long lists
// are taken KEYS at a time with a running maximum.
#pragma once

#include "common.h"

#include <memory>
#include <optional>

namespace headwise::tiles {

template <typename T>
using Lanes = at::vec::Vectorized<T>;

constexpr int64_t KEYS = 256;  // keys of a tile that are worked on at once: 2 L KEYS scores are 32 KB
constexpr int64_t GROUP = 8;   // keys in one block of accumulators: as many pointers as there are registers for

inline Lanes<float> exponential(Lanes<float> x) { return x.exp_u20(); }
inline Lanes<double> exponential(Lanes<double> x) {
  alignas(64) double values[Lanes<double>::size()];
  x.store(values);
  for (double& value : values) value = std::exp(value);
  return Lanes<double>::loadu(values);
}

// ---- what a head shows to its queries ----

// Query i is at position p = i + n - m.  It attends to
//   keys p - left .. p + right, or with block > 0 from `left` before its block to `right` after it; blocks begin at `leading`
//   the first `leading` keys; positions below `leading` attend to all keys
//   the last `last` keys of every whole block of `every` keys but its own; these blocks begin at `leading` too
//   every `stride`-th key counted from its own, outside the band
//   `slots` keys and values of its block that are given beside k and v
// and in a causal call to none later than p.
struct Pattern {
  int64_t left, right, leading, block, every, last, stride, slots;
};
constexpr int64_t FIELDS = 8;

enum Rule : uint8_t { ALL, INSIDE, EARLIER, OUTSIDE, BEFORE, OF_BLOCK };  // which lanes attend to a key; see Tile::visible

struct Rows {
  int64_t first, step, count;     // queries first, first + step, ...
  bool column;                    // meets every stride-th key instead of the band
  const int64_t* list = nullptr;  // or these queries
  int64_t at(int64_t t) const { return list ? list[t] : first + t * step; }
};

struct Sizes {
  int64_t batch, heads, groups, m, n, width, values, slots, blocks;
  bool causal;
};

constexpr int64_t FEW = 4;  // up to so many queries are faster one by one

void add_run(std::vector<Rows>& tiles, int64_t begin, int64_t end, int64_t rows) {
  for (int64_t i = begin; i < end;) {
    const int64_t count = end - i <= FEW ? 1 : std::min(rows, end - i);
    tiles.push_back({i, 1, count, false});
    i += count;
  }
}

// Tiles of `rows` queries, of whole blocks where these are smaller; those of one tile meet the same summaries.
std::vector<Rows> tiles_of(const Pattern& p, const Sizes& s, int64_t rows) {
  std::vector<Rows> tiles;
  for (int64_t c = 0; c < std::min(p.stride, s.m); c++) {
    for (int64_t i = c; i < s.m; i += p.stride * rows) {
      tiles.push_back({i, p.stride, std::min(rows, (s.m - i + p.stride - 1) / p.stride), true});
    }
  }
  const int64_t ahead = s.n - s.m;
  const int64_t first = std::clamp<int64_t>(p.leading - ahead, 0, s.m);
  add_run(tiles, 0, first, rows);
  int64_t grid = std::max(p.block, p.every);
  if (!grid) {
    add_run(tiles, first, s.m, rows);
    return tiles;
  }
  if (!p.every && grid < rows) grid *= rows / grid;
  for (int64_t i = first; i < s.m;) {
    const int64_t place = (i + ahead - p.leading) % grid;
    const int64_t end = std::min(s.m, i + grid - place);
    add_run(tiles, i, end, rows);
    i = end;
  }
  return tiles;
}

// ---- products of vectors of queries with numbers of k or v; x[c][query], out[key][query] ----

template <typename T, int NV, int COUNT>
inline void dot_group(const T* const* keys, const T* x, int64_t width, T* out) {
  using V = Lanes<T>;
  constexpr int64_t L = V::size();
  const T* row[COUNT];
  V sum[COUNT][NV];
#pragma GCC unroll 16
  for (int u = 0; u < COUNT; u++) {
    row[u] = keys[u];
#pragma GCC unroll 2
    for (int w = 0; w < NV; w++) sum[u][w] = V(T(0));
  }
  for (int64_t c = 0; c < width; c++, x += NV * L) {
    V query[NV];
#pragma GCC unroll 2
    for (int w = 0; w < NV; w++) query[w] = V::loadu(x + w * L);
#pragma GCC unroll 16
    for (int u = 0; u < COUNT; u++) {
      const V key(row[u][c]);
#pragma GCC unroll 2
      for (int w = 0; w < NV; w++) sum[u][w] = at::vec::fmadd(key, query[w], sum[u][w]);
    }
  }
#pragma GCC unroll 16
  for (int u = 0; u < COUNT; u++) {
#pragma GCC unroll 2
    for (int w = 0; w < NV; w++) sum[u][w].store(out + (u * NV + w) * L);
  }
}

// out[j][query] = keys[j] . x[.][query]
template <typename T, int NV>
void dots(const T* const* keys, int64_t count, const T* x, int64_t width, T* out) {
  constexpr int64_t R = NV * Lanes<T>::size();
  int64_t j = 0;
  for (; j + GROUP <= count; j += GROUP) dot_group<T, NV, GROUP>(keys + j, x, width, out + j * R);
  const int64_t rest = count - j;
  if (rest & 4) dot_group<T, NV, 4>(keys + j, x, width, out + j * R), j += 4;
  if (rest & 2) dot_group<T, NV, 2>(keys + j, x, width, out + j * R), j += 2;
  if (rest & 1) dot_group<T, NV, 1>(keys + j, x, width, out + j * R);
}

template <typename T, int NV, int COUNT>
inline void mix_group(const T* const* rows, int64_t count, const T* weights, int64_t c, T* out) {
  using V = Lanes<T>;
  constexpr int64_t L = V::size();
  V sum[COUNT][NV];
#pragma GCC unroll 16
  for (int u = 0; u < COUNT; u++) {
#pragma GCC unroll 2
    for (int w = 0; w < NV; w++) sum[u][w] = V::loadu(out + ((c + u) * NV + w) * L);
  }
  for (int64_t j = 0; j < count; j++, weights += NV * L) {
    const T* row = rows[j] + c;
    V weight[NV];
#pragma GCC unroll 2
    for (int w = 0; w < NV; w++) weight[w] = V::loadu(weights + w * L);
#pragma GCC unroll 16
    for (int u = 0; u < COUNT; u++) {
      const V value(row[u]);
#pragma GCC unroll 2
      for (int w = 0; w < NV; w++) sum[u][w] = at::vec::fmadd(value, weight[w], sum[u][w]);
    }
  }
#pragma GCC unroll 16
  for (int u = 0; u < COUNT; u++) {
#pragma GCC unroll 2
    for (int w = 0; w < NV; w++) sum[u][w].store(out + ((c + u) * NV + w) * L);
  }
}

// out[c][query] += sum_j rows[j][c] weights[j][query]
template <typename T, int NV>
void mix(const T* const* rows, int64_t count, const T* weights, int64_t width, T* out) {
  constexpr int WIDE = Lanes<T>::size() >= 8 && NV == 1 ? 16 : 8;
  int64_t c = 0;
  for (; c + WIDE <= width; c += WIDE) mix_group<T, NV, WIDE>(rows, count, weights, c, out);
  const int64_t rest = width - c;
  if (rest & 8) mix_group<T, NV, 8>(rows, count, weights, c, out), c += 8;
  if (rest & 4) mix_group<T, NV, 4>(rows, count, weights, c, out), c += 4;
  if (rest & 2) mix_group<T, NV, 2>(rows, count, weights, c, out), c += 2;
  if (rest & 1) mix_group<T, NV, 1>(rows, count, weights, c, out);
}

template <typename T, int COUNT, int VECTORS>
inline void spread_group(T* const* out, const T* weights, int64_t rows, const T* x, int64_t stride, int64_t c) {
  using V = Lanes<T>;
  constexpr int64_t L = V::size();
  V sum[COUNT][VECTORS];
#pragma GCC unroll 4
  for (int u = 0; u < COUNT; u++) {
#pragma GCC unroll 4
    for (int w = 0; w < VECTORS; w++) sum[u][w] = V::loadu(out[u] + c + w * L);
  }
  for (int64_t i = 0; i < rows; i++) {
    V row[VECTORS];
#pragma GCC unroll 4
    for (int w = 0; w < VECTORS; w++) row[w] = V::loadu(x + i * stride + c + w * L);
#pragma GCC unroll 4
    for (int u = 0; u < COUNT; u++) {
      const V weight(weights[u * rows + i]);
#pragma GCC unroll 4
      for (int w = 0; w < VECTORS; w++) sum[u][w] = at::vec::fmadd(weight, row[w], sum[u][w]);
    }
  }
#pragma GCC unroll 4
  for (int u = 0; u < COUNT; u++) {
#pragma GCC unroll 4
    for (int w = 0; w < VECTORS; w++) sum[u][w].store(out[u] + c + w * L);
  }
}

template <typename T, int COUNT>
inline void spread_keys(T* const* out, const T* weights, int64_t rows, const T* x, int64_t stride) {
  constexpr int64_t L = Lanes<T>::size();
  int64_t c = 0;
  for (; c + 4 * L <= stride; c += 4 * L) spread_group<T, COUNT, 4>(out, weights, rows, x, stride, c);
  if (c + 2 * L <= stride) spread_group<T, COUNT, 2>(out, weights, rows, x, stride, c), c += 2 * L;
  if (c + L <= stride) spread_group<T, COUNT, 1>(out, weights, rows, x, stride, c);
}

// out[j][.] += sum_i weights[j][i] x[i][.], rows of x and out padded to whole vectors
template <typename T>
void spread(T* const* out, int64_t count, const T* weights, int64_t rows, const T* x, int64_t stride) {
  int64_t j = 0;
  for (; j + 4 <= count; j += 4) spread_keys<T, 4>(out + j, weights + j * rows, rows, x, stride);
  for (; j < count; j++) spread_keys<T, 1>(out + j, weights + j * rows, rows, x, stride);
}

// ---- the same for one query ----

template <typename T>
inline T dot(const T* a, const T* b, int64_t width) {
  using V = Lanes<T>;
  constexpr int64_t L = V::size();
  V sum(T(0));
  int64_t c = 0;
  for (; c + L <= width; c += L) sum = at::vec::fmadd(V::loadu(a + c), V::loadu(b + c), sum);
  if (c < width) sum = at::vec::fmadd(V::loadu(a + c, width - c), V::loadu(b + c, width - c), sum);
  return at::vec::vec_reduce_all<T>([](V& x, V& y) { return x + y; }, sum);
}

// out += weight row
template <typename T>
inline void add_row(T* out, T weight, const T* row, int64_t width) {
  using V = Lanes<T>;
  constexpr int64_t L = V::size();
  const V w(weight);
  int64_t c = 0;
  for (; c + L <= width; c += L) at::vec::fmadd(w, V::loadu(row + c), V::loadu(out + c)).store(out + c);
  if (c < width) at::vec::fmadd(w, V::loadu(row + c, width - c), V::loadu(out + c, width - c)).store(out + c, width - c);
}

// ---- the inputs ----

template <typename T>
struct Inputs {
  Sizes sizes;
  T scale;
  std::vector<Pattern> patterns;
  View<T> q, k, v, slot_keys;            // (b, h, m, k), (b, g, n, k), (b, g, n, d), (b, h, r, k)
  const bool* mask = nullptr;            // (b, h, n)
  int64_t mask_batch = 0, mask_head = 0;
  const T* slot_bias = nullptr;          // (b, h, blocks, r), contiguous
  const T* slot_values = nullptr;        // (b, h, blocks, r, d), contiguous
};

// Memory that a thread keeps for all of its tiles, aligned to cache lines.
template <typename T>
class Buffer {
 public:
  explicit Buffer(int64_t size) : memory_(size + 64 / sizeof(T)) {
    const auto address = reinterpret_cast<uintptr_t>(memory_.data());
    data_ = memory_.data() + (64 - address % 64) % 64 / sizeof(T);
  }
  operator T*() { return data_; }

 private:
  std::vector<T> memory_;
  T* data_;
};

inline int64_t padded(int64_t width, int64_t lanes) { return (width + lanes - 1) / lanes * lanes; }

template <typename T>
void transpose(const T* x, int64_t rows, int64_t columns, T* out) {  // both multiples of L
  constexpr int L = Lanes<T>::size();
  for (int64_t i = 0; i < rows; i += L) {
    for (int64_t j = 0; j < columns; j += L) {
      at::vec::transpose_mxn<T, L, L>(x + i * columns + j, columns, out + j * rows + i, rows);
    }
  }
}

// ---- one tile of queries ----

template <typename T, int NV>
class Tile {
 public:
  using V = Lanes<T>;
  static constexpr int64_t L = V::size();
  static constexpr int64_t R = NV * L;

  explicit Tile(const Inputs<T>& in)
      : in_(in),
        key_width_(padded(in.sizes.width, L)),
        value_width_(padded(in.sizes.values, L)),
        q_(R * key_width_),
        qt_(R * key_width_),
        rows_(R * value_width_),
        ot_(R * value_width_),
        s_(R * KEYS) {}

  // out, top and total of these queries; a column leaves its sums for the band to continue
  void forward(int64_t b, int64_t h, const Rows& rows, const View<T>& out, T* top, T* total) {
    begin(b, h, rows);
    if (alone()) return forward_row(out.at(b, h, rows.first), top[rows.first], total[rows.first]);
    started_ = !rows.column && pattern_->stride > 0;
    if (started_) {
      read(out, b, h, in_.sizes.values, value_width_, T(1), rows_);
      transpose<T>(rows_, R, value_width_, ot_);
      for (int64_t t = 0; t < R; t++) {
        const int64_t i = rows.at(std::min(t, rows.count - 1));
        top_[t] = top[i], total_[t] = total[i];
      }
    } else {
      std::fill_n(static_cast<T*>(ot_), R * value_width_, T(0));
      std::fill_n(top_, R, std::numeric_limits<T>::lowest());
      std::fill_n(total_, R, T(0));
    }
    keys([&] { attend(); });
    if (!rows.column) divide();
    write(out, top, total);
  }

  void forward_row(T* out, T& top, T& total) {
    std::fill_n(out, in_.sizes.values, T(0));
    top = std::numeric_limits<T>::lowest(), total = T(0);
    keys([&] {
      const T most = std::max(top, row_scores());
      const T shrink = std::exp(top - most);
      if (total > T(0) && shrink != T(1)) {
        for (int64_t c = 0; c < in_.sizes.values; c++) out[c] *= shrink;
      }
      total = total * shrink + row_weights(most, T(1));
      top = most;
      for (int64_t j = 0; j < count_; j++) add_row(out, s_[j], value_[j], in_.sizes.values);
    });
    const T inverse = total > T(0) ? T(1) / total : T(0);
    for (int64_t c = 0; c < in_.sizes.values; c++) out[c] *= inverse;
  }

 protected:
  // ot_ becomes the weighted mean, zero in rows without a key
  void divide() {
    for (int64_t t = 0; t < R; t += L) {
      const V sum = V::loadu(total_ + t);
      const V inverse = V::blendv(V(T(1)) / sum, V(T(0)), sum == V(T(0)));
      for (int64_t c = 0; c < in_.sizes.values; c++) (V::loadu(ot_ + c * R + t) * inverse).store(ot_ + c * R + t);
    }
  }

  void write(const View<T>& out, T* top, T* total) {
    transpose<T>(ot_, value_width_, R, rows_);
    for (int64_t t = 0; t < tile_->count; t++) {
      const int64_t i = tile_->at(t);
      std::copy_n(rows_ + t * value_width_, in_.sizes.values, out.at(b_, h_, i));
      top[i] = top_[t], total[i] = total_[t];
    }
  }

  // One query, whose list has only keys that it attends to.
  bool alone() const { return tile_->count == 1 && !pattern_->stride; }

  // s_[j], the scores of the listed keys; returns the largest
  T row_scores() {
    T most = std::numeric_limits<T>::lowest();
    for (int64_t j = 0; j < count_; j++) {
      s_[j] = dot<T>(q_, key_[j], in_.sizes.width) + bias_[j];
      most = std::max(most, s_[j]);
    }
    return most;
  }

  // s_[j] becomes exp(s_[j] - top) factor; returns the sum
  T row_weights(T top, T factor) {
    V sum(T(0));
    for (int64_t j = 0; j < count_; j += L) {
      const int64_t some = std::min(L, count_ - j);
      std::fill(s_ + j + some, s_ + j + L, -std::numeric_limits<T>::infinity());
      const V weight = exponential(V::loadu(s_ + j) - V(top)) * V(factor);
      weight.store(s_ + j);
      sum = sum + weight;
    }
    return at::vec::vec_reduce_all<T>([](V& x, V& y) { return x + y; }, sum);
  }

  void begin(int64_t b, int64_t h, const Rows& rows) {
    b_ = b, h_ = h, tile_ = &rows, pattern_ = &in_.patterns[h];
    const int64_t g = h / (in_.sizes.heads / in_.sizes.groups);
    keys_ = in_.k.at(b, g, 0), values_ = in_.v.at(b, g, 0);
    mask_ = in_.mask ? in_.mask + b * in_.mask_batch + h * in_.mask_head : nullptr;
    read(in_.q, b, h, in_.sizes.width, key_width_, in_.scale, q_);
    transpose<T>(q_, R, key_width_, qt_);
  }

  // rows of x as [query][width], zeros where there is none
  void read(const View<T>& x, int64_t b, int64_t h, int64_t width, int64_t stride, T factor, T* into) {
    const V f(factor);
    for (int64_t t = 0; t < R; t++, into += stride) {
      if (t >= tile_->count) {
        std::fill_n(into, stride, T(0));
        continue;
      }
      const T* row = x.at(b, h, tile_->at(t));
      int64_t c = 0;
      for (; c + L <= width; c += L) (V::loadu(row + c) * f).store(into + c);
      if (c < width) (V::loadu(row + c, width - c) * f).store(into + c);
    }
  }

  // List keys begin .. end, which all queries attend to, and call `use` for every KEYS of them.
  template <typename F>
  void list(int64_t begin, int64_t end, const F& use) {
    count_ = 0, ruled_ = false;
    for (int64_t j = begin; j < std::min(end, in_.sizes.n); j++) add(j, ALL, use);
    if (count_) use();
  }

  // List the keys of the tile and call `use` for every KEYS of them.
  template <typename F>
  void keys(const F& use) {
    const Sizes& s = in_.sizes;
    const Pattern& p = *pattern_;
    const int64_t ahead = s.n - s.m, first = tile_->first + ahead;
    const int64_t last = first + (tile_->count - 1) * tile_->step;
    count_ = 0, ruled_ = false;
    base_ = first;
    const auto flush = [&] {
      if (count_) use();
      count_ = 0, ruled_ = false;
    };
    const auto run = [&](int64_t begin, int64_t end, Rule rule) {
      for (int64_t j = std::max<int64_t>(begin, 0); j < std::min(end, s.n); j++) add(j, rule, use);
    };
    if (!s.causal && first < p.leading && !tile_->column) {  // these attend to everything
      run(0, s.n, ALL);
      flush();
      return;
    }
    int64_t least = s.n, most = 0, inner_begin = 0, inner_end = s.n;
    for (int64_t t = 0; t < R; t++) {
      const int64_t at = first + std::min(t, tile_->count - 1) * tile_->step;
      int64_t begin = at, end = at + 1;
      if (p.block) begin = p.leading + (at - p.leading) / p.block * p.block, end = begin + p.block;
      begin = std::max(begin - std::min(p.left, begin + 1), p.leading);
      end = std::min(end + std::min(p.right, s.n), s.n);
      if (s.causal) end = std::min(end, at + 1);
      least = std::min(least, begin), most = std::max(most, end);
      inner_begin = std::max(inner_begin, begin), inner_end = std::min(inner_end, end);
      begin_[t] = begin - base_, end_[t] = end - base_, own_[t] = at + 1 - base_;
      if (p.slots) block_[t] = (at - p.leading) / p.block;
    }
    if (tile_->column) {
      const Rule rule = s.causal ? BEFORE : OUTSIDE;
      for (int64_t j = first % p.stride; j < (s.causal ? last + 1 : s.n); j += p.stride) add(j, rule, use);
      flush();
      return;
    }
    run(0, s.causal ? std::min(p.leading, first + 1) : p.leading, ALL);
    if (s.causal) run(std::max<int64_t>(first + 1, 0), std::min(p.leading, last + 1), EARLIER);
    if (inner_begin < inner_end) {
      run(least, inner_begin, INSIDE);
      run(inner_begin, inner_end, ALL);
      run(inner_end, most, INSIDE);
    } else {
      run(least, most, INSIDE);
    }
    if (p.every) {
      const int64_t own = (first - p.leading) / p.every;
      for (int64_t block = 0; block < (s.causal ? own : (s.n - p.leading) / p.every); block++) {
        const int64_t end = p.leading + (block + 1) * p.every;
        if (block != own) run(end - p.last, end, ALL);
      }
    }
    if (p.slots && first >= p.leading) {
      const int64_t head = (b_ * s.heads + h_) * s.blocks, end = (last - p.leading) / p.block;
      for (int64_t block = (first - p.leading) / p.block; block <= end; block++) {
        for (int64_t t = 0; t < p.slots; t++) {
          const int64_t at = (head + block) * s.slots + t;
          if (in_.slot_bias[at] == -std::numeric_limits<T>::infinity()) continue;
          if (count_ == KEYS) flush();
          key_[count_] = in_.slot_keys.at(b_, h_, t), value_[count_] = in_.slot_values + at * s.values;
          position_[count_] = block, rule_[count_] = OF_BLOCK, bias_[count_] = in_.slot_bias[at];
          slot_[count_] = t;
          ruled_ = true;
          count_++;
        }
      }
    }
    flush();
  }

  // Add key j unless it is masked; `use` the list first if it is full.
  template <typename F>
  void add(int64_t j, Rule rule, const F& use) {
    if (mask_ && !mask_[j]) return;
    if (count_ == KEYS) use(), count_ = 0, ruled_ = false;
    key_[count_] = keys_ + j * in_.k.row, value_[count_] = values_ + j * in_.v.row;
    position_[count_] = j, rule_[count_] = rule, bias_[count_] = T(0), slot_[count_] = -1;
    ruled_ |= rule != ALL;
    count_++;
  }

  // The lanes that attend to key j of the list, as a mask.
  V visible(int64_t j, int64_t w) const {
    if (rule_[j] == OF_BLOCK) return V(static_cast<T>(position_[j])) == V::loadu(block_ + w * L);
    const V at(static_cast<T>(position_[j] - base_));
    const V begin = V::loadu(begin_ + w * L), end = V::loadu(end_ + w * L);
    switch (rule_[j]) {
      case INSIDE: return (at >= begin) & (at < end);
      case EARLIER: return at < V::loadu(own_ + w * L);
      case OUTSIDE: return (at < begin) | (at >= end);
      default: return at < begin;
    }
  }

  // s_, the scores of the listed keys, -inf where a query does not attend
  void scores() {
    dots<T, NV>(key_, count_, qt_, in_.sizes.width, s_);
    const V hidden(-std::numeric_limits<T>::infinity());
    if (ruled_) {
      for (int64_t j = 0; j < count_; j++) {
        if (bias_[j] != T(0)) {
          for (int w = 0; w < NV; w++) (V::loadu(s_ + j * R + w * L) + V(bias_[j])).store(s_ + j * R + w * L);
        }
        if (rule_[j] == ALL) continue;
        for (int w = 0; w < NV; w++) {
          V::blendv(hidden, V::loadu(s_ + j * R + w * L), visible(j, w)).store(s_ + j * R + w * L);
        }
      }
    }
  }

  void attend() {
    scores();
    absorb();
  }

  // ot_, top_ and total_ after the listed keys, whose scores are s_
  void absorb() {
    V most[NV], before[NV], sum[NV];
    for (int w = 0; w < NV; w++) most[w] = before[w] = V::loadu(top_ + w * L), sum[w] = V::loadu(total_ + w * L);
    for (int64_t j = 0; j < count_; j++) {
      for (int w = 0; w < NV; w++) most[w] = at::vec::maximum(most[w], V::loadu(s_ + j * R + w * L));
    }
    for (int w = 0; w < NV; w++) {
      const V shrink = exponential(before[w] - most[w]);
      sum[w] = sum[w] * shrink;
      shrink.store(total_ + w * L);
      most[w].store(top_ + w * L);
    }
    if (started_) {
      for (int64_t c = 0; c < in_.sizes.values; c++) {
        for (int w = 0; w < NV; w++) {
          (V::loadu(ot_ + c * R + w * L) * V::loadu(total_ + w * L)).store(ot_ + c * R + w * L);
        }
      }
    }
    for (int64_t j = 0; j < count_; j++) {
      for (int w = 0; w < NV; w++) {
        const V weight = exponential(V::loadu(s_ + j * R + w * L) - most[w]);
        weight.store(s_ + j * R + w * L);
        sum[w] = sum[w] + weight;
      }
    }
    for (int w = 0; w < NV; w++) sum[w].store(total_ + w * L);
    mix<T, NV>(value_, count_, s_, in_.sizes.values, ot_);
    started_ = true;
  }

  const Inputs<T>& in_;
  const int64_t key_width_, value_width_;
  Buffer<T> q_, qt_, rows_, ot_, s_;  // [query][c], [c][query], [query][c], [c][query], [key][query]
  int64_t b_ = 0, h_ = 0;
  const Rows* tile_ = nullptr;
  const Pattern* pattern_ = nullptr;
  const T *keys_ = nullptr, *values_ = nullptr;  // of this head
  const bool* mask_ = nullptr;
  alignas(64) T top_[R], total_[R], begin_[R], end_[R], own_[R];  // the last three relative to base_
  alignas(64) T block_[R];                                       // the block of each query
  int64_t base_ = 0, count_ = 0;
  bool started_ = false;  // ot_ and total_ are not zero
  bool ruled_ = false;    // some key of the list is not for all lanes, or has a bias
  const T* key_[KEYS];
  const T* value_[KEYS];
  int64_t position_[KEYS];  // of a slot: its block
  int64_t slot_[KEYS];      // -1 for keys of the sequence
  Rule rule_[KEYS];
  T bias_[KEYS];
};

// ---- tensors ----

struct Arguments {
  at::Tensor q, k, v, mask, slot_keys, slot_bias, slot_values;
  Sizes sizes;
};

at::Tensor by_rows(const at::Tensor& x, at::ScalarType type) {
  const at::Tensor y = x.to(type);
  return y.stride(-1) == 1 || y.size(-1) == 1 ? y : y.contiguous();
}

Arguments checked(
    const char* name, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& key_mask,
    const std::optional<at::Tensor>& slot_keys, const std::optional<at::Tensor>& slot_bias,
    const std::optional<at::Tensor>& slot_values, at::IntArrayRef patterns, bool causal) {
  TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, name, ": q, k and v must have four axes");
  const at::ScalarType type = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  Arguments a;
  a.q = by_rows(q, type), a.k = by_rows(k, type), a.v = by_rows(v, type);
  Sizes& s = a.sizes;
  s = {q.size(0), q.size(1), k.size(1), q.size(2), k.size(2), q.size(3), v.size(3), 0, 0, causal};
  TORCH_CHECK(
      k.size(0) == s.batch && v.size(0) == s.batch && v.size(1) == s.groups && v.size(2) == s.n && k.size(3) == s.width,
      name, ": q ", q.sizes(), ", k ", k.sizes(), " and v ", v.sizes(), " do not fit together");
  TORCH_CHECK(s.groups > 0 && s.heads % s.groups == 0, name, ": ", s.heads, " heads do not share ", s.groups);
  TORCH_CHECK(
      int64_t(patterns.size()) == s.heads * FIELDS, name, ": a pattern has ", FIELDS, " numbers for each of ",
      s.heads, " heads, but there are ", patterns.size());
  if (key_mask) {
    TORCH_CHECK(
        key_mask->scalar_type() == at::kBool && key_mask->sizes() == at::IntArrayRef({s.batch, s.heads, s.n}),
        name, ": key_mask must be boolean (b, h, n), but is ", key_mask->sizes());
    a.mask = s.n > 1 && key_mask->stride(2) != 1 ? key_mask->contiguous() : *key_mask;
  }
  if (slot_keys) {
    TORCH_CHECK(slot_bias && slot_values, name, ": slots need keys, biases and values");
    s.blocks = slot_bias->size(2), s.slots = slot_bias->size(3);
    TORCH_CHECK(
        slot_keys->sizes() == at::IntArrayRef({s.batch, s.heads, s.slots, s.width}) &&
            slot_bias->sizes() == at::IntArrayRef({s.batch, s.heads, s.blocks, s.slots}) &&
            slot_values->sizes() == at::IntArrayRef({s.batch, s.heads, s.blocks, s.slots, s.values}),
        name, ": slot keys ", slot_keys->sizes(), ", biases ", slot_bias->sizes(), " and values ",
        slot_values->sizes(), " do not fit together");
    a.slot_keys = by_rows(*slot_keys, type);
    a.slot_bias = slot_bias->to(type).contiguous(), a.slot_values = slot_values->to(type).contiguous();
  }
  return a;
}

template <typename T>
Inputs<T> inputs_of(const Arguments& a, at::IntArrayRef numbers, double scale) {
  Inputs<T> in;
  in.sizes = a.sizes, in.scale = T(scale);
  in.q = view<T>(a.q), in.k = view<T>(a.k), in.v = view<T>(a.v);
  const Sizes& s = a.sizes;
  for (int64_t h = 0; h < s.heads; h++) {
    const int64_t* x = numbers.data() + h * FIELDS;
    const Pattern p{x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]};
    TORCH_CHECK(
        p.leading >= 0 && p.leading <= s.n && p.block >= 0 && p.every >= 0 && p.last >= 0 && p.last <= std::max<int64_t>(p.every, 0) &&
            p.stride >= 0 && p.slots >= 0 && p.slots <= s.slots && (!p.block || !p.every || p.block == p.every) &&
            (!p.stride || (s.m == s.n && !p.leading && !p.block)) &&
            (!p.slots || (p.block && s.blocks * p.block >= s.n - p.leading)),
        "sparse_attention: the pattern ", at::IntArrayRef(x, FIELDS), " of head ", h, " is not one");
    in.patterns.push_back(p);
  }
  if (a.mask.defined()) {
    in.mask = a.mask.data_ptr<bool>(), in.mask_batch = a.mask.stride(0), in.mask_head = a.mask.stride(1);
  }
  if (a.slot_keys.defined()) {
    in.slot_keys = view<T>(a.slot_keys);
    in.slot_bias = a.slot_bias.data_ptr<T>(), in.slot_values = a.slot_values.data_ptr<T>();
  }
  return in;
}

}  // namespace headwise::tiles
