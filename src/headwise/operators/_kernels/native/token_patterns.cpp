// For places p_0 < p_1 < ... of one token, each of them as the query i = p_a, the sums of P_ij = exp(s q_i . k_j - lse_i) over
//
//   j = p_b        b != a     the same token elsewhere
//   j = p_b + 1    b < a      what followed it
//   j = p_b - 1    b < a      what preceded it
//
// as far as there is such a key, in a causal call none after i + ahead; and the numbers of these keys.
#include "attention_tiles.h"

namespace headwise::token_patterns {

constexpr int64_t SHIFTS[] = {0, 1, -1};
constexpr int64_t KINDS = 3;

// q, k (h, n, width) float32 with contiguous rows, log_sum_exp (h, n); `order` has the places of each token one after the other,
// ascending, those of token t from starts[t] to starts[t + 1].  Returns the sums (h, 3, n) and the numbers of keys (3, n).
std::tuple<at::Tensor, at::Tensor> token_patterns(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& log_sum_exp, const at::Tensor& order, const at::Tensor& starts,
    double scale, std::optional<int64_t> ahead) {
  TORCH_CHECK(
      q.dim() == 3 && q.sizes() == k.sizes() && log_sum_exp.sizes() == q.sizes().slice(0, 2) && q.scalar_type() == at::kFloat &&
          k.scalar_type() == at::kFloat && log_sum_exp.scalar_type() == at::kFloat,
      "token_patterns: q ", q.sizes(), ", k ", k.sizes(), " and log_sum_exp ", log_sum_exp.sizes(),
      " must be float32 and fit together");
  TORCH_CHECK(
      order.dim() == 1 && starts.dim() == 1 && starts.size(0) > 0 && order.scalar_type() == at::kLong &&
          starts.scalar_type() == at::kLong,
      "token_patterns: order and starts must be lists of int64");
  const int64_t h = q.size(0), n = q.size(1), width = q.size(2), tokens = starts.size(0) - 1;
  const at::Tensor queries = tiles::by_rows(q, at::kFloat), keys = tiles::by_rows(k, at::kFloat);
  const at::Tensor lse = log_sum_exp.contiguous(), places_of = order.contiguous(), starts_of = starts.contiguous();
  const int64_t *places = places_of.data_ptr<int64_t>(), *start = starts_of.data_ptr<int64_t>();
  int64_t most = 0;
  for (int64_t t = 0; t < tokens; t++) {
    TORCH_CHECK(
        start[t] >= 0 && start[t] <= start[t + 1] && start[t + 1] <= order.size(0), "token_patterns: starts must ascend to ",
        order.size(0));
    for (int64_t a = start[t]; a < start[t + 1]; a++) {
      TORCH_CHECK(
          places[a] >= 0 && places[a] < n && (a == start[t] || places[a - 1] < places[a]),
          "token_patterns: the places of a token must ascend and be below ", n);
    }
    most = std::max(most, start[t + 1] - start[t]);
  }
  const at::Tensor mass = at::zeros({h, KINDS, n}, queries.options()), counts = at::zeros({KINDS, n}, queries.options());
  at::parallel_for(0, h, 1, [&](int64_t begin, int64_t end) {
    Floats buffer(round_up(most, W));
    float* s = buffer.get();
    for (int64_t head = begin; head < end; head++) {
      const float *q_of = queries.data_ptr<float>() + head * queries.stride(0), *k_of = keys.data_ptr<float>() + head * keys.stride(0);
      float* to = mass.data_ptr<float>() + head * KINDS * n;
      for (int64_t t = 0; t < tokens; t++) {
        for (int64_t a = start[t]; a < start[t + 1]; a++) {
          const int64_t i = places[a];
          const Vec shift(lse.data_ptr<float>()[head * n + i]), factor(static_cast<float>(scale));
          for (int64_t kind = 0; kind < KINDS; kind++) {
            int64_t count = 0;
            for (int64_t b = start[t]; b < (kind ? a : start[t + 1]); b++) {
              const int64_t j = places[b] + SHIFTS[kind];
              if (b == a || j < 0 || j >= n || (ahead && j > i + *ahead)) continue;
              s[count++] = tiles::dot<float>(q_of + i * queries.stride(1), k_of + j * keys.stride(1), width);
            }
            Vec total(0.0f);
            for (int64_t c = 0; c < count; c += W) {
              const Vec weight = exp_nonpositive(Vec::loadu(s + c) * factor - shift);
              total = total + (count - c < W ? Vec::set(Vec(0.0f), weight, count - c) : weight);
            }
            to[kind * n + i] = sum(total);
            if (head == 0) counts.data_ptr<float>()[kind * n + i] = static_cast<float>(count);
          }
        }
      }
    }
  });
  return {mass, counts};
}

TORCH_LIBRARY_FRAGMENT(headwise, library) {
  library.def(
      "token_patterns(Tensor q, Tensor k, Tensor log_sum_exp, Tensor order, Tensor starts, float scale, int? ahead) -> "
      "(Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(headwise, CPU, library) { library.impl("token_patterns", token_patterns); }

}  // namespace headwise::token_patterns
