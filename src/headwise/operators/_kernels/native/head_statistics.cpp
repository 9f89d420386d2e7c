// One pass over P = softmax(S), S = scale Q K^T + bias under a mask, that gives P V and what the measures of a head need.
//
// For a row i with M = max_j S_ij, E_ij = exp(S_ij - M), Z = sum_j E_ij:
//
//   entropy      log Z - sum_j E_ij (S_ij - M) / Z        all terms of one sign
//   largest      1 / Z                                    max_j P_ij
//   squares      sum_j E_ij^2 / Z^2
//   lse          M + log Z
//   received_j   sum_i P_ij        and        diagonal_delta   sum_i P_(i, i + delta)
//
// A block of rows of S stays in the cache through all of it.  Sums are of single precision over at most 512 terms and of
// double precision beyond.  A row that attends to no key is a row of zeros, with lse = -inf.
#include "block_product.h"

namespace headwise::head_statistics {

constexpr float HIDDEN = -1e30f;  // the score of a masked key: exp gives 0, and 0 * score is not NaN
constexpr int64_t PAD = std::max<int64_t>(W, 8);  // zeros between rows of E, so that a skewed row may run over its ends
constexpr int64_t CHUNK = 512;  // columns summed in single precision

enum Row { ENTROPY, LARGEST, SQUARES, LSE, PEAK, ROW_STATISTICS };

// A tensor (heads, m, n) that is broadcast by strides of zero; null if absent.
template <typename T>
struct Plane {
  const T* data = nullptr;
  int64_t head = 0, row = 0, column = 0;

  explicit Plane(const std::optional<at::Tensor>& x) {
    if (!x.has_value()) return;
    data = x->const_data_ptr<T>();
    head = x->size(0) > 1 ? x->stride(0) : 0;
    row = x->size(1) > 1 ? x->stride(1) : 0;
    column = x->size(2) > 1 ? x->stride(2) : 0;
  }
};

struct Problem {
  int64_t heads, m, n, k, d;
  int64_t rows;     // of a block, a multiple of STRIP
  int64_t padded;   // n, in whole panels
  int64_t leading;  // floats from a row of E to the next
  int64_t width;    // d, in whole vectors
  std::optional<int64_t> ahead;
  Plane<float> bias;
  Plane<bool> visible;
  const int64_t* sampled;
  int64_t samples;
};

struct Results {
  float* output;      // (heads, m, d)
  float* statistics;  // (ROW_STATISTICS, heads, m)
  float* sample;      // (heads, samples, n)
};

// Memory that one thread uses for all of its tasks.
struct Workspace {
  Floats keys, values, queries, scores, output, received, diagonals;

  explicit Workspace(const Problem& p)
      : keys(p.padded * p.k),
        values(p.padded * p.width),
        queries(p.rows * p.k),
        scores(p.rows * p.leading + PAD),
        output(p.rows * p.width),
        received(p.padded),
        diagonals(p.padded + p.rows + PAD) {
    std::fill(scores.get(), scores.get() + p.rows * p.leading + PAD, 0.0f);
  }
};

// Scores of one row with bias and mask, hidden beyond `reach`; the columns from `columns` to `padded` become hidden, too.
void finish_scores(const Problem& p, int64_t head, int64_t i, int64_t reach, int64_t columns, int64_t padded, float* s) {
  if (p.bias.data != nullptr) {
    const float* bias = p.bias.data + head * p.bias.head + i * p.bias.row;
    for (int64_t j = 0; j < columns; j++) s[j] = std::max(s[j] + bias[j * p.bias.column], HIDDEN);
  }
  if (p.visible.data != nullptr) {
    const bool* visible = p.visible.data + head * p.visible.head + i * p.visible.row;
    for (int64_t j = 0; j < columns; j++) s[j] = visible[j * p.visible.column] ? s[j] : HIDDEN;
  }
  std::fill(s + reach, s + padded, HIDDEN);
}

// Turns scores into E and returns 1 / Z; `statistics` points at the row's entry of the first of ROW_STATISTICS planes.
float exponentials(float* s, int64_t padded, float* statistics, int64_t plane) {
  Vec highest(HIDDEN);
  for (int64_t j = 0; j < padded; j += W) highest = at::vec::maximum(highest, Vec::loadu(s + j));
  const float peak = maximum(highest);
  if (peak <= HIDDEN) {
    std::fill(s, s + padded, 0.0f);
    for (int64_t x : {ENTROPY, LARGEST, SQUARES}) statistics[x * plane] = 0.0f;
    statistics[LSE * plane] = -std::numeric_limits<float>::infinity();
    statistics[PEAK * plane] = HIDDEN;
    return 0.0f;
  }
  const Vec top(peak);
  double total = 0, dot = 0, squares = 0;
  for (int64_t start = 0; start < padded; start += CHUNK) {
    Vec a(0.0f), b(0.0f), c(0.0f);
    const int64_t stop = std::min(padded, start + CHUNK);
    for (int64_t j = start; j < stop; j += W) {
      const Vec t = Vec::loadu(s + j) - top;
      const Vec e = exp_nonpositive(t);
      e.store(s + j);
      a = a + e;
      b = at::vec::fmadd(e, t, b);
      c = at::vec::fmadd(e, e, c);
    }
    total += sum(a);
    dot += sum(b);
    squares += sum(c);
  }
  const double inverse = 1 / total, log_total = std::log(total);
  statistics[ENTROPY * plane] = static_cast<float>(log_total - dot * inverse);
  statistics[LARGEST * plane] = static_cast<float>(inverse);
  statistics[SQUARES * plane] = static_cast<float>(squares * inverse * inverse);
  statistics[LSE * plane] = static_cast<float>(peak + log_total);
  statistics[PEAK * plane] = peak;
  return static_cast<float>(inverse);
}

// Adds a strip of rows E_r / Z_r to the sums of columns and, skewed, to the sums of diagonals.  diagonals[u] belongs to
// row r and column u - (STRIP - 1) + r: the zeros between rows stand for columns that do not exist.
void add_strip(const float* e, int64_t leading, const float* inverse, int64_t padded, float* received, float* diagonals) {
  Vec factor[STRIP];
  for (int64_t r = 0; r < STRIP; r++) factor[r] = Vec(inverse[r]);
  for (int64_t j = 0; j < padded; j += W) {
    Vec x = Vec::loadu(received + j);
#pragma GCC unroll 6
    for (int64_t r = 0; r < STRIP; r++) x = at::vec::fmadd(Vec::loadu(e + r * leading + j), factor[r], x);
    x.store(received + j);
  }
  for (int64_t u = 0; u < padded + STRIP - 1; u += W) {
    Vec x = Vec::loadu(diagonals + u);
    const float* skewed = e + u - (STRIP - 1);
#pragma GCC unroll 6
    for (int64_t r = 0; r < STRIP; r++) x = at::vec::fmadd(Vec::loadu(skewed + r * (leading + 1)), factor[r], x);
    x.store(diagonals + u);
  }
}

// Rows [first, first + count) of one head, at most p.rows; adds to the sums `received` (n) and `diagonals` (m + n - 1).
template <typename T>
void block_of_rows(
    const Problem& p, const Results& results, const T* q, int64_t q_row, int64_t q_column, float scale, int64_t head,
    int64_t first, int64_t count, Workspace& w, double* received, double* diagonals) {
  const int64_t columns = p.ahead.has_value() ? std::clamp<int64_t>(first + count + *p.ahead, 0, p.n) : p.n;
  const int64_t padded = round_up(columns, PANEL), rows = round_up(count, STRIP), plane = p.heads * p.m;
  float* e = w.scores.get() + PAD;  // the zeros before the first row
  float* output = w.output.get();
  std::fill(output, output + rows * p.width, 0.0f);
  pack_rows(q + first * q_row, q_row, q_column, count, p.k, p.k, scale, w.queries.get());
  std::fill(w.queries.get() + count * p.k, w.queries.get() + rows * p.k, 0.0f);
  multiply_packed(w.queries.get(), w.keys.get(), rows, padded, p.k, e, p.leading);

  std::fill(w.received.get(), w.received.get() + padded, 0.0f);
  std::fill(w.diagonals.get(), w.diagonals.get() + padded + rows + PAD, 0.0f);
  std::vector<float> inverse(rows, 0.0f);
  for (int64_t strip = 0; strip < rows; strip += STRIP) {
    for (int64_t r = strip; r < strip + STRIP; r++) {
      float* row = e + r * p.leading;
      if (padded < p.padded) std::fill(row + padded, row + padded + PAD, 0.0f);  // of a longer block before
      if (r >= count) {
        std::fill(row, row + padded, 0.0f);
        continue;
      }
      const int64_t i = first + r;
      const int64_t reach = p.ahead.has_value() ? std::clamp<int64_t>(i + *p.ahead + 1, 0, columns) : columns;
      finish_scores(p, head, i, reach, columns, padded, row);
      inverse[r] = exponentials(row, padded, results.statistics + head * p.m + i, plane);
    }
    // the lowest diagonal of the strip's last row is the block's lowest but rows - strip - STRIP
    add_strip(e + strip * p.leading, p.leading, &inverse[strip], padded, w.received.get(), w.diagonals.get() + rows - strip - STRIP);
  }
  add_product(e, p.leading, 1, w.values.get(), rows, columns, p.width, output);

  for (int64_t r = 0; r < count; r++) {
    float* out = results.output + (head * p.m + first + r) * p.d;
    for (int64_t c = 0; c < p.d; c++) out[c] = output[r * p.width + c] * inverse[r];
  }
  const int64_t* from = std::lower_bound(p.sampled, p.sampled + p.samples, first);
  for (; from < p.sampled + p.samples && *from < first + count; from++) {
    const float* row = e + (*from - first) * p.leading;
    float* out = results.sample + (head * p.samples + (from - p.sampled)) * p.n;
    for (int64_t j = 0; j < columns; j++) out[j] = row[j] * inverse[*from - first];
  }
  for (int64_t j = 0; j < columns; j++) received[j] += w.received.get()[j];
  // of `count` rows, padded to `rows`, the lowest diagonal j - i is -(first + count - 1)
  const float* sums = w.diagonals.get() + rows - count;
  double* total = diagonals + p.m - first - count;
  for (int64_t u = 0; u < columns + count - 1; u++) total[u] += sums[u];
}

template <typename T>
void all_heads(
    const Problem& p, const Results& results, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, float scale,
    double* received, double* diagonals) {
  const int64_t blocks = (p.m + p.rows - 1) / p.rows, shared_q = p.heads / std::max<int64_t>(1, k.size(0));
  // a task is a range of blocks of one head with sums of its own: enough of them to occupy all threads
  const int64_t parts = std::clamp<int64_t>((4 * at::get_num_threads() + p.heads - 1) / p.heads, 1, blocks);
  const int64_t lines = p.m + p.n - 1;
  std::vector<double> sums(parts > 1 ? (parts - 1) * p.heads * (p.n + lines) : 0, 0.0);
  auto sums_of = [&](int64_t head, int64_t part) {  // the first part of a head uses the results themselves
    return part == 0 ? std::pair(received + head * p.n, diagonals + head * lines)
                     : std::pair(
                           sums.data() + ((part - 1) * p.heads + head) * (p.n + lines),
                           sums.data() + ((part - 1) * p.heads + head) * (p.n + lines) + p.n);
  };
  at::parallel_for(0, p.heads * parts, 1, [&](int64_t begin, int64_t end) {
    Workspace w(p);
    int64_t packed = -1;
    for (int64_t task = begin; task < end; task++) {
      const int64_t head = task / parts, part = task % parts, group = head / shared_q;
      if (packed != group) {
        packed = group;
        pack_transposed(
            k.const_data_ptr<T>() + group * k.stride(0), k.stride(1), k.stride(2), p.n, p.k, w.keys.get());
        pack_rows(
            v.const_data_ptr<T>() + group * v.stride(0), v.stride(1), v.stride(2), p.n, p.d, p.width, 1.0f, w.values.get());
      }
      const auto [columns, lines] = sums_of(head, part);
      for (int64_t block = part * blocks / parts; block < (part + 1) * blocks / parts; block++) {
        const int64_t first = block * p.rows;
        block_of_rows(
            p, results, q.const_data_ptr<T>() + head * q.stride(0), q.stride(1), q.stride(2), scale, head, first,
            std::min(p.rows, p.m - first), w, columns, lines);
      }
    }
  });
  if (parts == 1) return;
  at::parallel_for(0, p.heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t head = begin; head < end; head++)
      for (int64_t part = 1; part < parts; part++) {
        const auto [total_columns, total_lines] = sums_of(head, 0);
        const auto [columns, more_lines] = sums_of(head, part);
        for (int64_t j = 0; j < p.n; j++) total_columns[j] += columns[j];
        for (int64_t u = 0; u < lines; u++) total_lines[u] += more_lines[u];
      }
  });
}

bool ascending_below(const at::Tensor& x, int64_t m) {
  const int64_t* p = x.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < x.numel(); i++)
    if (p[i] < 0 || p[i] >= m || (i > 0 && p[i] <= p[i - 1])) return false;
  return true;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> run(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale, std::optional<int64_t> ahead,
    const std::optional<at::Tensor>& visible, const std::optional<at::Tensor>& attn_bias, const at::Tensor& sampled) {
  const int64_t h = q.size(0), m = q.size(1), n = k.size(1), d = v.size(2);
  TORCH_CHECK(
      q.dim() == 3 && k.dim() == 3 && v.dim() == 3 && k.size(2) == q.size(2) && v.size(1) == n && k.size(0) > 0 &&
          k.size(0) == v.size(0) && h % k.size(0) == 0,
      "head_statistics: expected q (h, m, k), k (g, n, k), v (g, n, d) with h a multiple of g, but got ", q.sizes(), ", ",
      k.sizes(), " and ", v.sizes());
  TORCH_CHECK(
      k.dtype() == q.dtype() && v.dtype() == q.dtype() && (q.dtype() == at::kFloat || q.dtype() == at::kBFloat16),
      "head_statistics: q, k and v must all be float32 or all be bfloat16");
  for (const auto& x : {visible, attn_bias})
    TORCH_CHECK(
        !x.has_value() || (x->dim() == 3 && (x->size(0) == 1 || x->size(0) == h) && (x->size(1) == 1 || x->size(1) == m) &&
                           (x->size(2) == 1 || x->size(2) == n)),
        "head_statistics: a mask must broadcast to (h, m, n)");
  TORCH_CHECK(!visible.has_value() || visible->dtype() == at::kBool, "head_statistics: visible must be boolean");
  TORCH_CHECK(!attn_bias.has_value() || attn_bias->dtype() == at::kFloat, "head_statistics: attn_bias must be float32");
  TORCH_CHECK(
      sampled.dtype() == at::kLong && sampled.dim() == 1 && sampled.is_contiguous() && ascending_below(sampled, m),
      "head_statistics: sampled must be different rows, int64, in ascending order");
  const int64_t padded = round_up(n, PANEL);
  // rows of a block: enough to use a panel of keys often, and a block of E within the second cache where that is possible
  const int64_t rows = STRIP * std::clamp<int64_t>((1 << 15) / (STRIP * padded), 4, 8);
  const Problem p{
      h, m, n, q.size(2), d, std::min(rows, round_up(m, STRIP)), padded, padded + PAD, round_up(d, W), ahead,
      Plane<float>(attn_bias), Plane<bool>(visible), sampled.const_data_ptr<int64_t>(), sampled.size(0)};
  const auto single = q.options().dtype(at::kFloat), twice = q.options().dtype(at::kDouble);
  auto output = at::empty({h, m, d}, single), statistics = at::empty({ROW_STATISTICS, h, m}, single);
  auto received = at::zeros({h, n}, twice), diagonals = at::zeros({h, m + n - 1}, twice);
  auto sample = at::zeros({h, p.samples, n}, single);
  const Results results{
      output.mutable_data_ptr<float>(), statistics.mutable_data_ptr<float>(), sample.mutable_data_ptr<float>()};
  if (h > 0 && m > 0 && n > 0) {
    auto work = q.dtype() == at::kFloat ? all_heads<float> : all_heads<at::BFloat16>;
    work(
        p, results, q, k, v, static_cast<float>(scale), received.mutable_data_ptr<double>(),
        diagonals.mutable_data_ptr<double>());
  }
  return {output, statistics, received, diagonals, sample};
}

TORCH_LIBRARY_FRAGMENT(headwise, library) {
  library.def(
      "head_statistics(Tensor q, Tensor k, Tensor v, float scale, int? ahead, Tensor? visible, Tensor? attn_bias, "
      "Tensor sampled) -> (Tensor output, Tensor statistics, Tensor received, Tensor diagonals, Tensor sample)");
}
TORCH_LIBRARY_IMPL(headwise, CPU, library) { library.impl("head_statistics", run); }

}  // namespace headwise::head_statistics
