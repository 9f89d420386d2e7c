// The eigenvalues lambda_i of a symmetric A = U diag(lambda) U^T, and ||u_i^T X||^2 for each: eigenvectors are not formed.
//
//   A = Q T Q^T       T tridiagonal, by Householder reflections, which are applied to X as they are found: X <- Q^T X
//   T = Z diag Z^T    by the implicit QL algorithm, whose rotations are applied to the rows of X: X <- Z^T X
//
// Both are orthogonal and backward stable, as those of LAPACK's syevd, which spends more than half of its time on U.
// Reflections are taken from the last row upwards, BLOCK of them before the rest of A is updated at once; only the lower
// triangle of A is read, in square blocks of W doubles.
#include "common.h"

namespace headwise::eigenvalue_shares {

using Vec = at::vec::Vectorized<double>;
constexpr int64_t W = Vec::size();
constexpr int64_t BLOCK = 16;
constexpr int MOST_STEPS = 100;  // of QL for one eigenvalue; two are usual

double dot(const double* x, const double* y, int64_t n) {  // n a multiple of W
  Vec sum(0.0);
  for (int64_t j = 0; j < n; j += W) sum = at::vec::fmadd(Vec::loadu(x + j), Vec::loadu(y + j), sum);
  return at::vec::vec_reduce_all<double>([](Vec& a, Vec& b) { return a + b; }, sum);
}

void add_multiple(double* y, double factor, const double* x, int64_t n) {
  const Vec f(factor);
  for (int64_t j = 0; j < n; j += W) at::vec::fmadd(f, Vec::loadu(x + j), Vec::loadu(y + j)).store(y + j);
}

// y = A x for the leading n rows and columns (a multiple of W) of A, of which lower blocks are read.
void multiply_symmetric(const double* a, int64_t leading, const double* x, double* y, int64_t n) {
  std::fill(y, y + n, 0.0);
  for (int64_t i = 0; i < n; i += W) {
    Vec sums[W], factors[W];
    for (int64_t r = 0; r < W; r++) sums[r] = Vec(0.0), factors[r] = Vec(x[i + r]);
    const double* rows = a + i * leading;
    for (int64_t j = 0; j < i; j += W) {
      const Vec right = Vec::loadu(x + j);
      Vec below = Vec::loadu(y + j);
#pragma GCC unroll 8
      for (int64_t r = 0; r < W; r++) {
        const Vec entry = Vec::loadu(rows + r * leading + j);
        sums[r] = at::vec::fmadd(entry, right, sums[r]);
        below = at::vec::fmadd(entry, factors[r], below);
      }
      below.store(y + j);
    }
    const Vec right = Vec::loadu(x + i);
    for (int64_t r = 0; r < W; r++) {
      sums[r] = at::vec::fmadd(Vec::loadu(rows + r * leading + i), right, sums[r]);
      y[i + r] += at::vec::vec_reduce_all<double>([](Vec& p, Vec& q) { return p + q; }, sums[r]);
    }
  }
}

// V vectors of W rows of A minus sum_p left_p right_p^T.
template <int64_t V>
void update_tile(double* a, int64_t leading, const double* left, const double* right, int64_t stride, int64_t count) {
  Vec sums[W][V];
  for (int64_t r = 0; r < W; r++)
    for (int64_t x = 0; x < V; x++) sums[r][x] = Vec::loadu(a + r * leading + x * W);
  for (int64_t p = 0; p < count; p++) {
    Vec row[V];
    for (int64_t x = 0; x < V; x++) row[x] = Vec::loadu(right + p * stride + x * W);
#pragma GCC unroll 8
    for (int64_t r = 0; r < W; r++) {
      const Vec factor(-left[p * stride + r]);
      for (int64_t x = 0; x < V; x++) sums[r][x] = at::vec::fmadd(factor, row[x], sums[r][x]);
    }
  }
  for (int64_t r = 0; r < W; r++)
    for (int64_t x = 0; x < V; x++) sums[r][x].store(a + r * leading + x * W);
}

// Reduces A (n, n; in rows of `padded`) to the diagonal d and the numbers e beside it, e[i] between i - 1 and i, and X
// (n, width) to Q^T X.  A and X are zero beyond n.
void tridiagonal(double* a, int64_t n, int64_t padded, double* x, int64_t width, double* d, double* e) {
  // rows u_p and w_p of the reflections since A was updated, and the same in the order w_p, u_p
  Array<double> left(2 * BLOCK * padded), right(2 * BLOCK * padded), products(width);
  int64_t count = 0;
  for (int64_t i = n - 1; i >= 0; i--) {
    double* row = a + i * padded;
    const int64_t reach = (i / W + 1) * W;  // columns up to i, in whole vectors
    for (int64_t p = 0; p < 2 * count; p++) add_multiple(row, -left.get()[p * padded + i], right.get() + p * padded, reach);
    d[i] = row[i];
    if (i == 0) break;

    double *u = left.get() + 2 * count * padded, *w = u + padded;
    const int64_t length = (i + W - 1) / W * W;
    std::fill(u, u + 2 * padded, 0.0);
    std::copy(row, row + i, u);
    const double last = u[i - 1];
    u[i - 1] = 0.0;
    const double others = dot(u, u, length);
    if (others == 0.0) {  // nothing to reflect
      e[i] = last;
      std::fill(u, u + i, 0.0);
    } else {
      e[i] = -std::copysign(std::sqrt(others + last * last), last);
      const double factor = (e[i] - last) / e[i];
      const double scale = 1 / (last - e[i]);
      for (int64_t j = 0; j < i - 1; j++) u[j] *= scale;
      u[i - 1] = 1.0;
      multiply_symmetric(a, padded, u, w, length);
      for (int64_t p = 0; p < 2 * count; p++)
        add_multiple(w, -dot(right.get() + p * padded, u, length), left.get() + p * padded, length);
      std::fill(w + i, w + padded, 0.0);
      for (int64_t j = 0; j < length; j++) w[j] *= factor;
      add_multiple(w, -0.5 * factor * dot(w, u, length), u, length);

      std::fill(products.get(), products.get() + width, 0.0);
      for (int64_t j = 0; j < i; j++) add_multiple(products.get(), factor * u[j], x + j * width, width);
      for (int64_t j = 0; j < i; j++) add_multiple(x + j * width, -u[j], products.get(), width);
    }
    std::copy(w, w + padded, right.get() + 2 * count * padded);
    std::copy(u, u + padded, right.get() + (2 * count + 1) * padded);
    if (++count < BLOCK) continue;
    for (int64_t r = 0; r < i; r += W) {
      int64_t j = 0;
      for (; j + 2 * W <= r + W; j += 2 * W)
        update_tile<2>(a + r * padded + j, padded, left.get() + r, right.get() + j, padded, 2 * count);
      if (j < r + W) update_tile<1>(a + r * padded + j, padded, left.get() + r, right.get() + j, padded, 2 * count);
    }
    count = 0;
  }
}

// Rows x and y of length n become c x - s y and s x + c y.
void rotate(double* x, double* y, double c, double s, int64_t n) {
  const Vec cosine(c), sine(s), minus(-s);
  for (int64_t j = 0; j < n; j += W) {
    const Vec a = Vec::loadu(x + j), b = Vec::loadu(y + j);
    at::vec::fmadd(cosine, a, minus * b).store(x + j);
    at::vec::fmadd(sine, a, cosine * b).store(y + j);
  }
}

// Implicit QL with Wilkinson's shift: d becomes the eigenvalues, and X (n, width) Z^T X.
void diagonalise(double* d, double* e, int64_t n, double* x, int64_t width) {
  double norm = 0.0;
  for (int64_t i = 0; i < n; i++) norm = std::max(norm, std::abs(d[i]) + (i > 0 ? std::abs(e[i]) : 0.0));
  const double epsilon = std::numeric_limits<double>::epsilon(), negligible = norm * epsilon / 8;
  std::copy(e + 1, e + n, e);  // e[i] between i and i + 1 from here on
  e[n - 1] = 0.0;
  for (int64_t l = 0; l < n; l++) {
    for (int steps = 0;; steps++) {
      int64_t m = l;
      for (; m < n - 1; m++)
        if (std::abs(e[m]) <= std::max(negligible, epsilon * (std::abs(d[m]) + std::abs(d[m + 1])))) break;
      if (m == l) break;
      TORCH_CHECK(steps < MOST_STEPS, "eigenvalue_shares: no convergence; is every entry finite?");
      double g = (d[l + 1] - d[l]) / (2 * e[l]);
      double r = std::hypot(g, 1.0);
      g = d[m] - d[l] + e[l] / (g + std::copysign(r, g));
      double s = 1.0, c = 1.0, p = 0.0;
      int64_t i = m - 1;
      for (; i >= l; i--) {
        const double f = s * e[i], b = c * e[i];
        r = std::sqrt(f * f + g * g);
        e[i + 1] = r;
        if (r == 0.0) {  // the matrix has come apart
          d[i + 1] -= p;
          e[m] = 0.0;
          break;
        }
        s = f / r;
        c = g / r;
        g = d[i + 1] - p;
        const double t = (d[i] - g) * s + 2 * c * b;
        p = s * t;
        d[i + 1] = g + p;
        g = c * t - b;
        rotate(x + i * width, x + (i + 1) * width, c, s, width);
      }
      if (i >= l) continue;
      d[l] -= p;
      e[l] = g;
      e[m] = 0.0;
    }
  }
}

std::tuple<at::Tensor, at::Tensor> run(const at::Tensor& a, const at::Tensor& x) {
  const int64_t n = a.size(0);
  TORCH_CHECK(
      a.dim() == 2 && x.dim() == 2 && n > 0 && a.size(1) == n && x.size(0) == n,
      "eigenvalue_shares: expected a (n, n) and x (n, d), but got ", a.sizes(), " and ", x.sizes());
  TORCH_CHECK(a.dtype() == at::kDouble && x.dtype() == at::kDouble, "eigenvalue_shares: a and x must be float64");
  const int64_t padded = round_up(n, W), width = std::max(W, round_up(x.size(1), W));
  Array<double> matrix(padded * padded), rows(padded * width), beside(padded);
  auto copy = [](const at::Tensor& from, double* to, int64_t height, int64_t leading) {
    std::fill(to, to + height * leading, 0.0);
    const double* data = from.const_data_ptr<double>();
    for (int64_t i = 0; i < from.size(0); i++)
      for (int64_t j = 0; j < from.size(1); j++) to[i * leading + j] = data[i * from.stride(0) + j * from.stride(1)];
  };
  copy(a, matrix.get(), padded, padded);
  copy(x, rows.get(), padded, width);
  auto values = at::empty({n}, a.options()), shares = at::empty({n}, a.options());
  double *d = values.mutable_data_ptr<double>(), *out = shares.mutable_data_ptr<double>();
  tridiagonal(matrix.get(), n, padded, rows.get(), width, d, beside.get());
  diagonalise(d, beside.get(), n, rows.get(), width);
  for (int64_t i = 0; i < n; i++) out[i] = dot(rows.get() + i * width, rows.get() + i * width, width);
  return {values, shares};
}

TORCH_LIBRARY_FRAGMENT(headwise, library) {
  library.def("eigenvalue_shares(Tensor a, Tensor x) -> (Tensor values, Tensor squares)");
}
TORCH_LIBRARY_IMPL(headwise, CPU, library) { library.impl("eigenvalue_shares", run); }

}  // namespace headwise::eigenvalue_shares
