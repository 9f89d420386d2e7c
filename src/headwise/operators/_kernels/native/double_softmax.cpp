// out = H C,  H = softmax over features of s q,  C = L^T v,  L = softmax over keys of s k: one pass over k and v for C with a
// running maximum of every feature, one over q.  Masked keys are left out and never read.
//
// With g the gradient of out and c_f = sum_d C_fd dC_fd:
//   dC = H^T g     dq = s H (g C^T - rows of H * (g C^T))     dv = L dC     dk = s L (v dC^T - c)
// L is recomputed from the maximum `top` and the sum `total` of every feature.
//
// All heads of a block of rows are taken in turn, because rows of heads lie beside one another; a thread takes a part of the
// rows.  Sums over GROUP blocks are in float, over all of them in double.
#include "rows_of_heads.h"

#include <ATen/ops/sum.h>

#include <memory>

namespace headwise::double_softmax {

using namespace headwise::rows_of_heads;

constexpr int64_t ROWS = 48;  // of q, k or v that are worked on at once: with C they fit into the first cache
constexpr int64_t GROUP = 8;  // blocks

// How many parts the rows of each batch are cut into, so that every thread has one; a part has GROUP blocks at least.
int64_t parts_of(const Sizes& s, int64_t rows) {
  if (at::in_parallel_region()) return 1;
  const int64_t wanted = (at::get_num_threads() + s.batch - 1) / s.batch;
  return std::clamp<int64_t>(s.heads * rows / (GROUP * ROWS), 1, wanted);
}

// Call f(b, part, first, end) for the parts of all batches.
template <typename F>
void for_parts(int64_t batch, int64_t parts, int64_t rows, const F& f) {
  const auto place = [&](int64_t part) { return part == parts ? rows : rows * part / parts / ROWS * ROWS; };
  at::parallel_for(0, batch * parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) f(i / parts, i % parts, place(i % parts), place(i % parts + 1));
  });
}

// For one head and a part of the keys: maximum and sum of every feature, and sums (k, values) of v weighted by exp(k - top).
class Sums {
 public:
  explicit Sums(const Sizes& s)
      : s_(s), top_(s.features()), tile_(s.k * s.values()), total_(s.features()), sums_(s.k * s.values()) {
    std::fill_n(top_.get(), s.features(), std::numeric_limits<float>::lowest());
    std::fill_n(tile_.get(), s.k * s.values(), 0.0f);
    std::fill_n(total_.get(), s.features(), 0.0);
    std::fill_n(sums_.get(), s.k * s.values(), 0.0);
  }

  // Rows of s k (count, features), which become exponentials, and of v (count, values).
  void add(float* k, const float* v, int64_t count) {
    const int64_t features = s_.features(), values = s_.values();
    for (int64_t c = 0; c < features; c += W) {
      const Vec before = Vec::loadu(top_.get() + c);
      Vec top = before, total(0.0f);
      for (int64_t j = 0; j < count; j++) top = at::vec::maximum(top, Vec::loadu(k + j * features + c));
      for (int64_t j = 0; j < count; j++) {
        const Vec e = exp_nonpositive(Vec::loadu(k + j * features + c) - top);
        e.store(k + j * features + c);
        total = total + e;
      }
      alignas(64) float shrink[W], sum[W];
      exp_nonpositive(before - top).store(shrink);
      total.store(sum);
      top.store(top_.get() + c);
      for (int64_t f = c; f < std::min(c + W, s_.k); f++) {
        if (shrink[f - c] != 1.0f) scale(f, shrink[f - c]);
        total_.get()[f] += sum[f - c];
      }
    }
    add_product(k, 1, features, v, s_.k, count, values, tile_.get());
    if (++blocks_ % GROUP == 0) flush();
  }

  void flush() {
    for (int64_t i = 0; i < s_.k * s_.values(); i++) sums_.get()[i] += static_cast<double>(tile_.get()[i]);
    std::fill_n(tile_.get(), s_.k * s_.values(), 0.0f);
  }

  // Adds the sums of another part; both are flushed.
  void add(Sums& other) {
    for (int64_t f = 0; f < s_.k; f++) {
      const float before = top_.get()[f], top = std::max(before, other.top_.get()[f]);
      const double a = std::exp(static_cast<double>(before) - top), b = std::exp(static_cast<double>(other.top_.get()[f]) - top);
      top_.get()[f] = top;
      total_.get()[f] = a * total_.get()[f] + b * other.total_.get()[f];
      double *to = sums_.get() + f * s_.values(), *from = other.sums_.get() + f * s_.values();
      for (int64_t c = 0; c < s_.values(); c++) to[c] = a * to[c] + b * from[c];
    }
  }

  // means (k, d), top and total (k)
  void result(float* means, float* top, float* total) {
    for (int64_t f = 0; f < s_.k; f++) {
      const double sum = total_.get()[f], inverse = sum > 0 ? 1 / sum : 0.0;
      top[f] = top_.get()[f], total[f] = static_cast<float>(sum);
      for (int64_t c = 0; c < s_.d; c++) means[f * s_.d + c] = static_cast<float>(sums_.get()[f * s_.values() + c] * inverse);
    }
  }

 private:
  void scale(int64_t f, float factor) {
    const int64_t values = s_.values();
    total_.get()[f] *= factor;
    for (int64_t c = f * values; c < (f + 1) * values; c++) tile_.get()[c] *= factor, sums_.get()[c] *= factor;
  }

  const Sizes s_;
  Array<float> top_, tile_;
  Array<double> total_, sums_;
  int64_t blocks_ = 0;
};

template <typename T>
void means_of_values(
    const Sizes& s, const View<T>& k, const View<T>& v, const Mask& mask, float scale, float* means, float* top, float* total) {
  const int64_t parts = parts_of(s, s.n);
  std::vector<std::unique_ptr<Sums>> sums(parts * s.batch * s.heads);
  for_parts(s.batch, parts, s.n, [&](int64_t b, int64_t part, int64_t first, int64_t end) {
    std::unique_ptr<Sums>* heads = &sums[(part * s.batch + b) * s.heads];
    Floats keys(ROWS * s.features()), values(ROWS * s.values());
    int64_t at[ROWS];
    for (int64_t h = 0; h < s.heads; h++) heads[h] = std::make_unique<Sums>(s);
    for (int64_t row = first; row < end; row += ROWS) {
      for (int64_t h = 0; h < s.heads; h++) {
        int64_t from = row;
        const int64_t count = next_rows(mask.at(b, h), from, std::min(end, row + ROWS), ROWS, at);
        if (!count) continue;
        read_rows(k, b, h, at, count, s.k, s.features(), scale, keys.get());
        read_rows(v, b, h, at, count, s.d, s.values(), 1.0f, values.get());
        heads[h]->add(keys.get(), values.get(), count);
      }
    }
    for (int64_t h = 0; h < s.heads; h++) heads[h]->flush();
  });
  for (int64_t i = 0; i < s.batch * s.heads; i++) {
    for (int64_t part = 1; part < parts; part++) sums[i]->add(*sums[part * s.batch * s.heads + i]);
    sums[i]->result(means + i * s.k * s.d, top + i * s.k, total + i * s.k);
  }
}

// x (heads, rows, width) with rows of round_up(width, W) floats, and with `transposed` the same of its transpose.
void pack_heads(const float* x, int64_t heads, int64_t rows, int64_t width, float* packed, float* transposed) {
  const int64_t leading = round_up(width, W), turned = round_up(rows, W);
  for (int64_t h = 0; h < heads; h++, x += rows * width, packed += rows * leading) {
    for (int64_t r = 0; r < rows; r++) read_row(x + r * width, width, 1.0f, packed + r * leading);
    if (transposed) transpose_into(packed, rows, width, leading, transposed), transposed += width * turned;
  }
}

void all_positions(int64_t first, int64_t count, int64_t* at) {
  for (int64_t i = 0; i < count; i++) at[i] = first + i;
}

template <typename T>
void features_times_means(const Sizes& s, const View<T>& q, const float* means, float scale, const View<T>& out) {
  const int64_t features = s.features(), values = s.values();
  for_parts(s.batch, parts_of(s, s.m), s.m, [&](int64_t b, int64_t part, int64_t first, int64_t end) {
    Floats weights(ROWS * features), rows(ROWS * values), packed(s.heads * s.k * values);
    int64_t at[ROWS];
    pack_heads(means + b * s.heads * s.k * s.d, s.heads, s.k, s.d, packed.get(), nullptr);
    for (int64_t row = first; row < end; row += ROWS) {
      const int64_t count = std::min(ROWS, end - row);
      all_positions(row, count, at);
      for (int64_t h = 0; h < s.heads; h++) {
        read_rows(q, b, h, at, count, s.k, features, scale, weights.get());
        softmax_rows(weights.get(), count, s.k, features);
        std::fill_n(rows.get(), count * values, 0.0f);
        add_product(weights.get(), features, 1, packed.get() + h * s.k * values, count, s.k, values, rows.get());
        for (int64_t i = 0; i < count; i++) write_row(rows.get() + i * values, s.d, 1.0f, out.at(b, h, row + i));
      }
    }
  });
}

// ---- backward ----

// dq, and dC of every head (b, h, k, d) in double precision
template <typename T>
at::Tensor pull_features(
    const Sizes& s, const View<T>& pull, const View<T>& q, const float* means, float scale, const View<T>& dq) {
  const int64_t features = s.features(), values = s.values(), parts = parts_of(s, s.m);
  const at::Tensor dmeans = at::zeros({parts, s.batch, s.heads, s.k, values}, at::kDouble);
  double* to = dmeans.data_ptr<double>();
  for_parts(s.batch, parts, s.m, [&](int64_t b, int64_t part, int64_t first, int64_t end) {
    Floats weights(ROWS * features), pulls(ROWS * values), back(ROWS * features);
    Floats packed(s.heads * s.k * values), turned(s.heads * s.d * features), tile(s.heads * s.k * values);
    int64_t at[ROWS], blocks = 0;
    double* sums = to + (part * s.batch + b) * s.heads * s.k * values;
    pack_heads(means + b * s.heads * s.k * s.d, s.heads, s.k, s.d, packed.get(), turned.get());
    std::fill_n(tile.get(), s.heads * s.k * values, 0.0f);
    const auto flush = [&] {
      for (int64_t i = 0; i < s.heads * s.k * values; i++) sums[i] += static_cast<double>(tile.get()[i]);
      std::fill_n(tile.get(), s.heads * s.k * values, 0.0f);
    };
    for (int64_t row = first; row < end; row += ROWS) {
      const int64_t count = std::min(ROWS, end - row);
      all_positions(row, count, at);
      for (int64_t h = 0; h < s.heads; h++) {
        read_rows(q, b, h, at, count, s.k, features, scale, weights.get());
        read_rows(pull, b, h, at, count, s.d, values, 1.0f, pulls.get());
        softmax_rows(weights.get(), count, s.k, features);
        add_product(weights.get(), 1, features, pulls.get(), s.k, count, values, tile.get() + h * s.k * values);
        std::fill_n(back.get(), count * features, 0.0f);
        add_product(pulls.get(), values, 1, turned.get() + h * s.d * features, count, s.d, features, back.get());
        for (int64_t i = 0; i < count; i++) {
          float *x = back.get() + i * features, *p = weights.get() + i * features;
          Vec inner(0.0f);
          for (int64_t c = 0; c < features; c += W) inner = at::vec::fmadd(Vec::loadu(p + c), Vec::loadu(x + c), inner);
          const Vec dot(sum(inner));
          for (int64_t c = 0; c < features; c += W) (Vec::loadu(p + c) * (Vec::loadu(x + c) - dot)).store(x + c);
          write_row(x, s.k, scale, dq.at(b, h, row + i));
        }
      }
      if (++blocks % GROUP == 0) flush();
    }
    flush();
  });
  return dmeans.sum(0).narrow(-1, 0, s.d);
}

template <typename T>
void pull_keys(
    const Sizes& s, const View<T>& k, const View<T>& v, const Mask& mask, const float* dmeans, const float* inner,
    const float* top, const float* total, float scale, const View<T>& dk, const View<T>& dv) {
  const int64_t features = s.features(), values = s.values();
  for_parts(s.batch, parts_of(s, s.n), s.n, [&](int64_t b, int64_t part, int64_t first, int64_t end) {
    Floats weights(ROWS * features), rows(ROWS * values), to_k(ROWS * features), to_v(ROWS * values);
    Floats packed(s.heads * s.k * values), turned(s.heads * s.d * features);
    Floats tops(s.heads * features), inverses(s.heads * features), inners(s.heads * features);
    pack_heads(dmeans + b * s.heads * s.k * s.d, s.heads, s.k, s.d, packed.get(), turned.get());
    for (int64_t h = 0; h < s.heads; h++) {
      const int64_t from = (b * s.heads + h) * s.k;
      read_row(top + from, s.k, 1.0f, tops.get() + h * features);
      read_row(inner + from, s.k, 1.0f, inners.get() + h * features);
      std::fill_n(inverses.get() + h * features, features, 0.0f);
      for (int64_t f = 0; f < s.k; f++) inverses.get()[h * features + f] = total[from + f] > 0 ? 1.0f / total[from + f] : 0.0f;
    }
    int64_t at[ROWS];
    for (int64_t row = first; row < end; row += ROWS) {
      for (int64_t h = 0; h < s.heads; h++) {
        const bool* shown = mask.at(b, h);
        int64_t from = row;
        const int64_t stop = std::min(end, row + ROWS), count = next_rows(shown, from, stop, ROWS, at);
        for (int64_t i = row; shown && i < stop; i++) {
          if (!shown[i]) std::fill_n(dk.at(b, h, i), s.k, T(0)), std::fill_n(dv.at(b, h, i), s.d, T(0));
        }
        read_rows(k, b, h, at, count, s.k, features, scale, weights.get());
        read_rows(v, b, h, at, count, s.d, values, 1.0f, rows.get());
        for (int64_t c = 0; c < features; c += W) {
          const Vec highest = Vec::loadu(tops.get() + h * features + c), inverse = Vec::loadu(inverses.get() + h * features + c);
          for (int64_t j = 0; j < count; j++) {
            float* x = weights.get() + j * features + c;
            (exp_nonpositive(Vec::loadu(x) - highest) * inverse).store(x);
          }
        }
        std::fill_n(to_v.get(), count * values, 0.0f);
        std::fill_n(to_k.get(), count * features, 0.0f);
        add_product(weights.get(), features, 1, packed.get() + h * s.k * values, count, s.k, values, to_v.get());
        add_product(rows.get(), values, 1, turned.get() + h * s.d * features, count, s.d, features, to_k.get());
        for (int64_t i = 0; i < count; i++) {
          float* x = to_k.get() + i * features;
          const float *p = weights.get() + i * features, *less = inners.get() + h * features;
          for (int64_t c = 0; c < features; c += W) (Vec::loadu(p + c) * (Vec::loadu(x + c) - Vec::loadu(less + c))).store(x + c);
          write_row(x, s.k, scale, dk.at(b, h, at[i]));
          write_row(to_v.get() + i * values, s.d, 1.0f, dv.at(b, h, at[i]));
        }
      }
    }
  });
}

// ---- tensors ----

using Optional = const std::optional<at::Tensor>&;

// P v in the dtype of v; C (b, h, k, d) and, for every feature, maximum and sum (b, h, k) in float32
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> forward(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, Optional key_mask, double scale) {
  const Arguments a = checked("double_softmax", q, k, v, key_mask);
  const Sizes& s = a.sizes;
  const at::TensorOptions options = q.options(), single = options.dtype(at::kFloat);
  const at::Tensor out = empty_heads(s.batch, s.heads, s.m, s.d, options);
  const at::Tensor means = at::empty({s.batch, s.heads, s.k, s.d}, single);
  const at::Tensor top = at::empty({s.batch, s.heads, s.k}, single), total = at::empty(top.sizes(), single);
  float *c = means.data_ptr<float>(), *most = top.data_ptr<float>(), *sums = total.data_ptr<float>();
  const auto run = [&]<typename T>(T) {
    means_of_values<T>(s, view<T>(a.k), view<T>(a.v), a.shown(), float(scale), c, most, sums);
    features_times_means<T>(s, view<T>(a.q), c, float(scale), view<T>(out));
  };
  q.scalar_type() == at::kFloat ? run(float()) : run(c10::BFloat16());
  return {out, means, top, total};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(
    const at::Tensor& pull, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, Optional key_mask,
    const at::Tensor& means, const at::Tensor& top, const at::Tensor& total, double scale) {
  const Arguments a = checked("double_softmax", q, k, v, key_mask);
  const Sizes& s = a.sizes;
  TORCH_CHECK(
      pull.sizes() == at::IntArrayRef({s.batch, s.heads, s.m, s.d}) && pull.scalar_type() == v.scalar_type() &&
          means.sizes() == at::IntArrayRef({s.batch, s.heads, s.k, s.d}) && total.sizes() == top.sizes() &&
          top.sizes() == at::IntArrayRef({s.batch, s.heads, s.k}) && means.scalar_type() == at::kFloat,
      "double_softmax_backward: the gradient and the results do not fit together");
  const at::Tensor rows = by_rows(pull), c = means.contiguous(), most = top.contiguous(), sums = total.contiguous();
  const at::TensorOptions options = q.options();
  const at::Tensor dq = empty_heads(s.batch, s.heads, s.m, s.k, options), dk = empty_heads(s.batch, s.heads, s.n, s.k, options),
                   dv = empty_heads(s.batch, s.heads, s.n, s.d, options);
  const auto run = [&]<typename T>(T) {
    const at::Tensor exact = pull_features<T>(s, view<T>(rows), view<T>(a.q), c.data_ptr<float>(), float(scale), view<T>(dq));
    const at::Tensor inner = exact.mul(c).sum(-1).to(at::kFloat), dmeans = exact.to(at::kFloat).contiguous();
    pull_keys<T>(
        s, view<T>(a.k), view<T>(a.v), a.shown(), dmeans.data_ptr<float>(), inner.data_ptr<float>(), most.data_ptr<float>(),
        sums.data_ptr<float>(), float(scale), view<T>(dk), view<T>(dv));
  };
  q.scalar_type() == at::kFloat ? run(float()) : run(c10::BFloat16());
  return {dq, dk, dv};
}

TORCH_LIBRARY_FRAGMENT(headwise, library) {
  library.def(
      "double_softmax(Tensor q, Tensor k, Tensor v, Tensor? key_mask, float scale) -> (Tensor, Tensor, Tensor, Tensor)");
  library.def(
      "double_softmax_backward(Tensor pull, Tensor q, Tensor k, Tensor v, Tensor? key_mask, Tensor means, Tensor top, "
      "Tensor total, float scale) -> (Tensor, Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(headwise, CPU, library) {
  library.impl("double_softmax", forward);
  library.impl("double_softmax_backward", backward);
}

}  // namespace headwise::double_softmax
