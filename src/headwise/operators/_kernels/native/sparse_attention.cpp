// out_i = sum_j exp(s q_i . k_j + bias_j - top_i) v_j / total_i over the keys j that the pattern of a head shows to query i;
// every head may have another pattern, and all of them are one call.  Backward recomputes the weights from top and total.
#include "attention_gradients.h"

namespace headwise::sparse_attention {

using namespace headwise::tiles;

// ---- all tiles of a call ----

struct Work {
  std::vector<std::vector<Rows>> tiles;  // of each head
  std::vector<double> ends;              // running sums of the costs of heads
};

template <typename T>
Work plan_of(const Inputs<T>& in, bool column_pass, bool band_pass) {
  Work work;
  double total = 0;
  for (const Pattern& p : in.patterns) {
    std::vector<Rows> tiles = tiles_of(p, in.sizes, 2 * Lanes<T>::size());
    std::erase_if(tiles, [&](const Rows& rows) { return rows.column ? !column_pass : !band_pass; });
    const double n = in.sizes.n;
    double keys = std::min(n, double(std::max<int64_t>(p.left + p.right + p.block, 0)) + 32);
    if (p.every) keys += n / p.every * p.last;
    if (p.stride) keys += n / p.stride;
    total += keys * double(tiles.size());
    work.tiles.push_back(std::move(tiles));
    work.ends.push_back(total);
  }
  return work;
}

// Call f(b, h, rows) for all tiles, equal shares of the cost in each thread.
template <typename F, typename T>
void for_all(const Inputs<T>& in, const Work& work, const F& make) {
  const Sizes& s = in.sizes;
  const double one = work.ends.back(), total = one * double(s.batch);
  const bool small = total * double(s.width + s.values) < 1 << 14;
  const int64_t parts = small || at::in_parallel_region() ? 1 : at::get_num_threads();
  at::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
    auto f = make();
    const double low = total * double(begin) / double(parts), high = total * double(end) / double(parts);
    for (int64_t b = 0; b < s.batch; b++) {
      for (int64_t h = 0; h < s.heads; h++) {
        const auto& tiles = work.tiles[h];
        const double start = one * double(b) + (h ? work.ends[h - 1] : 0), size = work.ends[h] - (h ? work.ends[h - 1] : 0);
        const double count = double(tiles.size());
        const auto place = [&](double at) { return int64_t(std::clamp(std::ceil((at - start) / size * count - 1e-6), 0.0, count)); };
        if (tiles.empty()) continue;
        const int64_t last = end == parts ? int64_t(tiles.size()) : place(high);
        for (int64_t i = place(low); i < last; i++) f(b, h, tiles[i]);
      }
    }
  });
}

template <typename T>
struct Tiles {  // of both sizes, made when first needed
  explicit Tiles(const Inputs<T>& in) : in(in) {}
  const Inputs<T>& in;
  std::unique_ptr<Tile<T, 1>> narrow;
  std::unique_ptr<Tile<T, 2>> wide;
};

template <typename T>
void run_forward(const Inputs<T>& in, const at::Tensor& out, const at::Tensor& top, const at::Tensor& total) {
  const View<T> to = view<T>(out);
  T *tops = top.data_ptr<T>(), *totals = total.data_ptr<T>();
  const bool columns = std::any_of(in.patterns.begin(), in.patterns.end(), [](const Pattern& p) { return p.stride > 0; });
  for (const bool column : {true, false}) {
    if (column && !columns) continue;
    const Work work = plan_of<T>(in, column, !column);
    for_all(in, work, [&] {
      return [&, tiles = std::make_shared<Tiles<T>>(in)](int64_t b, int64_t h, const Rows& rows) {
        const int64_t at = (b * in.sizes.heads + h) * in.sizes.m;
        if (rows.count > Lanes<T>::size()) {
          if (!tiles->wide) tiles->wide = std::make_unique<Tile<T, 2>>(in);
          tiles->wide->forward(b, h, rows, to, tops + at, totals + at);
        } else {
          if (!tiles->narrow) tiles->narrow = std::make_unique<Tile<T, 1>>(in);
          tiles->narrow->forward(b, h, rows, to, tops + at, totals + at);
        }
      };
    });
  }
}

using Optional = const std::optional<at::Tensor>&;

// The result before it is rounded to the dtype of v: gradients of half precision need its digits.
std::tuple<at::Tensor, at::Tensor, at::Tensor> forward(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, Optional key_mask, Optional slot_keys,
    Optional slot_bias, Optional slot_values, at::IntArrayRef patterns, double scale, bool causal) {
  const Arguments a = checked("sparse_attention", q, k, v, key_mask, slot_keys, slot_bias, slot_values, patterns, causal);
  const Sizes& s = a.sizes;
  const at::Tensor out = at::empty({s.batch, s.m, s.heads, s.values}, a.q.options()).transpose(1, 2);
  const at::Tensor top = at::empty({s.batch, s.heads, s.m}, a.q.options()), total = at::empty(top.sizes(), top.options());
  if (a.q.scalar_type() == at::kDouble) {
    run_forward<double>(inputs_of<double>(a, patterns, scale), out, top, total);
  } else {
    run_forward<float>(inputs_of<float>(a, patterns, scale), out, top, total);
  }
  return {out, top, total};
}

using Results = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

template <typename T>
Results run_backward(
    const Arguments& a, const Inputs<T>& in, const at::Tensor& pull, const at::Tensor& out, const at::Tensor& top,
    const at::Tensor& total) {
  constexpr int64_t L = Lanes<T>::size();
  const Sizes& s = in.sizes;
  const int64_t key_width = padded(s.width, L), value_width = padded(s.values, L);
  const Work work = plan_of<T>(in, true, true);
  const bool columns = std::any_of(in.patterns.begin(), in.patterns.end(), [](const Pattern& p) { return p.stride > 0; });
  // a thread owns the keys that it adds to; where there are fewer key heads than threads, some have copies to be summed
  const int64_t units = s.batch * s.groups, threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  const int64_t parts = columns || units >= threads ? 1 : (threads + units - 1) / units;
  const auto options = a.q.options();
  const at::Tensor dq = at::zeros({s.batch, s.m, s.heads, s.width}, options).transpose(1, 2);
  const at::Tensor dk = at::zeros({parts, s.batch, s.n, s.groups, key_width}, options).transpose(2, 3);
  const at::Tensor dv = at::zeros({parts, s.batch, s.n, s.groups, value_width}, options).transpose(2, 3);
  const at::Tensor dsk = at::zeros({parts, s.batch, s.heads, s.slots, key_width}, options);
  const at::Tensor dsb = at::zeros({parts, s.batch, s.heads, s.blocks, s.slots}, options);
  const at::Tensor dsv = at::zeros({parts, s.batch, s.heads, s.blocks, s.slots, value_width}, options);
  const View<T> results = view<T>(out), pulls = view<T>(pull), to_q = view<T>(dq);
  const T *tops = top.data_ptr<T>(), *totals = total.data_ptr<T>();
  std::vector<View<T>> to_k, to_v;
  for (int64_t part = 0; part < parts; part++) to_k.push_back(view<T>(dk[part])), to_v.push_back(view<T>(dv[part]));
  T *to_sk = dsk.data_ptr<T>(), *to_sb = dsb.data_ptr<T>(), *to_sv = dsv.data_ptr<T>();
  at::parallel_for(0, units * parts, 1, [&](int64_t begin, int64_t end) {
    std::unique_ptr<BackwardTile<T, 1>> narrow;
    std::unique_ptr<BackwardTile<T, 2>> wide;
    for (int64_t unit = begin; unit < end; unit++) {
      const int64_t part = unit / units, b = unit % units / s.groups, g = unit % s.groups, shared = s.heads / s.groups;
      const int64_t copy = part * s.batch + b;
      const Gradients<T> to{
          to_q, to_k[part].at(b, g, 0), to_v[part].at(b, g, 0), to_k[part].row, to_v[part].row,
          to_sk + copy * s.heads * s.slots * key_width, to_sb + copy * s.heads * s.blocks * s.slots,
          to_sv + copy * s.heads * s.blocks * s.slots * value_width};
      for (int64_t h = g * shared; h < (g + 1) * shared; h++) {
        const auto& tiles = work.tiles[h];
        const int64_t at = (b * s.heads + h) * s.m, count = int64_t(tiles.size());
        for (int64_t i = count * part / parts; i < count * (part + 1) / parts; i++) {
          if (tiles[i].count > L) {
            if (!wide) wide = std::make_unique<BackwardTile<T, 2>>(in);
            wide->backward(b, h, tiles[i], results, pulls, tops + at, totals + at, to);
          } else {
            if (!narrow) narrow = std::make_unique<BackwardTile<T, 1>>(in);
            narrow->backward(b, h, tiles[i], results, pulls, tops + at, totals + at, to);
          }
        }
      }
    }
  });
  const auto whole = [&](const at::Tensor& x) { return parts == 1 ? x.squeeze(0) : x.sum(0); };
  return {
      dq, sum_of_parts(dk, s.width), sum_of_parts(dv, s.values), whole(dsk).narrow(-1, 0, s.width),
      whole(dsb), whole(dsv).narrow(-1, 0, s.values)};
}

// Gradients in the dtypes of the inputs; those of slots are empty without slots.
Results backward(
    const at::Tensor& pull, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, Optional key_mask,
    Optional slot_keys, Optional slot_bias, Optional slot_values, const at::Tensor& out, const at::Tensor& top,
    const at::Tensor& total, at::IntArrayRef patterns, double scale, bool causal) {
  const Arguments a = checked("sparse_attention", q, k, v, key_mask, slot_keys, slot_bias, slot_values, patterns, causal);
  const at::ScalarType type = a.q.scalar_type();
  const Sizes& s = a.sizes;
  TORCH_CHECK(
      pull.sizes() == out.sizes() && out.sizes() == at::IntArrayRef({s.batch, s.heads, s.m, s.values}) &&
          top.sizes() == at::IntArrayRef({s.batch, s.heads, s.m}) && total.sizes() == top.sizes(),
      "sparse_attention_backward: the gradient and the results do not fit together");
  const at::Tensor rows = by_rows(pull, type), results = by_rows(out, type);
  const at::Tensor tops = top.contiguous(), totals = total.contiguous();
  auto [dq, dk, dv, dsk, dsb, dsv] = type == at::kDouble
      ? run_backward<double>(a, inputs_of<double>(a, patterns, scale), rows, results, tops, totals)
      : run_backward<float>(a, inputs_of<float>(a, patterns, scale), rows, results, tops, totals);
  const auto like = [](const at::Tensor& x, Optional given) { return given ? x.to(given->scalar_type()) : x; };
  return {
      like(dq, q), like(dk, k), like(dv, v), like(dsk, slot_keys), like(dsb, slot_bias), like(dsv, slot_values)};
}

TORCH_LIBRARY_FRAGMENT(headwise, library) {
  library.def(
      "sparse_attention(Tensor q, Tensor k, Tensor v, Tensor? key_mask, Tensor? slot_keys, Tensor? slot_bias, "
      "Tensor? slot_values, int[] patterns, float scale, bool causal) -> (Tensor, Tensor, Tensor)");
  library.def(
      "sparse_attention_backward(Tensor pull, Tensor q, Tensor k, Tensor v, Tensor? key_mask, Tensor? slot_keys, "
      "Tensor? slot_bias, Tensor? slot_values, Tensor out, Tensor top, Tensor total, int[] patterns, float scale, "
      "bool causal) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(headwise, CPU, library) {
  library.impl("sparse_attention", forward);
  library.impl("sparse_attention_backward", backward);
}

}  // namespace headwise::sparse_attention
