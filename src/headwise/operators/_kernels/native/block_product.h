// Products of a block of rows with a packed matrix, for blocks that stay in the cache: a call of a BLAS per block would
// cost a dispatch each, and the operands are packed (and converted from half precision) once for many blocks anyway.
//
//   S = A B      A (rows, k) with leading dimension k;  B packed in panels of PANEL columns
//   C += S B     S (rows, n) with any strides; B (n, d) packed with rows of round_up(d, W) floats
//
// Rows come in strips of STRIP; callers pad A to whole strips (what the padding holds is computed and ignored).
#pragma once

#include "common.h"

namespace headwise {

constexpr int64_t STRIP = 6;
constexpr int64_t PANEL_VECTORS = W == 8 ? 2 : 4;  // with STRIP rows: 12 of 16 registers (AVX2), 24 of 32 otherwise
constexpr int64_t PANEL = PANEL_VECTORS * W;

// Rows [first, first + count) of x (rows, width; any strides), transposed: panel after panel of (width, PANEL), zeros after
// the last row.  Needs round_up(count, PANEL) * width floats.
template <typename T>
void pack_transposed(const T* x, int64_t row_stride, int64_t column_stride, int64_t count, int64_t width, float* packed) {
  for (int64_t j = 0; j < count; j += PANEL) {
    float* panel = packed + j * width;
    const int64_t inside = std::min(PANEL, count - j);
    if (inside < PANEL) std::fill(panel, panel + PANEL * width, 0.0f);
    for (int64_t c = 0; c < inside; c++) {
      const T* row = x + (j + c) * row_stride;
      for (int64_t i = 0; i < width; i++) panel[i * PANEL + c] = static_cast<float>(row[i * column_stride]);
    }
  }
}

// x (count, width; any strides) times `factor` as floats with rows of `leading` >= width, zeros between.
template <typename T>
void pack_rows(
    const T* x, int64_t row_stride, int64_t column_stride, int64_t count, int64_t width, int64_t leading, float factor,
    float* packed) {
  for (int64_t i = 0; i < count; i++) {
    const T* row = x + i * row_stride;
    float* out = packed + i * leading;
    for (int64_t c = 0; c < width; c++) out[c] = factor * static_cast<float>(row[c * column_stride]);
    std::fill(out + width, out + leading, 0.0f);
  }
}

// One strip of S = A B over one panel.
inline void strip_times_panel(const float* a, const float* panel, int64_t k, float* s, int64_t leading) {
  Vec sums[STRIP][PANEL_VECTORS];
  for (auto& row : sums)
    for (Vec& x : row) x = Vec(0.0f);
  for (int64_t i = 0; i < k; i++) {
    Vec b[PANEL_VECTORS];
    for (int64_t x = 0; x < PANEL_VECTORS; x++) b[x] = Vec::loadu(panel + i * PANEL + x * W);
#pragma GCC unroll 6
    for (int64_t r = 0; r < STRIP; r++) {
      const Vec factor(a[r * k + i]);
#pragma GCC unroll 4
      for (int64_t x = 0; x < PANEL_VECTORS; x++) sums[r][x] = at::vec::fmadd(factor, b[x], sums[r][x]);
    }
  }
  for (int64_t r = 0; r < STRIP; r++)
    for (int64_t x = 0; x < PANEL_VECTORS; x++) sums[r][x].store(s + r * leading + x * W);
}

// S = A B for rows (a multiple of STRIP) and columns (a multiple of PANEL).
inline void multiply_packed(
    const float* a, const float* packed, int64_t rows, int64_t columns, int64_t k, float* s, int64_t leading) {
  for (int64_t j = 0; j < columns; j += PANEL)
    for (int64_t r = 0; r < rows; r += STRIP)
      strip_times_panel(a + r * k, packed + j * k, k, s + r * leading + j, leading);
}

// R rows of C += S B over `count` rows of B and V vectors of its columns.
template <int64_t R, int64_t V>
void strip_times_rows(
    const float* s, int64_t row, int64_t step, const float* b, int64_t width, int64_t count, float* c) {
  Vec sums[R][V];
#pragma GCC unroll 6
  for (int64_t r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int64_t x = 0; x < V; x++) sums[r][x] = Vec::loadu(c + r * width + x * W);
  for (int64_t j = 0; j < count; j++) {
    Vec right[V];
#pragma GCC unroll 4
    for (int64_t x = 0; x < V; x++) right[x] = Vec::loadu(b + j * width + x * W);
#pragma GCC unroll 6
    for (int64_t r = 0; r < R; r++) {
      const Vec factor(s[r * row + j * step]);
#pragma GCC unroll 4
      for (int64_t x = 0; x < V; x++) sums[r][x] = at::vec::fmadd(factor, right[x], sums[r][x]);
    }
  }
#pragma GCC unroll 6
  for (int64_t r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int64_t x = 0; x < V; x++) sums[r][x].store(c + r * width + x * W);
}

template <int64_t R>
void strip_product(
    const float* s, int64_t row, int64_t step, const float* b, int64_t width, int64_t count, float* c) {
  int64_t x = 0;
  for (; x + PANEL <= width; x += PANEL) strip_times_rows<R, PANEL_VECTORS>(s, row, step, b + x, width, count, c + x);
  for (; x + 2 * W <= width; x += 2 * W) strip_times_rows<R, 2>(s, row, step, b + x, width, count, c + x);
  for (; x < width; x += W) strip_times_rows<R, 1>(s, row, step, b + x, width, count, c + x);
}

// C += S B for S (rows, n), n rows of B and width (a multiple of W) columns; rows of B and C have `width` floats, and
// entry (r, j) of S is s[r * row + j * step].
inline void add_product(
    const float* s, int64_t row, int64_t step, const float* b, int64_t rows, int64_t n, int64_t width, float* c) {
  constexpr int64_t STEP = 128;  // rows of B that stay in the first cache while all strips use them
  for (int64_t j = 0; j < n; j += STEP) {
    const int64_t count = std::min(STEP, n - j);
    const float *left = s + j * step, *right = b + j * width;
    int64_t r = 0;
    for (; r + STRIP <= rows; r += STRIP) strip_product<STRIP>(left + r * row, row, step, right, width, count, c + r * width);
    if (rows - r >= 4) strip_product<4>(left + r * row, row, step, right, width, count, c + r * width), r += 4;
    if (rows - r >= 2) strip_product<2>(left + r * row, row, step, right, width, count, c + r * width), r += 2;
    if (rows - r == 1) strip_product<1>(left + r * row, row, step, right, width, count, c + r * width);
  }
}

}  // namespace headwise
