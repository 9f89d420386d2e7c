// mass_Bt = log sum_j exp(s b_t . k_j) and mean_Bt = sum_j exp(s b_t . k_j) v_j / exp(mass_Bt) over the keys j that are far
// from block B: those two or more blocks before it and, unless the call is causal, after it.
//
// The features b_t of a head are the queries of a tile that meets one block of keys after the other; running sums over
// blocks are kept with their own maximum, so that no block is lost beside another.
//
// Backward: with w_Bj = exp(s b_t . k_j - mass_Bt),
//   d(s b_t . k_j) = sum_B w_Bj (dmass_B + dmean_B . (v_j - mean_B)),    dv_j = sum_Bt w_Bj dmean_B,
// and w_Bj = exp(s b_t . k_j) exp(-mass_B), so that the sums over B are running sums over blocks again.
#include "attention_tiles.h"

#include <ATen/ops/full.h>

namespace headwise::far_sums {

using namespace headwise::tiles;

// Sums over some blocks for L features, relative to exp(top): total[lane] and values[c][lane].
template <typename T>
struct Sums {
  using V = Lanes<T>;
  static constexpr int64_t L = V::size();
  T *top, *total, *values;
  static int64_t size(int64_t width) { return (width + 2) * L; }
  explicit Sums(T* memory) : top(memory), total(memory + L), values(memory + 2 * L) {}

  void clear(int64_t width) {
    std::fill_n(top, L, std::numeric_limits<T>::lowest());
    std::fill_n(total, (width + 1) * L, T(0));
  }
  void add(const Sums& x, int64_t width) {
    const V before = V::loadu(top), other = V::loadu(x.top), most = at::vec::maximum(before, other);
    const V a = exponential(before - most), b = exponential(other - most);
    most.store(top);
    for (int64_t c = -1; c < width; c++) {  // the total is before the values
      (V::loadu(values + c * L) * a + V::loadu(x.values + c * L) * b).store(values + c * L);
    }
  }
};

// Call use(B, sums over the blocks far from B) for all blocks; with `later`, for a causal call, those after B instead.
template <typename T, typename F>
void over_far_blocks(T* sums, int64_t blocks, int64_t width, bool causal, bool later, const F& use) {
  const int64_t size = Sums<T>::size(width);
  Buffer<T> after(blocks * size), running(size);
  Sums<T> sum(running);
  const bool both = !causal;
  sum.clear(width);
  for (int64_t block = blocks - 1; block >= 0 && (both || later); block--) {
    if (block + 2 < blocks) sum.add(Sums<T>(sums + (block + 2) * size), width);
    std::copy_n(static_cast<T*>(running), size, after + block * size);
  }
  sum.clear(width);
  Buffer<T> whole(size);
  for (int64_t block = 0; block < blocks; block++) {
    if (block >= 2 && (both || !later)) sum.add(Sums<T>(sums + (block - 2) * size), width);
    if (both) {
      Sums<T> result(whole);
      std::copy_n(static_cast<T*>(running), size, static_cast<T*>(whole));
      result.add(Sums<T>(after + block * size), width);
      use(block, result);
    } else {
      use(block, later ? Sums<T>(after + block * size) : sum);
    }
  }
}

template <typename T>
class FeatureTile : public Tile<T, 1> {
 public:
  using Base = Tile<T, 1>;
  using typename Base::V;
  using Base::L;

  explicit FeatureTile(const Inputs<T>& in)
      : Base(in), x_(this->key_width_ * L), y_(this->value_width_ * L), y_rows_(this->value_width_ * L), ds_(KEYS * L) {}

  // masses (blocks, r) and means (blocks, r, d) of one head
  void forward(int64_t b, int64_t h, T* masses, T* means) {
    const Sizes& s = this->in_.sizes;
    const int64_t blocks = start(b, h), size = Sums<T>::size(s.values);
    Buffer<T> sums(blocks * size);
    for_features([&](int64_t first, int64_t count) {
      for (int64_t block = 0; block < blocks; block++) {
        std::fill_n(static_cast<T*>(this->ot_), L * this->value_width_, T(0));
        std::fill_n(this->top_, L, std::numeric_limits<T>::lowest());
        std::fill_n(this->total_, L, T(0));
        this->started_ = false;
        keys_of(block, [&] { this->attend(); });
        Sums<T> sum(sums + block * size);
        std::copy_n(this->top_, L, sum.top), std::copy_n(this->total_, L, sum.total);
        std::copy_n(static_cast<T*>(this->ot_), L * s.values, sum.values);
      }
      over_far_blocks<T>(sums, blocks, s.values, s.causal, false, [&](int64_t block, const Sums<T>& sum) {
        const V total = V::loadu(sum.total), inverse = V::blendv(V(T(1)) / total, V(T(0)), total == V(T(0)));
        for (int64_t c = 0; c < s.values; c++) (V::loadu(sum.values + c * L) * inverse).store(this->ot_ + c * L);
        transpose<T>(this->ot_, this->value_width_, L, y_rows_);
        for (int64_t t = 0; t < count; t++) {
          const int64_t at = block * s.slots + first + t;
          masses[at] = sum.top[t] + std::log(sum.total[t]);
          std::copy_n(y_rows_ + t * this->value_width_, s.values, means + at * s.values);
        }
      });
    });
  }

  // adds to dk (n, k) and dv (n, d), padded, and to the features' gradient (r, k) of one head
  void backward(
      int64_t b, int64_t h, const T* masses, const T* means, const T* dmasses, const T* dmeans, T* dk, T* dv, T* dfeatures) {
    const Sizes& s = this->in_.sizes;
    const int64_t blocks = start(b, h), size = Sums<T>::size(s.values);
    Buffer<T> sums(blocks * size);
    for_features([&](int64_t first, int64_t count) {
      for (int64_t block = 0; block < blocks; block++) {
        Sums<T> sum(sums + block * size);
        sum.clear(s.values);
        for (int64_t t = 0; t < count; t++) {
          const int64_t at = block * s.slots + first + t;
          if (masses[at] == -std::numeric_limits<T>::infinity()) continue;
          sum.top[t] = -masses[at], sum.total[t] = dmasses[at];
          for (int64_t c = 0; c < s.values; c++) {
            const T pull = dmeans[at * s.values + c];
            sum.values[c * L + t] = pull, sum.total[t] -= pull * means[at * s.values + c];
          }
        }
      }
      std::fill_n(static_cast<T*>(x_), L * this->key_width_, T(0));
      over_far_blocks<T>(sums, blocks, s.values, s.causal, true, [&](int64_t block, const Sums<T>& sum) {
        std::fill_n(static_cast<T*>(y_), L * this->value_width_, T(0));
        std::copy_n(sum.values, L * s.values, static_cast<T*>(y_));
        transpose<T>(y_, this->value_width_, L, y_rows_);
        keys_of(block, [&] { pull_back(sum, dk, dv); });
      });
      transpose<T>(x_, this->key_width_, L, this->q_);
      for (int64_t t = 0; t < count; t++) {
        for (int64_t c = 0; c < s.width; c++) {
          dfeatures[(first + t) * s.width + c] = this->in_.scale * this->q_[t * this->key_width_ + c];
        }
      }
    });
  }

 private:
  int64_t start(int64_t b, int64_t h) {
    this->b_ = b, this->h_ = h, this->pattern_ = &this->in_.patterns[h];
    return (this->in_.sizes.n - this->pattern_->leading + this->pattern_->block - 1) / this->pattern_->block;
  }

  template <typename F>
  void for_features(const F& use) {
    for (int64_t first = 0; first < this->pattern_->slots; first += L) {
      const Rows rows{first, 1, std::min(L, this->pattern_->slots - first), false};
      this->begin(this->b_, this->h_, rows);
      use(first, rows.count);
    }
  }

  template <typename F>
  void keys_of(int64_t block, const F& use) {
    const Pattern& p = *this->pattern_;
    const int64_t begin = p.leading + block * p.block;
    this->list(begin, begin + p.block, use);
  }

  void pull_back(const Sums<T>& sum, T* dk, T* dv) {
    const Sizes& s = this->in_.sizes;
    const int64_t count = this->count_;
    this->scores();
    dots<T, 1>(this->value_, count, y_, s.values, ds_);
    for (int64_t j = 0; j < count; j++) {
      const V weight = exponential(V::loadu(this->s_ + j * L) + V::loadu(sum.top));
      weight.store(this->s_ + j * L);
      (weight * (V::loadu(ds_ + j * L) + V::loadu(sum.total))).store(ds_ + j * L);
      key_to_[j] = dk + this->position_[j] * this->key_width_, value_to_[j] = dv + this->position_[j] * this->value_width_;
    }
    mix<T, 1>(this->key_, count, ds_, s.width, x_);
    spread<T>(value_to_, count, this->s_, L, y_rows_, this->value_width_);
    spread<T>(key_to_, count, ds_, L, this->q_, this->key_width_);
  }

  Buffer<T> x_, y_, y_rows_, ds_;  // [c][feature], [c][feature], [feature][c], [key][feature]
  T* key_to_[KEYS];
  T* value_to_[KEYS];
};

using Optional = const std::optional<at::Tensor>&;

struct Call {
  Arguments arguments;
  int64_t blocks = 0;
};

Call checked_call(
    const at::Tensor& k, const at::Tensor& v, const at::Tensor& features, Optional key_mask, at::IntArrayRef patterns,
    bool causal) {
  Call call{checked("far_sums", features, k, v, key_mask, std::nullopt, std::nullopt, std::nullopt, patterns, causal)};
  Sizes& s = call.arguments.sizes;
  s.slots = s.m;
  for (int64_t h = 0; h < s.heads; h++) {
    const int64_t leading = patterns[h * FIELDS + 2], block = patterns[h * FIELDS + 3], slots = patterns[h * FIELDS + 7];
    if (slots && block > 0) s.blocks = std::max(s.blocks, (s.n - leading + block - 1) / block);
  }
  return call;
}

template <typename T>
void run_forward(const Inputs<T>& in, const at::Tensor& masses, const at::Tensor& means) {
  const Sizes& s = in.sizes;
  T *to_masses = masses.data_ptr<T>(), *to_means = means.data_ptr<T>();
  at::parallel_for(0, s.batch * s.heads, 1, [&](int64_t begin, int64_t end) {
    FeatureTile<T> tile(in);
    for (int64_t i = begin; i < end; i++) {
      const int64_t at = i * s.blocks * s.slots;
      if (in.patterns[i % s.heads].slots) tile.forward(i / s.heads, i % s.heads, to_masses + at, to_means + at * s.values);
    }
  });
}

std::tuple<at::Tensor, at::Tensor> forward(
    const at::Tensor& k, const at::Tensor& v, const at::Tensor& features, Optional key_mask, at::IntArrayRef patterns,
    double scale, bool causal) {
  const auto [a, _] = checked_call(k, v, features, key_mask, patterns, causal);
  const Sizes& s = a.sizes;
  const double none = -std::numeric_limits<double>::infinity();
  const at::Tensor masses = at::full({s.batch, s.heads, s.blocks, s.slots}, none, a.q.options());
  const at::Tensor means = at::zeros({s.batch, s.heads, s.blocks, s.slots, s.values}, a.q.options());
  if (a.q.scalar_type() == at::kDouble) {
    run_forward<double>(inputs_of<double>(a, patterns, scale), masses, means);
  } else {
    run_forward<float>(inputs_of<float>(a, patterns, scale), masses, means);
  }
  return {masses, means};
}

template <typename T>
std::tuple<at::Tensor, at::Tensor, at::Tensor> run_backward(
    const Inputs<T>& in, const at::TensorOptions& options, const at::Tensor& dmasses, const at::Tensor& dmeans,
    const at::Tensor& masses, const at::Tensor& means) {
  constexpr int64_t L = Lanes<T>::size();
  const Sizes& s = in.sizes;
  const int64_t key_width = padded(s.width, L), value_width = padded(s.values, L), shared = s.heads / s.groups;
  const at::Tensor dk = at::zeros({s.batch, s.groups, s.n, key_width}, options);
  const at::Tensor dv = at::zeros({s.batch, s.groups, s.n, value_width}, options);
  const at::Tensor dfeatures = at::zeros({s.batch, s.heads, s.slots, s.width}, options);
  T *to_k = dk.data_ptr<T>(), *to_v = dv.data_ptr<T>(), *to_features = dfeatures.data_ptr<T>();
  const T *mass = masses.data_ptr<T>(), *mean = means.data_ptr<T>(), *dmass = dmasses.data_ptr<T>(), *dmean = dmeans.data_ptr<T>();
  at::parallel_for(0, s.batch * s.groups, 1, [&](int64_t begin, int64_t end) {
    FeatureTile<T> tile(in);
    for (int64_t i = begin; i < end; i++) {
      const int64_t b = i / s.groups, g = i % s.groups;
      for (int64_t h = g * shared; h < (g + 1) * shared; h++) {
        if (!in.patterns[h].slots) continue;
        const int64_t head = b * s.heads + h, at = head * s.blocks * s.slots;
        tile.backward(
            b, h, mass + at, mean + at * s.values, dmass + at, dmean + at * s.values, to_k + i * s.n * key_width,
            to_v + i * s.n * value_width, to_features + head * s.slots * s.width);
      }
    }
  });
  return {dk.narrow(-1, 0, s.width), dv.narrow(-1, 0, s.values), dfeatures};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(
    const at::Tensor& dmasses, const at::Tensor& dmeans, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& features, Optional key_mask, const at::Tensor& masses, const at::Tensor& means,
    at::IntArrayRef patterns, double scale, bool causal) {
  const auto [a, _] = checked_call(k, v, features, key_mask, patterns, causal);
  const Sizes& s = a.sizes;
  const at::ScalarType type = a.q.scalar_type();
  TORCH_CHECK(
      dmasses.sizes() == masses.sizes() && dmeans.sizes() == means.sizes() &&
          masses.sizes() == at::IntArrayRef({s.batch, s.heads, s.blocks, s.slots}) &&
          means.sizes() == at::IntArrayRef({s.batch, s.heads, s.blocks, s.slots, s.values}),
      "far_sums_backward: the gradients and the results do not fit together");
  const at::Tensor x = dmasses.to(type).contiguous(), y = dmeans.to(type).contiguous();
  const at::Tensor mass = masses.to(type).contiguous(), mean = means.to(type).contiguous();
  auto [dk, dv, df] = type == at::kDouble
      ? run_backward<double>(inputs_of<double>(a, patterns, scale), a.q.options(), x, y, mass, mean)
      : run_backward<float>(inputs_of<float>(a, patterns, scale), a.q.options(), x, y, mass, mean);
  return {dk.to(k.scalar_type()), dv.to(v.scalar_type()), df.to(features.scalar_type())};
}

TORCH_LIBRARY_FRAGMENT(headwise, library) {
  library.def(
      "far_sums(Tensor k, Tensor v, Tensor features, Tensor? key_mask, int[] patterns, float scale, bool causal) "
      "-> (Tensor, Tensor)");
  library.def(
      "far_sums_backward(Tensor dmasses, Tensor dmeans, Tensor k, Tensor v, Tensor features, Tensor? key_mask, "
      "Tensor masses, Tensor means, int[] patterns, float scale, bool causal) -> (Tensor, Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(headwise, CPU, library) {
  library.impl("far_sums", forward);
  library.impl("far_sums_backward", backward);
}

}  // namespace headwise::far_sums
