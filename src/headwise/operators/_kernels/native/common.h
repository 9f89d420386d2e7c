// What every kernel includes.  Kernels are compiled as one program, so each file keeps its names in a namespace of its own.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <new>
#include <vector>

namespace headwise {

using Vec = at::vec::Vectorized<float>;
constexpr int64_t W = Vec::size();  // floats in a vector: 16 (AVX-512), 8 (AVX2) or 4

// At most `count` (<= W) floats from p; the others are zero.
inline Vec load(const float* p, int64_t count) { return count == W ? Vec::loadu(p) : Vec::loadu(p, count); }

inline float sum(Vec x) {
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, x);
}

inline float maximum(Vec x) {
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return at::vec::maximum(a, b); }, x);
}

// exp(t) for t <= 0 (in fact up to 88) to about 1e-7, relatively; exactly zero below -87.  2^k p(r) with t = k log 2 + r, |r| <= log(2) / 2,
// log 2 as the sum of two floats, and the polynomial of Cephes.
inline Vec exp_nonpositive(Vec t) {
  using Int = at::vec::Vectorized<int32_t>;
  const Vec shift(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, which the last bits then hold
  const Vec smallest(-87.0f);
  const Vec shifted = at::vec::fmadd(t, Vec(1.44269504088896341f), shift);
  const Vec k = shifted - shift;
  Vec r = at::vec::fmadd(k, Vec(-0.693359375f), t);
  r = at::vec::fmadd(k, Vec(2.12194440e-4f), r);
  Vec p(1.9875691500e-4f);
  p = at::vec::fmadd(p, r, Vec(1.3981999507e-3f));
  p = at::vec::fmadd(p, r, Vec(8.3334519073e-3f));
  p = at::vec::fmadd(p, r, Vec(4.1665795894e-2f));
  p = at::vec::fmadd(p, r, Vec(1.6666665459e-1f));
  p = at::vec::fmadd(p, r, Vec(5.0000001201e-1f));
  p = at::vec::fmadd(p, r * r, r) + Vec(1.0f);
  const Int power = (at::vec::cast<int32_t>(shifted) << Int(23)) + Int(127 << 23);
  return Vec::blendv(p * at::vec::cast<float>(power), Vec(0.0f), t < smallest);  // a product, so that NaN stays NaN
}

// Memory of one thread, aligned to vectors and not initialised.
template <typename T>
class Array {
 public:
  explicit Array(int64_t count)
      : data_(static_cast<T*>(::operator new(sizeof(T) * std::max<int64_t>(count, 1), kAlign))) {}
  ~Array() { ::operator delete(data_, kAlign); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  T* get() { return data_; }

 private:
  static constexpr std::align_val_t kAlign{64};
  T* data_;
};

using Floats = Array<float>;

// x (b, h, rows, width) with contiguous rows, addressed by strides.
template <typename T>
struct View {
  T* data = nullptr;
  int64_t batch = 0, head = 0, row = 0;
  T* at(int64_t b, int64_t h, int64_t i) const { return data + b * batch + h * head + i * row; }
};

template <typename T>
View<T> view(const at::Tensor& x) {
  return {x.data_ptr<T>(), x.stride(0), x.stride(1), x.stride(2)};
}

inline int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

}  // namespace headwise
