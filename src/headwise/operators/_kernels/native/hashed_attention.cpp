// out_i = softmax over position i itself and, round by round, the keys near it in the order of hashes, times v.
//
// A round has an order of the queries and one of the keys; chunk t of the queries meets chunks t - 1 and t of the keys.  A pair
// that an earlier round has met is left out, a position meets itself once, before the first round.  Rounds continue the sums of
// those before, so nothing is copied into an order and no mask is formed.  Backward recomputes the weights from top and total.
#include "attention_gradients.h"

#include <bit>
#include <numeric>

namespace headwise::hashed_attention {

using namespace headwise::tiles;

// The orders of one head; and chunks, so that a query and a key have met in round e if |chunks_q - chunks_k| = 1.
template <typename T>
struct Head {
  Head(int64_t n, int64_t rounds, int64_t chunk, const int64_t* order_q, const int64_t* order_k)
      : rounds(rounds), order_q(order_q), order_k(order_k), chunks_q(n * rounds), chunks_k(n * rounds) {
    fill(n, chunk, order_q, T(-1), chunks_q);
    fill(n, chunk, order_k, T(0), chunks_k);
  }

  int64_t rounds;
  const int64_t *order_q, *order_k;  // (rounds, n)
  std::vector<T> chunks_q, chunks_k;  // (n, rounds): twice the chunk, less one for queries

 private:
  void fill(int64_t n, int64_t chunk, const int64_t* order, T offset, std::vector<T>& chunks) {
    const T unset = std::numeric_limits<T>::lowest();
    std::fill(chunks.begin(), chunks.end(), unset);
    for (int64_t e = 0; e < rounds; e++) {
      for (int64_t i = 0; i < n; i++) {
        const int64_t at = order[e * n + i];
        TORCH_CHECK(
            at >= 0 && at < n && chunks[at * rounds + e] == unset, "hashed_attention: round ", e, " is not an order of ", n,
            " positions");
        chunks[at * rounds + e] = T(2 * (i / chunk)) + offset;
      }
    }
  }
};

// Up to R queries of a chunk in one round, and the keys of their chunk and the one before it.
struct Meeting {
  int64_t round, first, count, keys_begin, keys_end;  // places in the order
};

struct Options {
  int64_t chunk;
  std::optional<double> self_score;  // of a position with itself instead of the scaled product
};

template <typename T, int NV>
class HashedTile : public BackwardTile<T, NV> {
 public:
  using Base = BackwardTile<T, NV>;
  using typename Base::V;
  using Base::L, Base::R;

  HashedTile(const Inputs<T>& in, const Options& options, int64_t rounds)
      : Base(in), options_(options), chunks_(R * rounds) {}

  void forward(
      int64_t b, int64_t h, const Meeting& m, const Head<T>& head, const View<T>& out, T* top, T* total) {
    begin_meeting(b, h, m, head);
    const int64_t values = this->in_.sizes.values;
    this->read(m.round ? out : this->in_.v, b, h, values, this->value_width_, T(1), this->rows_);
    for (int64_t t = 0; t < R; t++) {
      const int64_t i = rows_of_.at(std::min(t, m.count - 1));
      if (m.round) {
        this->top_[t] = top[i], this->total_[t] = total[i];
      } else if (masked(i)) {
        std::fill_n(this->rows_ + t * this->value_width_, values, T(0));
        this->top_[t] = std::numeric_limits<T>::lowest(), this->total_[t] = T(0);
      } else {
        this->top_[t] = self_score(t, i), this->total_[t] = T(1);
      }
    }
    transpose<T>(this->rows_, R, this->value_width_, this->ot_);
    this->started_ = true;
    list_keys(m, head, [&] {
      hashed_scores(m.round, head);
      this->absorb();
    });
    if (m.round == head.rounds - 1) this->divide();
    this->write(out, top, total);
  }

  void backward(
      int64_t b, int64_t h, const Meeting& m, const Head<T>& head, const View<T>& out, const View<T>& pull, const T* top,
      const T* total, const Gradients<T>& to) {
    begin_meeting(b, h, m, head);
    this->read(pull, b, h, this->in_.sizes.values, this->value_width_, T(1), this->pull_);
    this->begin_backward(out, top, total);
    if (!m.round) pull_back_self(to);
    list_keys(m, head, [&] {
      hashed_scores(m.round, head);
      this->pull_back(to);
    });
    this->finish_backward(to.q);
  }

 private:
  bool masked(int64_t i) const { return this->mask_ && !this->mask_[i]; }

  T self_score(int64_t t, int64_t i) {
    if (options_.self_score) return T(*options_.self_score);
    return dot<T>(this->q_ + t * this->key_width_, this->keys_ + i * this->in_.k.row, this->in_.sizes.width);
  }

  void begin_meeting(int64_t b, int64_t h, const Meeting& m, const Head<T>& head) {
    rows_of_ = {0, 1, m.count, false, head.order_q + m.round * this->in_.sizes.n + m.first};
    this->begin(b, h, rows_of_);
    latest_ = 0;
    for (int64_t t = 0; t < R; t++) {
      const int64_t i = rows_of_.at(std::min(t, m.count - 1));
      latest_ = std::max(latest_, i);
      this->own_[t] = T(2 * i);
      for (int64_t e = 0; e < m.round; e++) chunks_[e * R + t] = head.chunks_q[i * head.rounds + e];
    }
  }

  template <typename F>
  void list_keys(const Meeting& m, const Head<T>& head, const F& use) {
    const int64_t* order = head.order_k + m.round * this->in_.sizes.n;
    this->count_ = 0;
    for (int64_t at = m.keys_begin; at < m.keys_end; at++) {
      if (!this->in_.sizes.causal || order[at] < latest_) this->add(order[at], ALL, use);
    }
    if (this->count_) use();
  }

  // Scores of the listed keys, -inf for the query's own position, pairs met earlier, and in a causal call later keys.
  void hashed_scores(int64_t round, const Head<T>& head) {
    dots<T, NV>(this->key_, this->count_, this->qt_, this->in_.sizes.width, this->s_);
    const V hidden(-std::numeric_limits<T>::infinity()), one(T(1));
    const bool causal = this->in_.sizes.causal;
    for (int64_t j = 0; j < this->count_; j++) {
      const int64_t position = this->position_[j];
      const T* chunks = head.chunks_k.data() + position * head.rounds;
      const V at(T(2 * position));
      V least[NV];
      for (int w = 0; w < NV; w++) {
        least[w] = V::loadu(this->own_ + w * L) - at;
        if (!causal) least[w] = least[w].abs();
      }
      for (int64_t e = 0; e < round; e++) {
        const V chunk(chunks[e]);
        for (int w = 0; w < NV; w++) {
          least[w] = at::vec::minimum(least[w], (V::loadu(chunks_ + e * R + w * L) - chunk).abs());
        }
      }
      for (int w = 0; w < NV; w++) {
        T* score = this->s_ + j * R + w * L;
        V::blendv(hidden, V::loadu(score), least[w] > one).store(score);
      }
    }
  }

  void pull_back_self(const Gradients<T>& to) {
    const Sizes& s = this->in_.sizes;
    for (int64_t t = 0; t < rows_of_.count; t++) {
      const int64_t i = rows_of_.at(t);
      if (masked(i)) continue;
      const T* row = this->pull_ + t * this->value_width_;
      const T weight = std::exp(self_score(t, i) - this->top_[t]) * this->total_[t];
      add_row<T>(to.v + i * to.value_row, weight, row, this->value_width_);
      if (options_.self_score) continue;
      const T ds = weight * (dot<T>(row, this->values_ + i * this->in_.v.row, s.values) - this->dot_[t]);
      add_row<T>(to.k + i * to.key_row, ds, this->q_ + t * this->key_width_, this->key_width_);
      add_row<T>(to.q.at(this->b_, this->h_, i), this->in_.scale * ds, this->keys_ + i * this->in_.k.row, s.width);
    }
  }

  const Options& options_;
  Buffer<T> chunks_;  // [earlier round][query]
  Rows rows_of_{};
  int64_t latest_ = 0;
};

// ---- all tiles of a call ----

struct Plan {
  int64_t units, rounds, tiles_of_chunk, tiles;  // tiles of one round of one head
  int64_t parts;                                 // of the tiles of a head, where there are fewer heads than threads
};

Plan plan_of(const Sizes& s, const Options& options, int64_t rounds, int64_t rows) {
  Plan p;
  p.units = s.batch * s.heads, p.rounds = rounds;
  p.tiles_of_chunk = (std::min(options.chunk, s.n) + rows - 1) / rows;
  p.tiles = (s.n + options.chunk - 1) / options.chunk * p.tiles_of_chunk;
  const int64_t threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  p.parts = std::clamp<int64_t>((threads + p.units - 1) / p.units, 1, p.tiles);
  return p;
}

// Call use(tile, meeting) for the tiles begin .. end of a round, with a tile of one or two vectors of queries.
template <typename T>
class Tiles {
 public:
  Tiles(const Inputs<T>& in, const Options& options, const Plan& plan) : in_(in), options_(options), plan_(plan) {}

  template <typename F>
  void run(int64_t round, int64_t begin, int64_t end, const F& use) {
    constexpr int64_t R = 2 * Lanes<T>::size();
    const int64_t n = in_.sizes.n, chunk = options_.chunk;
    for (int64_t i = begin; i < end; i++) {
      const int64_t start = i / plan_.tiles_of_chunk * chunk, stop = std::min(start + chunk, n);
      const int64_t first = start + i % plan_.tiles_of_chunk * R, count = std::min(R, stop - first);
      if (count <= 0) continue;  // of a last chunk that is shorter
      const Meeting meeting{round, first, count, std::max<int64_t>(start - chunk, 0), stop};
      if (count > Lanes<T>::size()) {
        if (!wide_) wide_ = std::make_unique<HashedTile<T, 2>>(in_, options_, plan_.rounds);
        use(*wide_, meeting);
      } else {
        if (!narrow_) narrow_ = std::make_unique<HashedTile<T, 1>>(in_, options_, plan_.rounds);
        use(*narrow_, meeting);
      }
    }
  }

 private:
  const Inputs<T>& in_;
  const Options& options_;
  const Plan& plan_;
  std::unique_ptr<HashedTile<T, 1>> narrow_;
  std::unique_ptr<HashedTile<T, 2>> wide_;
};

struct Orders {
  at::Tensor q, k;  // (b, h, rounds, n)
  int64_t rounds;
};

template <typename T>
Head<T> head_of(const Orders& orders, const Sizes& s, const Options& options, int64_t unit) {
  const int64_t at = unit * orders.rounds * s.n;
  return {s.n, orders.rounds, options.chunk, orders.q.data_ptr<int64_t>() + at, orders.k.data_ptr<int64_t>() + at};
}

template <typename T>
void run_forward(
    const Inputs<T>& in, const Orders& orders, const Options& options, const at::Tensor& out, const at::Tensor& top,
    const at::Tensor& total) {
  const Sizes& s = in.sizes;
  const Plan plan = plan_of(s, options, orders.rounds, 2 * Lanes<T>::size());
  const View<T> to = view<T>(out);
  T *tops = top.data_ptr<T>(), *totals = total.data_ptr<T>();
  // parts of one head wait for one another after every round, as the next one continues the sums of all queries
  const int64_t together = plan.parts == 1 ? plan.rounds : 1;
  for (int64_t first = 0; first < plan.rounds; first += together) {
    at::parallel_for(0, plan.units * plan.parts, 1, [&](int64_t begin, int64_t end) {
      Tiles<T> tiles(in, options, plan);
      for (int64_t i = begin; i < end; i++) {
        const int64_t unit = i / plan.parts, part = i % plan.parts, b = unit / s.heads, h = unit % s.heads;
        const Head<T> head = head_of<T>(orders, s, options, unit);
        for (int64_t round = first; round < first + together; round++) {
          tiles.run(round, plan.tiles * part / plan.parts, plan.tiles * (part + 1) / plan.parts, [&](auto& tile, const Meeting& m) {
            tile.forward(b, h, m, head, to, tops + unit * s.n, totals + unit * s.n);
          });
        }
      }
    });
  }
}

using Results = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

template <typename T>
Results run_backward(
    const Inputs<T>& in, const Orders& orders, const Options& options, const at::Tensor& pull, const at::Tensor& out,
    const at::Tensor& top, const at::Tensor& total) {
  constexpr int64_t L = Lanes<T>::size();
  const Sizes& s = in.sizes;
  const Plan plan = plan_of(s, options, orders.rounds, 2 * L);
  const int64_t key_width = padded(s.width, L), value_width = padded(s.values, L);
  const auto new_gradient = [&](int64_t width) {
    return at::zeros({plan.parts, s.batch, s.n, s.heads, width}, top.options()).transpose(2, 3);
  };
  const at::Tensor dq = new_gradient(s.width), dk = new_gradient(key_width), dv = new_gradient(value_width);
  std::vector<View<T>> to_q, to_k, to_v;
  for (int64_t part = 0; part < plan.parts; part++) {
    to_q.push_back(view<T>(dq[part])), to_k.push_back(view<T>(dk[part])), to_v.push_back(view<T>(dv[part]));
  }
  const View<T> results = view<T>(out), pulls = view<T>(pull);
  const T *tops = top.data_ptr<T>(), *totals = total.data_ptr<T>();
  at::parallel_for(0, plan.units * plan.parts, 1, [&](int64_t begin, int64_t end) {
    Tiles<T> tiles(in, options, plan);
    for (int64_t i = begin; i < end; i++) {
      const int64_t part = i / plan.units, unit = i % plan.units, b = unit / s.heads, h = unit % s.heads;
      const Head<T> head = head_of<T>(orders, s, options, unit);
      const Gradients<T> to{
          to_q[part], to_k[part].at(b, h, 0), to_v[part].at(b, h, 0), to_k[part].row, to_v[part].row, nullptr, nullptr, nullptr};
      for (int64_t round = 0; round < plan.rounds; round++) {
        tiles.run(round, plan.tiles * part / plan.parts, plan.tiles * (part + 1) / plan.parts, [&](auto& tile, const Meeting& m) {
          tile.backward(b, h, m, head, results, pulls, tops + unit * s.n, totals + unit * s.n, to);
        });
      }
    }
  });
  return {sum_of_parts(dq, s.width), sum_of_parts(dk, s.width), sum_of_parts(dv, s.values)};
}

// ---- tensors ----

using Optional = const std::optional<at::Tensor>&;

Orders checked_orders(const at::Tensor& order_q, const at::Tensor& order_k, const Sizes& s, const Options& options) {
  TORCH_CHECK(s.groups == s.heads, "hashed_attention: ", s.heads, " heads need keys of their own, but there are ", s.groups);
  TORCH_CHECK(s.m == s.n && s.n < (1 << 23), "hashed_attention: ", s.m, " queries and ", s.n, " keys are not one sequence");
  TORCH_CHECK(options.chunk > 0, "hashed_attention: chunk must be positive, but is ", options.chunk);
  TORCH_CHECK(
      order_q.dim() == 4 && order_q.size(2) > 0 &&
          order_q.sizes() == at::IntArrayRef({s.batch, s.heads, order_q.size(2), s.n}) && order_k.sizes() == order_q.sizes() &&
          order_q.scalar_type() == at::kLong && order_k.scalar_type() == at::kLong,
      "hashed_attention: orders must be int64 (b, h, rounds, n), but are ", order_q.sizes(), " and ", order_k.sizes());
  return {order_q.contiguous(), order_k.contiguous(), order_q.size(2)};
}

std::vector<int64_t> no_patterns(const at::Tensor& q) { return std::vector<int64_t>(q.size(1) * FIELDS, 0); }

// The result before it is rounded to the dtype of v: gradients of half precision need its digits.
Results forward(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, Optional key_mask, const at::Tensor& order_q,
    const at::Tensor& order_k, int64_t chunk, double scale, bool causal, std::optional<double> self_score) {
  TORCH_CHECK(q.dim() == 4, "hashed_attention: q, k and v must have four axes");
  const auto patterns = no_patterns(q);
  const Arguments a = checked("hashed_attention", q, k, v, key_mask, {}, {}, {}, patterns, causal);
  const Sizes& s = a.sizes;
  const Options options{std::min(chunk, s.n), self_score};
  const Orders orders = checked_orders(order_q, order_k, s, options);
  const at::Tensor out = at::empty({s.batch, s.m, s.heads, s.values}, a.q.options()).transpose(1, 2);
  const at::Tensor top = at::empty({s.batch, s.heads, s.m}, a.q.options()), total = at::empty(top.sizes(), top.options());
  if (a.q.scalar_type() == at::kDouble) {
    run_forward<double>(inputs_of<double>(a, patterns, scale), orders, options, out, top, total);
  } else {
    run_forward<float>(inputs_of<float>(a, patterns, scale), orders, options, out, top, total);
  }
  return {out, top, total};
}

// Gradients in the dtypes of the inputs.
Results backward(
    const at::Tensor& pull, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, Optional key_mask,
    const at::Tensor& order_q, const at::Tensor& order_k, const at::Tensor& out, const at::Tensor& top, const at::Tensor& total,
    int64_t chunk, double scale, bool causal, std::optional<double> self_score) {
  TORCH_CHECK(q.dim() == 4, "hashed_attention_backward: q, k and v must have four axes");
  const auto patterns = no_patterns(q);
  const Arguments a = checked("hashed_attention", q, k, v, key_mask, {}, {}, {}, patterns, causal);
  const at::ScalarType type = a.q.scalar_type();
  const Sizes& s = a.sizes;
  const Options options{std::min(chunk, s.n), self_score};
  const Orders orders = checked_orders(order_q, order_k, s, options);
  TORCH_CHECK(
      pull.sizes() == out.sizes() && out.sizes() == at::IntArrayRef({s.batch, s.heads, s.m, s.values}) &&
          top.sizes() == at::IntArrayRef({s.batch, s.heads, s.m}) && total.sizes() == top.sizes() && top.scalar_type() == type &&
          total.scalar_type() == type,
      "hashed_attention_backward: the gradient and the results do not fit together");
  const at::Tensor rows = by_rows(pull, type), results = by_rows(out, type);
  const at::Tensor tops = top.contiguous(), totals = total.contiguous();
  const auto [dq, dk, dv] = type == at::kDouble
      ? run_backward<double>(inputs_of<double>(a, patterns, scale), orders, options, rows, results, tops, totals)
      : run_backward<float>(inputs_of<float>(a, patterns, scale), orders, options, rows, results, tops, totals);
  return {dq.to(q.scalar_type()), dk.to(k.scalar_type()), dv.to(v.scalar_type())};
}

// ---- orders ----

// A stable counting sort of `order` by digit[order].
void sort_by(const int32_t* digit, int64_t digits, int64_t n, const int32_t* order, int32_t* sorted, std::vector<int32_t>& starts) {
  starts.assign(digits + 1, 0);
  for (int64_t i = 0; i < n; i++) starts[digit[i] + 1]++;
  for (int64_t i = 0; i < digits; i++) starts[i + 1] += starts[i];
  for (int64_t i = 0; i < n; i++) sorted[starts[digit[order[i]]]++] = order[i];
}

// Positions in the order of their hashes (b, h, rounds, n), ties by position, masked ones last.  A hash of x is
// argmax [y; -y] for y = x R; `turned` (b, h, n, hashes, rounds, half) has the y of one or two hashes, the first one counts more.
at::Tensor hash_order(const at::Tensor& turned, Optional key_mask) {
  TORCH_CHECK(
      turned.dim() == 6 && turned.scalar_type() == at::kFloat && turned.size(5) > 0 && turned.size(5) < (1 << 30) &&
          turned.size(2) < (1 << 23),
      "hash_order: turned must be float32 (b, h, n, hashes, rounds, half), but is ", turned.sizes());
  const at::Tensor y = turned.contiguous();
  const int64_t b = y.size(0), h = y.size(1), n = y.size(2), hashes = y.size(3), rounds = y.size(4), half = y.size(5);
  at::Tensor mask;
  if (key_mask) {
    TORCH_CHECK(
        key_mask->scalar_type() == at::kBool && key_mask->sizes() == at::IntArrayRef({b, h, n}),
        "hash_order: key_mask must be boolean (b, h, n), but is ", key_mask->sizes());
    mask = key_mask->contiguous();
  }
  const at::Tensor result = at::empty({b, h, rounds, n}, y.options().dtype(at::kLong));
  const float* data = y.data_ptr<float>();
  const bool* shown = mask.defined() ? mask.data_ptr<bool>() : nullptr;
  int64_t* to = result.data_ptr<int64_t>();
  const int32_t last = static_cast<int32_t>(2 * half);  // the digit of masked positions
  at::parallel_for(0, b * h, 1, [&](int64_t begin, int64_t end) {
    std::vector<int32_t> digits(hashes * rounds * n), order(n), sorted(n), starts;
    for (int64_t unit = begin; unit < end; unit++) {
      for (int64_t i = 0; i < n; i++) {
        const bool hidden = shown && !shown[unit * n + i];
        const float* row = data + (unit * n + i) * hashes * rounds * half;
        for (int64_t e = 0; e < hashes * rounds; e++, row += half) {
          uint64_t most = 0;  // |y| above the column, counted backwards: the first of equal ones is the largest
          for (uint32_t c = 0; c < half; c++) {
            const uint64_t size = std::bit_cast<uint32_t>(row[c]) & 0x7fffffffu;
            most = std::max(most, size << 32 | (0xffffffffu - c));
          }
          const int32_t best = static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(most));
          digits[e * n + i] = hidden ? last : row[best] < 0 ? best + static_cast<int32_t>(half) : best;
        }
      }
      for (int64_t e = 0; e < rounds; e++) {
        std::iota(order.begin(), order.end(), 0);
        for (int64_t hash = hashes - 1; hash >= 0; hash--) {
          sort_by(digits.data() + (hash * rounds + e) * n, last + 1, n, order.data(), sorted.data(), starts);
          std::swap(order, sorted);
        }
        std::copy(order.begin(), order.end(), to + (unit * rounds + e) * n);
      }
    }
  });
  return result;
}

TORCH_LIBRARY_FRAGMENT(headwise, library) {
  library.def(
      "hashed_attention(Tensor q, Tensor k, Tensor v, Tensor? key_mask, Tensor order_q, Tensor order_k, int chunk, "
      "float scale, bool causal, float? self_score) -> (Tensor, Tensor, Tensor)");
  library.def(
      "hashed_attention_backward(Tensor pull, Tensor q, Tensor k, Tensor v, Tensor? key_mask, Tensor order_q, "
      "Tensor order_k, Tensor out, Tensor top, Tensor total, int chunk, float scale, bool causal, float? self_score) -> "
      "(Tensor, Tensor, Tensor)");
  library.def("hash_order(Tensor turned, Tensor? key_mask) -> Tensor");
}
TORCH_LIBRARY_IMPL(headwise, CPU, library) {
  library.impl("hashed_attention", forward);
  library.impl("hashed_attention_backward", backward);
  library.impl("hash_order", hash_order);
}

}  // namespace headwise::hashed_attention
