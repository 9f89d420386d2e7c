// The backward pass of a tile: weights again from top and total, then the gradients of its queries and listed keys.
#pragma once

#include "attention_tiles.h"

#include <ATen/ops/sum.h>

namespace headwise::tiles {

// x (parts, b, h, rows, padded width), which lies as (parts, b, rows, h, ...), summed over parts and cut to `width`; the result
// lies as a layer's (b, rows, h width).
at::Tensor sum_of_parts(const at::Tensor& x, int64_t width) {
  const at::Tensor laid_out = x.transpose(2, 3);
  const at::Tensor whole = x.size(0) == 1 ? laid_out.squeeze(0) : laid_out.sum(0);
  return whole.narrow(-1, 0, width).contiguous().transpose(1, 2);
}

// Gradients of one part of the queries of a batch and a group; rows are padded to whole vectors.
template <typename T>
struct Gradients {
  View<T> q;  // (b, h, m, k), not padded
  T *k, *v;   // (n, k) and (n, d) of this part, batch and group
  int64_t key_row, value_row;
  T *slot_keys, *slot_bias, *slot_values;  // (h, r, k), (h, blocks, r) and (h, blocks, r, d) of this part and batch
};

template <typename T, int NV>
class BackwardTile : public Tile<T, NV> {
 public:
  using Base = Tile<T, NV>;
  using typename Base::V;
  using Base::L, Base::R;

  explicit BackwardTile(const Inputs<T>& in)
      : Base(in), pull_(R * this->value_width_), pull_t_(R * this->value_width_), dq_(R * this->key_width_), ds_(R * KEYS) {}

  void backward(
      int64_t b, int64_t h, const Rows& rows, const View<T>& out, const View<T>& pull, const T* top, const T* total,
      const Gradients<T>& to) {
    const Sizes& s = this->in_.sizes;
    this->begin(b, h, rows);
    this->read(pull, b, h, s.values, this->value_width_, T(1), pull_);
    if (this->alone()) {
      const int64_t i = rows.first;
      return backward_row(out.at(b, h, i), top[i], total[i] > T(0) ? T(1) / total[i] : T(0), to.q.at(b, h, i), to);
    }
    begin_backward(out, top, total);
    this->keys([&] {
      this->scores();
      pull_back(to);
    });
    finish_backward(to.q);
  }

 protected:
  // What all lists of a tile share, after `begin` and with the gradient in pull_.
  void begin_backward(const View<T>& out, const T* top, const T* total) {
    const Sizes& s = this->in_.sizes;
    const int64_t count = this->tile_->count;
    this->read(out, this->b_, this->h_, s.values, this->value_width_, T(1), this->rows_);
    transpose<T>(pull_, R, this->value_width_, pull_t_);
    transpose<T>(this->rows_, R, this->value_width_, this->ot_);
    for (int w = 0; w < NV; w++) {
      V sum(T(0));
      for (int64_t c = 0; c < s.values; c++) {
        sum = at::vec::fmadd(V::loadu(pull_t_ + c * R + w * L), V::loadu(this->ot_ + c * R + w * L), sum);
      }
      sum.store(dot_ + w * L);
    }
    for (int64_t t = 0; t < R; t++) {  // lanes without a query have no weight, whatever their scores
      const int64_t i = this->tile_->at(std::min(t, count - 1));
      this->top_[t] = t < count ? top[i] : std::numeric_limits<T>::max();
      this->total_[t] = t < count && total[i] > T(0) ? T(1) / total[i] : T(0);
    }
    std::fill_n(static_cast<T*>(dq_), R * this->key_width_, T(0));
  }

  void finish_backward(const View<T>& dq) {
    const Sizes& s = this->in_.sizes;
    transpose<T>(dq_, this->key_width_, R, this->q_);
    for (int64_t t = 0; t < this->tile_->count; t++) {
      T* row = dq.at(this->b_, this->h_, this->tile_->at(t));
      for (int64_t c = 0; c < s.width; c++) row[c] += this->in_.scale * this->q_[t * this->key_width_ + c];
    }
  }

  void backward_row(const T* out, T top, T inverse, T* dq, const Gradients<T>& to) {
    const Sizes& s = this->in_.sizes;
    const T dot_out = dot<T>(pull_, out, s.values);
    std::fill_n(static_cast<T*>(dq_), this->key_width_, T(0));
    this->keys([&] {
      const int64_t count = this->count_;
      this->row_scores();
      this->row_weights(top, inverse);
      find_targets(to);
      for (int64_t j = 0; j < count; j++) {
        const T weight = this->s_[j], ds = weight * (dot<T>(pull_, this->value_[j], s.values) - dot_out);
        add_row<T>(dq_, ds, this->key_[j], s.width);
        add_row<T>(value_to_[j], weight, pull_, this->value_width_);
        add_row<T>(key_to_[j], ds, this->q_, this->key_width_);
        if (bias_to_[j]) *bias_to_[j] += ds;
      }
    });
    for (int64_t c = 0; c < s.width; c++) dq[c] += this->in_.scale * dq_[c];
  }

  // Where the gradients of the listed keys are added.
  void find_targets(const Gradients<T>& to) {
    const Sizes& s = this->in_.sizes;
    for (int64_t j = 0; j < this->count_; j++) {
      const int64_t at = this->position_[j], t = this->slot_[j];
      if (t < 0) {
        key_to_[j] = to.k + at * to.key_row, value_to_[j] = to.v + at * to.value_row;
        bias_to_[j] = nullptr;
      } else {
        const int64_t slot = (this->h_ * s.blocks + at) * s.slots + t;
        key_to_[j] = to.slot_keys + (this->h_ * s.slots + t) * this->key_width_;
        value_to_[j] = to.slot_values + slot * this->value_width_;
        bias_to_[j] = to.slot_bias + slot;
      }
    }
  }

  // Adds the gradients of the listed keys, whose scores are s_.
  void pull_back(const Gradients<T>& to) {
    const Sizes& s = this->in_.sizes;
    const int64_t count = this->count_;
    dots<T, NV>(this->value_, count, pull_t_, s.values, ds_);
    for (int64_t j = 0; j < count; j++) {
      for (int w = 0; w < NV; w++) {
        T *weights = this->s_ + j * R + w * L, *ds = ds_ + j * R + w * L;
        const V weight = exponential(V::loadu(weights) - V::loadu(this->top_ + w * L)) * V::loadu(this->total_ + w * L);
        weight.store(weights);
        (weight * (V::loadu(ds) - V::loadu(dot_ + w * L))).store(ds);
      }
    }
    mix<T, NV>(this->key_, count, ds_, s.width, dq_);
    find_targets(to);
    for (int64_t j = 0; j < count; j++) {
      for (int64_t i = 0; i < R && bias_to_[j]; i++) *bias_to_[j] += ds_[j * R + i];
    }
    spread<T>(value_to_, count, this->s_, R, pull_, this->value_width_);
    // slots come last, and those of several blocks have the same key
    const int64_t own = std::find_if(this->slot_, this->slot_ + count, [](int64_t t) { return t >= 0; }) - this->slot_;
    spread<T>(key_to_, own, ds_, R, this->q_, this->key_width_);
    for (int64_t j = own; j < count; j++) spread_keys<T, 1>(key_to_ + j, ds_ + j * R, R, this->q_, this->key_width_);
  }

  Buffer<T> pull_, pull_t_, dq_, ds_;  // [query][c], [c][query], [c][query], [key][query]
  alignas(64) T dot_[R];               // <pull_i, out_i>
  T* key_to_[KEYS];
  T* value_to_[KEYS];
  T* bias_to_[KEYS];
};

}  // namespace headwise::tiles
