// out_i = sum_c H_ic M_ic / Z_ic,  M_ic = sum_(j <= i) e_jc v_j,  Z_ic = sum_(j <= i) e_jc,  e = exp(s k), H = softmax over
// features of s q: the causal double softmax.  Query i is at position i + n - m; masked keys have e = 0 and are never read.
//
// Positions are taken BLOCK at a time.  What earlier blocks leave is a state M (k, d) and Z (k); inside a block the weights
// w_i . e_j, w = H / Z, are formed.  e, M and Z of a block are relative to exp(shift), half way between the running maximum
// at its first key and at its end, so that neither early nor late rows leave the range of float.
//
// Backward, with g the gradient of out:
//   d(w_ic) = g_i . M_ic                                  running sums again, from the first block to the last
//   dq = s H (dH - sum_c H dH),  dH = dw / Z              dZ = -H dH / Z
//   dv_j = sum_c e_jc T_jc,  T_jc = sum_(i >= j) w_ic g_i     from the last block to the first
//   dk_jc = s e_jc (v_j . T_jc + sum_(i >= j) dZ_ic)
#include "rows_of_heads.h"

namespace headwise::prefix_softmax {

using namespace headwise::rows_of_heads;

constexpr int64_t BLOCK = 32;
constexpr int64_t GROUP = 16;  // blocks

int64_t blocks_of(int64_t n) { return (n + BLOCK - 1) / BLOCK; }

template <typename T>
struct Inputs {
  Sizes s;
  View<T> q, k, v;
  Mask mask;
  float scale;
};

// A running sum of products (rows, width): those of GROUP blocks in float, all before them in double.
class State {
 public:
  State(int64_t rows, int64_t width) : rows_(rows), width_(width), recent_(size()), base_(size()), now_(size()), sums_(size()) {
    std::fill_n(recent_.get(), size(), 0.0f), std::fill_n(base_.get(), size(), 0.0f), std::fill_n(sums_.get(), size(), 0.0);
  }

  float* recent() { return recent_.get(); }  // where the next block is added

  const float* now() {
    for (int64_t i = 0; i < size(); i += W) (Vec::loadu(base_.get() + i) + Vec::loadu(recent_.get() + i)).store(now_.get() + i);
    return now_.get();
  }

  void scale_rows(const float* factor) {
    for (int64_t r = 0; r < rows_; r++) {
      if (factor[r] == 1.0f) continue;
      for (int64_t i = r * width_; i < (r + 1) * width_; i++) scale(i, factor[r]);
    }
  }

  void scale_columns(const float* factor) {
    if (std::all_of(factor, factor + width_, [](float x) { return x == 1.0f; })) return;
    for (int64_t r = 0; r < rows_; r++) {
      for (int64_t c = 0; c < width_; c++) scale(r * width_ + c, factor[c]);
    }
  }

  // After every block.
  void settle() {
    if (++blocks_ % GROUP) return;
    for (int64_t i = 0; i < size(); i++) {
      sums_.get()[i] += static_cast<double>(recent_.get()[i]);
      base_.get()[i] = static_cast<float>(sums_.get()[i]), recent_.get()[i] = 0.0f;
    }
  }

 private:
  int64_t size() const { return rows_ * width_; }
  void scale(int64_t i, float factor) { sums_.get()[i] *= factor, base_.get()[i] *= factor, recent_.get()[i] *= factor; }

  const int64_t rows_, width_;
  Array<float> recent_, base_, now_;
  Array<double> sums_;
  int64_t blocks_ = 0;
};

void keep_lower(float* x) {  // (BLOCK, BLOCK), zeros where j > i
  for (int64_t i = 0; i < BLOCK; i++) std::fill(x + i * BLOCK + i + 1, x + (i + 1) * BLOCK, 0.0f);
}

// One block of one head.  Row r stands for position first + r; rows without a key have e = 0, those without a query H = 0.
template <typename T>
class Block {
 public:
  explicit Block(const Inputs<T>& in)
      : in_(in), F(in.s.features()), D(in.s.values()), e(BLOCK * F), z(BLOCK * F), h(BLOCK * F), w(BLOCK * F), v(BLOCK * D),
        turned(std::max(F, D) * BLOCK), pairs(BLOCK * BLOCK), shift(F), factor(F), before(F), top_(F), total_(F) {}

  void start(int64_t b, int64_t head) {
    b_ = b, head_ = head;
    mask_ = in_.mask.at(b, head);
    std::fill_n(top_.get(), F, std::numeric_limits<float>::lowest());
    std::fill_n(total_.get(), F, 0.0);
    std::fill_n(shift.get(), F, 0.0f);
  }

  // The next block in order: shift, the factor exp(shift before - shift), e, v, `before` relative to this shift.
  void advance(int64_t block) {
    read_keys(block);
    const float none = std::numeric_limits<float>::lowest();
    for (int64_t c = 0; c < F; c += W) {
      const Vec earlier = Vec::loadu(top_.get() + c), old = Vec::loadu(shift.get() + c);
      Vec start = earlier, last = earlier;
      bool begun = false;
      for (int64_t r = 0; r < BLOCK; r++) {
        if (!shown[r]) continue;
        last = at::vec::maximum(last, Vec::loadu(e.get() + r * F + c));
        if (!begun) start = last, begun = true;
      }
      last.store(top_.get() + c);
      const Vec empty = last == Vec(none);  // no key yet: any finite number will do
      const Vec now = Vec::blendv((start + last) * Vec(0.5f), Vec(0.0f), empty);
      now.store(shift.get() + c);
      const Vec fade = Vec::blendv(exp_nonpositive(old - now), Vec(0.0f), earlier == Vec(none));
      fade.store(factor.get() + c);
    }
    for (int64_t c = 0; c < F; c++) {
      total_.get()[c] *= factor.get()[c];
      before.get()[c] = static_cast<float>(total_.get()[c]);
    }
    exponentials();
  }

  // A block whose shift and sums are known.
  void revisit(int64_t block, const float* shifts, const float* sums) {
    read_keys(block);
    std::copy_n(shifts, in_.s.k, shift.get()), std::copy_n(sums, in_.s.k, before.get());
    exponentials();
  }

  bool read_queries() {
    const int64_t ahead = in_.s.n - in_.s.m;
    int64_t at[BLOCK];
    low = std::clamp<int64_t>(ahead - first, 0, BLOCK), high = rows;
    if (low >= high) return false;
    for (int64_t r = low; r < high; r++) at[r - low] = first + r - ahead;
    read_rows(in_.q, b_, head_, at, high - low, in_.s.k, F, in_.scale, h.get() + low * F);
    softmax_rows(h.get() + low * F, high - low, in_.s.k, F);
    std::fill_n(h.get(), low * F, 0.0f);
    std::fill_n(h.get() + high * F, (BLOCK - high) * F, 0.0f);
    const Vec zero(0.0f);
    for (int64_t i = 0; i < BLOCK * F; i += W) {
      const Vec total = Vec::loadu(z.get() + i);
      Vec::blendv(Vec::loadu(h.get() + i) / total, zero, total <= zero).store(w.get() + i);
    }
    return true;
  }

  int64_t query(int64_t r) const { return first + r - (in_.s.n - in_.s.m); }

  // pairs = lower triangle of w e^T
  void weigh_pairs() { product_of_rows(w.get(), e.get(), in_.s.k, F); }

  // pairs = lower triangle of a b^T, rows of `leading` floats
  void product_of_rows(const float* a, const float* b, int64_t width, int64_t leading) {
    transpose_into(b, BLOCK, width, leading, turned.get());
    std::fill_n(pairs.get(), BLOCK * BLOCK, 0.0f);
    add_product(a, leading, 1, turned.get(), BLOCK, width, BLOCK, pairs.get());
    keep_lower(pairs.get());
  }

  // The sums after this block.
  void leave() {
    for (int64_t c = 0; c < F; c++) {
      double sum = 0;
      for (int64_t r = 0; r < rows; r++) sum += e.get()[r * F + c];
      total_.get()[c] += sum;
    }
  }

 private:
  void read_keys(int64_t block) {
    first = block * BLOCK, rows = std::min(BLOCK, in_.s.n - first);
    for (int64_t r = 0; r < BLOCK; r++) {
      shown[r] = r < rows && (!mask_ || mask_[first + r]);
      const int64_t at[1] = {first + r};
      if (shown[r]) {
        read_rows(in_.k, b_, head_, at, 1, in_.s.k, F, in_.scale, e.get() + r * F);
        read_rows(in_.v, b_, head_, at, 1, in_.s.d, D, 1.0f, v.get() + r * D);
      } else {
        std::fill_n(v.get() + r * D, D, 0.0f);
      }
    }
  }

  // e = exp(s k - shift), z its running sums beginning with `before`
  void exponentials() {
    for (int64_t c = 0; c < F; c += W) {
      const Vec less = Vec::loadu(shift.get() + c);
      Vec total = Vec::loadu(before.get() + c);
      for (int64_t r = 0; r < BLOCK; r++) {
        float* x = e.get() + r * F + c;
        const Vec y = shown[r] ? exp_nonpositive(Vec::loadu(x) - less) : Vec(0.0f);
        y.store(x);
        total = total + y;
        total.store(z.get() + r * F + c);
      }
    }
  }

  const Inputs<T>& in_;

 public:
  const int64_t F, D;
  Floats e, z, h, w, v;  // (BLOCK, F), v (BLOCK, D)
  Floats turned, pairs;  // of `product_of_rows`
  Floats shift, factor, before;
  bool shown[BLOCK];
  int64_t first = 0, rows = 0, low = 0, high = 0;  // queries are in rows low .. high

 private:
  Floats top_;
  Array<double> total_;  // sums before the block, of which `before` is the nearest float
  int64_t b_ = 0, head_ = 0;
  const bool* mask_ = nullptr;
};

template <typename T>
void forward_head(const Inputs<T>& in, Block<T>& x, int64_t b, int64_t h, const View<T>& out, float* shifts, float* sums) {
  const int64_t F = x.F, D = x.D, k = in.s.k;
  State state(k, D);
  Floats rows(BLOCK * D);
  x.start(b, h);
  for (int64_t block = 0; block < blocks_of(in.s.n); block++) {
    x.advance(block);
    std::copy_n(x.shift.get(), k, shifts + block * k), std::copy_n(x.before.get(), k, sums + block * k);
    state.scale_rows(x.factor.get());
    if (x.read_queries()) {
      std::fill_n(rows.get(), BLOCK * D, 0.0f);
      add_product(x.w.get() + x.low * F, F, 1, state.now(), x.high - x.low, k, D, rows.get() + x.low * D);
      x.weigh_pairs();
      add_product(x.pairs.get() + x.low * BLOCK, BLOCK, 1, x.v.get(), x.high - x.low, x.rows, D, rows.get() + x.low * D);
      for (int64_t r = x.low; r < x.high; r++) write_row(rows.get() + r * D, in.s.d, 1.0f, out.at(b, h, x.query(r)));
    }
    add_product(x.e.get(), 1, F, x.v.get(), k, x.rows, D, state.recent());
    state.settle();
    x.leave();
  }
  for (int64_t i = 0; i < std::min(in.s.m, in.s.m - in.s.n); i++) std::fill_n(out.at(b, h, i), in.s.d, T(0));
}

template <typename T>
void backward_head(
    const Inputs<T>& in, Block<T>& x, int64_t b, int64_t h, const View<T>& pull, const float* shifts, const float* sums,
    const View<T>& dq, const View<T>& dk, const View<T>& dv) {
  const int64_t F = x.F, D = x.D, k = in.s.k, d = in.s.d, blocks = blocks_of(in.s.n);
  State means(d, F), state(k, D);
  Floats turned(d * F), g(BLOCK * D), back(BLOCK * F), rows(BLOCK * D), after(F), fade(F);
  Floats products(blocks * BLOCK * F);  // H dH
  const auto read_pull = [&] {
    std::fill_n(g.get(), BLOCK * D, 0.0f);
    for (int64_t r = x.low; r < x.high; r++) read_row(pull.at(b, h, x.query(r)), d, 1.0f, g.get() + r * D);
  };
  // forwards, with the state M transposed
  x.start(b, h);
  for (int64_t block = 0; block < blocks; block++) {
    x.advance(block);
    means.scale_columns(x.factor.get());
    if (x.read_queries()) {
      read_pull();
      std::fill_n(back.get(), BLOCK * F, 0.0f);
      add_product(g.get() + x.low * D, D, 1, means.now(), x.high - x.low, d, F, back.get() + x.low * F);
      x.product_of_rows(g.get(), x.v.get(), d, D);
      add_product(x.pairs.get() + x.low * BLOCK, BLOCK, 1, x.e.get(), x.high - x.low, x.rows, F, back.get() + x.low * F);
      for (int64_t r = x.low; r < x.high; r++) {
        float *dw = back.get() + r * F, *product = products.get() + (block * BLOCK + r) * F;
        const float *share = x.w.get() + r * F, *weight = x.h.get() + r * F;
        Vec inner(0.0f);
        for (int64_t c = 0; c < F; c += W) {
          const Vec y = Vec::loadu(share + c) * Vec::loadu(dw + c);
          y.store(product + c);
          inner = inner + y;
        }
        const Vec dot(sum(inner));
        for (int64_t c = 0; c < F; c += W) (Vec::loadu(product + c) - Vec::loadu(weight + c) * dot).store(dw + c);
        write_row(dw, k, in.scale, dq.at(b, h, x.query(r)));
      }
    }
    add_product(x.v.get(), 1, D, x.e.get(), d, x.rows, F, means.recent());
    means.settle();
    x.leave();
  }
  for (int64_t i = 0; i < std::min(in.s.m, in.s.m - in.s.n); i++) std::fill_n(dq.at(b, h, i), k, T(0));
  // backwards, with the state T and the sums `after` of dZ
  std::fill_n(after.get(), F, 0.0f);
  for (int64_t block = blocks - 1; block >= 0; block--) {
    std::copy_n(x.shift.get(), F, fade.get());  // that of the block after this one, or of the last itself
    x.revisit(block, shifts + block * k, sums + block * k);
    for (int64_t c = 0; c < F; c += W) {
      const Vec y = exp_nonpositive(Vec::loadu(x.shift.get() + c) - Vec::loadu(fade.get() + c));
      y.store(fade.get() + c);
      (Vec::loadu(after.get() + c) * y).store(after.get() + c);
    }
    state.scale_rows(fade.get());
    const bool queries = x.read_queries();
    std::fill_n(rows.get(), BLOCK * D, 0.0f);
    std::fill_n(back.get(), BLOCK * F, 0.0f);
    const float* later = state.now();
    add_product(x.e.get(), F, 1, later, x.rows, k, D, rows.get());
    transpose_into(later, k, d, D, turned.get());
    add_product(x.v.get(), D, 1, turned.get(), x.rows, d, F, back.get());
    if (queries) {
      read_pull();
      x.weigh_pairs();
      add_product(x.pairs.get(), 1, BLOCK, g.get(), x.rows, x.high, D, rows.get());
      x.product_of_rows(g.get(), x.v.get(), d, D);
      add_product(x.pairs.get(), 1, BLOCK, x.w.get(), x.rows, x.high, F, back.get());
      add_product(x.w.get(), 1, F, g.get(), k, x.high, D, state.recent());
      state.settle();
    }
    for (int64_t r = x.rows - 1; r >= 0; r--) {
      if (queries && r >= x.low && r < x.high) {
        const float *product = products.get() + (block * BLOCK + r) * F, *total = x.z.get() + r * F;
        for (int64_t c = 0; c < F; c += W) {
          const Vec z = Vec::loadu(total + c), zero(0.0f);
          const Vec y = Vec::blendv(Vec::loadu(product + c) / z, zero, z <= zero);
          (Vec::loadu(after.get() + c) - y).store(after.get() + c);
        }
      }
      if (!x.shown[r]) {
        std::fill_n(dk.at(b, h, x.first + r), k, T(0)), std::fill_n(dv.at(b, h, x.first + r), d, T(0));
        continue;
      }
      float* to = back.get() + r * F;
      for (int64_t c = 0; c < F; c += W) {
        (Vec::loadu(x.e.get() + r * F + c) * (Vec::loadu(to + c) + Vec::loadu(after.get() + c))).store(to + c);
      }
      write_row(to, k, in.scale, dk.at(b, h, x.first + r));
      write_row(rows.get() + r * D, d, 1.0f, dv.at(b, h, x.first + r));
    }
  }
}

// ---- tensors ----

using Optional = const std::optional<at::Tensor>&;

template <typename T>
Inputs<T> inputs_of(const Arguments& a, double scale) {
  return {a.sizes, view<T>(a.q), view<T>(a.k), view<T>(a.v), a.shown(), float(scale)};
}

template <typename T, typename F>
void for_heads(const Inputs<T>& in, const F& f) {
  at::parallel_for(0, in.s.batch * in.s.heads, 1, [&](int64_t begin, int64_t end) {
    Block<T> block(in);
    for (int64_t i = begin; i < end; i++) f(block, i, i / in.s.heads, i % in.s.heads);
  });
}

// P v in the dtype of v; of every block the shift of the exponentials and the sums before it, (b, h, blocks, k)
std::tuple<at::Tensor, at::Tensor, at::Tensor> forward(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, Optional key_mask, double scale) {
  const Arguments a = checked("prefix_softmax", q, k, v, key_mask);
  const Sizes& s = a.sizes;
  const at::Tensor out = empty_heads(s.batch, s.heads, s.m, s.d, q.options());
  const at::Tensor shifts = at::empty({s.batch, s.heads, blocks_of(s.n), s.k}, q.options().dtype(at::kFloat));
  const at::Tensor sums = at::empty(shifts.sizes(), shifts.options());
  const int64_t size = blocks_of(s.n) * s.k;
  float *to_shifts = shifts.data_ptr<float>(), *to_sums = sums.data_ptr<float>();
  const auto run = [&]<typename T>(T) {
    const Inputs<T> in = inputs_of<T>(a, scale);
    for_heads(in, [&](Block<T>& block, int64_t i, int64_t b, int64_t h) {
      forward_head<T>(in, block, b, h, view<T>(out), to_shifts + i * size, to_sums + i * size);
    });
  };
  q.scalar_type() == at::kFloat ? run(float()) : run(c10::BFloat16());
  return {out, shifts, sums};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(
    const at::Tensor& pull, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, Optional key_mask,
    const at::Tensor& shifts, const at::Tensor& sums, double scale) {
  const Arguments a = checked("prefix_softmax", q, k, v, key_mask);
  const Sizes& s = a.sizes;
  TORCH_CHECK(
      pull.sizes() == at::IntArrayRef({s.batch, s.heads, s.m, s.d}) && pull.scalar_type() == v.scalar_type() &&
          shifts.sizes() == at::IntArrayRef({s.batch, s.heads, blocks_of(s.n), s.k}) && sums.sizes() == shifts.sizes() &&
          shifts.scalar_type() == at::kFloat && sums.scalar_type() == at::kFloat,
      "prefix_softmax_backward: the gradient and the results do not fit together");
  const at::Tensor rows = by_rows(pull), x = shifts.contiguous(), y = sums.contiguous();
  const at::TensorOptions options = q.options();
  const at::Tensor dq = empty_heads(s.batch, s.heads, s.m, s.k, options), dk = empty_heads(s.batch, s.heads, s.n, s.k, options),
                   dv = empty_heads(s.batch, s.heads, s.n, s.d, options);
  const int64_t size = blocks_of(s.n) * s.k;
  const auto run = [&]<typename T>(T) {
    const Inputs<T> in = inputs_of<T>(a, scale);
    for_heads(in, [&](Block<T>& block, int64_t i, int64_t b, int64_t h) {
      backward_head<T>(
          in, block, b, h, view<T>(rows), x.data_ptr<float>() + i * size, y.data_ptr<float>() + i * size, view<T>(dq),
          view<T>(dk), view<T>(dv));
    });
  };
  q.scalar_type() == at::kFloat ? run(float()) : run(c10::BFloat16());
  return {dq, dk, dv};
}

TORCH_LIBRARY_FRAGMENT(headwise, library) {
  library.def("prefix_softmax(Tensor q, Tensor k, Tensor v, Tensor? key_mask, float scale) -> (Tensor, Tensor, Tensor)");
  library.def(
      "prefix_softmax_backward(Tensor pull, Tensor q, Tensor k, Tensor v, Tensor? key_mask, Tensor shifts, Tensor sums, "
      "float scale) -> (Tensor, Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(headwise, CPU, library) {
  library.impl("prefix_softmax", forward);
  library.impl("prefix_softmax_backward", backward);
}

}  // namespace headwise::prefix_softmax
