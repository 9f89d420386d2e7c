// Blocks of rows of q, k and v in the cache, and their softmaxes: what both kernels of the double softmax begin with.
#pragma once

#include "block_product.h"

#include <optional>

namespace headwise::rows_of_heads {

inline at::Tensor by_rows(const at::Tensor& x) { return x.stride(-1) == 1 || x.size(-1) == 1 ? x : x.contiguous(); }

// A new tensor (b, h, rows, width) that lies as (b, rows, h, width).
inline at::Tensor empty_heads(int64_t b, int64_t h, int64_t rows, int64_t width, const at::TensorOptions& options) {
  return at::empty({b, rows, h, width}, options).transpose(1, 2);
}

// ---- arguments ----

struct Sizes {
  int64_t batch, heads, m, n, k, d;
  int64_t features() const { return round_up(k, W); }
  int64_t values() const { return round_up(d, W); }
};

struct Mask {
  const bool* data = nullptr;
  int64_t batch = 0, head = 0;
  const bool* at(int64_t b, int64_t h) const { return data ? data + b * batch + h * head : nullptr; }
};

struct Arguments {
  at::Tensor q, k, v, mask;
  Sizes sizes;
  Mask shown() const {
    return mask.defined() ? Mask{mask.data_ptr<bool>(), mask.stride(0), mask.stride(1)} : Mask{};
  }
};

// q (b, h, m, k), k (b, h, n, k) and v (b, h, n, d) of one dtype, key_mask (b, h, n), with contiguous rows.
inline Arguments checked(
    const char* name, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& key_mask) {
  TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, name, ": q, k and v must have four axes");
  const at::ScalarType type = q.scalar_type();
  TORCH_CHECK(
      (type == at::kFloat || type == at::kBFloat16) && k.scalar_type() == type && v.scalar_type() == type, name,
      ": q, k and v must be float32 or bfloat16");
  Arguments a{by_rows(q), by_rows(k), by_rows(v), {}, {q.size(0), q.size(1), q.size(2), k.size(2), q.size(3), v.size(3)}};
  const Sizes& s = a.sizes;
  TORCH_CHECK(
      k.sizes() == at::IntArrayRef({s.batch, s.heads, s.n, s.k}) && v.sizes() == at::IntArrayRef({s.batch, s.heads, s.n, s.d}),
      name, ": q ", q.sizes(), ", k ", k.sizes(), " and v ", v.sizes(), " do not fit together");
  if (key_mask) {
    TORCH_CHECK(
        key_mask->scalar_type() == at::kBool && key_mask->sizes() == at::IntArrayRef({s.batch, s.heads, s.n}), name,
        ": key_mask must be boolean (b, h, n), but is ", key_mask->sizes());
    a.mask = s.n > 1 && key_mask->stride(2) != 1 ? key_mask->contiguous() : *key_mask;
  }
  return a;
}

// ---- rows ----

inline void read_row(const float* x, int64_t width, float factor, float* to) {
  const Vec f(factor);
  int64_t c = 0;
  for (; c + W <= width; c += W) (Vec::loadu(x + c) * f).store(to + c);
  if (c < width) (Vec::loadu(x + c, width - c) * f).store(to + c);
}
inline void read_row(const c10::BFloat16* x, int64_t width, float factor, float* to) {
  for (int64_t c = 0; c < width; c++) to[c] = factor * static_cast<float>(x[c]);
  std::fill(to + width, to + round_up(width, W), 0.0f);
}

inline void write_row(const float* x, int64_t width, float factor, float* to) {
  const Vec f(factor);
  int64_t c = 0;
  for (; c + W <= width; c += W) (Vec::loadu(x + c) * f).store(to + c);
  if (c < width) (Vec::loadu(x + c, width - c) * f).store(to + c, width - c);
}
inline void write_row(const float* x, int64_t width, float factor, c10::BFloat16* to) {
  for (int64_t c = 0; c < width; c++) to[c] = static_cast<c10::BFloat16>(factor * x[c]);
}

// Rows at[0], at[1], ... of one head times `factor`, as floats with `leading` = round_up(width, W) a row, zeros after `width`.
template <typename T>
void read_rows(
    const View<T>& x, int64_t b, int64_t h, const int64_t* at, int64_t count, int64_t width, int64_t leading, float factor,
    float* to) {
  constexpr int64_t LINE = 64 / sizeof(T), AHEAD = 48;  // rows after these, which are read after those of other heads
  for (int64_t i = 0; i < count; i++) {
    const T* row = x.at(b, h, at[i]);
    for (int64_t c = 0; c < width; c += LINE) __builtin_prefetch(row + AHEAD * x.row + c, 0, 2);
    read_row(row, width, factor, to + i * leading);
  }
}

// The first `width` of W lanes of x, the others `other`.
inline Vec first_lanes(Vec x, int64_t width, float other) { return width >= W ? x : Vec::set(Vec(other), x, width); }

// x (count, leading) becomes the softmax of each row over its first `width` entries, zeros after them.
inline void softmax_rows(float* x, int64_t count, int64_t width, int64_t leading) {
  const float least = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < count; i++, x += leading) {
    Vec most(least);
    for (int64_t c = 0; c < leading; c += W) most = at::vec::maximum(most, first_lanes(Vec::loadu(x + c), width - c, least));
    const Vec top(maximum(most));
    Vec total(0.0f);
    for (int64_t c = 0; c < leading; c += W) {
      const Vec e = first_lanes(exp_nonpositive(Vec::loadu(x + c) - top), width - c, 0.0f);
      e.store(x + c);
      total = total + e;
    }
    const Vec inverse(1.0f / sum(total));
    for (int64_t c = 0; c < leading; c += W) (Vec::loadu(x + c) * inverse).store(x + c);
  }
}

// Positions first .. end that the mask of a head shows, at most `most` of them; returns their number and moves `first`.
inline int64_t next_rows(const bool* mask, int64_t& first, int64_t end, int64_t most, int64_t* at) {
  int64_t count = 0;
  for (; first < end && count < most; first++) {
    if (!mask || mask[first]) at[count++] = first;
  }
  return count;
}

// out (columns, round_up(rows, W)) = x (rows, leading) transposed, zeros after `rows`; columns <= leading.
inline void transpose_into(const float* x, int64_t rows, int64_t columns, int64_t leading, float* out) {
  const int64_t padded = round_up(rows, W), whole = rows / W * W, tiles = columns / W * W;
  for (int64_t r = 0; r < whole; r += W) {
    for (int64_t c = 0; c < tiles; c += W) {
      at::vec::transpose_mxn<float, W, W>(x + r * leading + c, leading, out + c * padded + r, padded);
    }
  }
  for (int64_t c = 0; c < columns; c++) {
    for (int64_t r = c < tiles ? whole : 0; r < padded; r++) out[c * padded + r] = r < rows ? x[r * leading + c] : 0.0f;
  }
}

}  // namespace headwise::rows_of_heads
