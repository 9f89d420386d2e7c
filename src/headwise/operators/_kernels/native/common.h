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

}  // namespace headwise
