// The rest of each sequence and head, pooled from its queries, keys and values; rest.py has the formula. A task is a
// group of heads of a sequence and reads every row once, a block of rows at a time, so the sums of a head have the same
// order in any group.
//
// Letters: B batch, H heads, n queries (the last n of the m positions), m keys, d head size.

#pragma once

#include <cmath>

#include "listed_rows.h"
#include "problem.h"

struct Pooling {
  Rows query, key, value;
  const bool* keys;  // (B, m), true = a key that the rest stands for; null if all are
  float scale;
  int64_t B, H, n, m;
  int64_t group, groups;         // heads per task and tasks per sequence
  std::vector<int64_t> lengths;  // of the sequences, up to the last such key if they are packed
  ParallelFor parallel_for;

  int64_t count(int64_t b, int64_t first) const {
    return keys ? std::count(keys + b * m + first, keys + (b + 1) * m, true) : m - first;
  }
  // The keys among a block of positions, counted from its first one, as listed_rows.h reads them.
  struct Block {
    int64_t first, rows, count;
    int32_t list[BLOCK + 3];
  };
  // Calls function(block) for blocks of positions of sequence b from `first` on.
  template <class Function>
  void for_each_block(int64_t b, int64_t first, Function&& function) const {
    Block block;
    for (block.first = first; block.first < lengths[b]; block.first += BLOCK) {
      block.rows = std::min(BLOCK, lengths[b] - block.first);
      block.count = 0;
      for (int64_t r = 0; r < block.rows; ++r) {
        block.list[block.count] = static_cast<int32_t>(r);
        block.count += !keys || keys[b * m + block.first + r];
      }
      std::fill_n(block.list + block.count, 3, block.list[0]);
      function(block);
    }
  }
  template <class Function>
  void for_each_task(Function&& function) const {
    parallel(parallel_for, B * groups, 1, [&](int64_t from, int64_t to) {
      for (int64_t number = from; number < to; ++number) {
        const int64_t head = number % groups * group;
        function(Problem::Task{number / groups, head, std::min(H, head + group)});
      }
    });
  }
};

// A block of rows of a task's heads: where they lie if they are floats, or else a copy.
template <int D>
struct BlockRows {
  Buffer copy;
  const float* data = nullptr;
  int64_t stride_h = 0;
  int32_t list[BLOCK + 3];  // that of `Pooling::Block`, in units of D floats

  explicit BlockRows(int64_t heads) : copy(heads * head_stride(BLOCK, D)) {}

  void read(const Rows& from, const Problem::Task& task, const Pooling::Block& block, int64_t first) {
    int64_t step = 1;
    if (from.dtype == FLOAT32 && from.d == D && from.stride_n % D == 0 && from.stride_n < 1 << 24) {
      step = from.stride_n / D;
      data = reinterpret_cast<const float*>(from.row(task.b, task.first_head, first));
      stride_h = from.stride_h;
    } else {
      read_rows<D>(from, task, first, first + block.rows, copy.data(), BLOCK);
      data = copy.data();
      stride_h = head_stride(BLOCK, D);
    }
    for (int64_t t = 0; t < block.count + 3; ++t) list[t] = static_cast<int32_t>(block.list[t] * step);
  }
  const float* of(int64_t h) const { return data + h * stride_h; }
};

// pooled (B, H, 2 d + 1) are the keys, values and scores of the rests; means (B, H, d + 1), for the backward, the mean
// queries times `scale` and the logarithms of the sums of exp(mean . key).
template <int D>
void pool(const Pooling& p, float* pooled, float* means) {
  p.for_each_task([&](const Problem::Task& task) {
    const int64_t b = task.b, heads = task.end_head - task.first_head, d = p.query.d;
    BlockRows<D> rows(heads), values(heads);
    Buffer sums(heads * 3 * D);
    std::vector<float> high(heads, LOW), total(heads);
    alignas(64) float weights[BLOCK + W];
    const auto sum = [&](int64_t head, int64_t which) { return sums.data() + (head * 3 + which) * D; };

    const float asking = static_cast<float>(std::max<int64_t>(1, p.count(b, p.m - p.n)));
    std::fill_n(weights, BLOCK, p.scale / asking);
    p.for_each_block(b, p.m - p.n, [&](const auto& block) {
      if (block.count == 0) return;
      rows.read(p.query, task, block, block.first - (p.m - p.n));
      for (int64_t h = 0; h < heads; ++h) accumulate<D>(weights, rows.of(h), rows.list, block.count, sum(h, 0));
    });
    p.for_each_block(b, 0, [&](const auto& block) {
      if (block.count == 0) return;
      rows.read(p.key, task, block, block.first);
      values.read(p.value, task, block, block.first);
      for (int64_t h = 0; h < heads; ++h) {
        dot<D>(sum(h, 0), rows.of(h), rows.list, block.count, LOW, weights);
        Vec top = broadcast(high[h]), own = {};
        for (int64_t t = 0; t < block.count; t += W) top = load(weights + t) > top ? load(weights + t) : top;
        top = max_of(top);
        if (top[0] > high[h]) {  // what was summed before was divided by too little
          const Vec factor = exponential(broadcast(high[h]) - top);
          for (int64_t c = 0; c < 2 * D; c += W) store(sum(h, 1) + c, load(sum(h, 1) + c) * factor);
          total[h] *= factor[0];
          high[h] = top[0];
        }
        for (int64_t t = 0; t < block.count; t += W) store(weights + t, exponential(load(weights + t) - top));
        std::fill_n(weights + block.count, W, 0.0f);
        for (int64_t t = 0; t < block.count; t += W) own += load(weights + t);
        total[h] += sum_of(own)[0];
        accumulate<D>(weights, rows.of(h), rows.list, block.count, sum(h, 1));
        accumulate<D>(weights, values.of(h), values.list, block.count, sum(h, 2));
      }
    });
    const int64_t count = p.count(b, 0);
    for (int64_t h = 0; h < heads; ++h) {
      float* const to = pooled + (b * p.H + task.first_head + h) * (2 * d + 1);
      float* const mean = means + (b * p.H + task.first_head + h) * (d + 1);
      float product = 0;
      for (int64_t c = 0; c < d; ++c) {
        for (int64_t which : {1, 2}) to[(which - 1) * d + c] = count ? sum(h, which)[c] / total[h] : 0;
        product += to[c] * (mean[c] = sum(h, 0)[c]);
      }
      mean[d] = count ? high[h] + std::log(total[h]) : 0;
      to[2 * d] = count ? mean[d] - product - std::log(static_cast<float>(count)) : -1e9f;
    }
  });
}

template <int D>
void pool_backward(const Pooling& p, const float* grad, const float* pooled, const float* means, const Rows& dq,
                   const Rows& dk, const Rows& dv) {
  p.for_each_task([&](const Problem::Task& task) {
    const int64_t b = task.b, heads = task.end_head - task.first_head, stride = head_stride(BLOCK, D), d = p.query.d;
    BlockRows<D> rows(heads), values(heads);
    Buffer grads(heads * stride), others(grads.size()), sums(heads * 6 * D);
    std::vector<float> delta(heads), log_sum(heads), of_score(heads);
    alignas(64) float weights[BLOCK + W], products[2][BLOCK + W];
    enum { KEY, VALUE, MEAN, OF_KEY, OF_VALUE, OF_MEAN };  // the rest, the mean query times `scale`, and gradients
    const auto sum = [&](int64_t head, int64_t which) { return sums.data() + (head * 6 + which) * D; };

    for (int64_t h = 0; h < heads; ++h) {
      const int64_t head = b * p.H + task.first_head + h;
      const float *g = grad + head * (2 * d + 1), *own = pooled + head * (2 * d + 1), *mean = means + head * (d + 1);
      log_sum[h] = mean[d];
      of_score[h] = g[2 * d];
      for (int64_t c = 0; c < d; ++c) {
        sum(h, KEY)[c] = own[c];
        sum(h, VALUE)[c] = own[d + c];
        sum(h, MEAN)[c] = mean[c];
        sum(h, OF_KEY)[c] = g[c] - g[2 * d] * mean[c];
        sum(h, OF_VALUE)[c] = g[d + c];
        sum(h, OF_MEAN)[c] = -g[2 * d] * own[c];
      }
      // Rounded like the products below, which are the same if there is a single key.
      constexpr int32_t none[4] = {};
      dot<D>(sum(h, OF_KEY), sum(h, KEY), none, 1, 0, products[0]);
      dot<D>(sum(h, OF_VALUE), sum(h, VALUE), none, 1, 0, products[1]);
      delta[h] = products[0][0] + products[1][0];
    }
    p.for_each_block(b, 0, [&](const auto& block) {
      if (block.count) {
        rows.read(p.key, task, block, block.first);
        values.read(p.value, task, block, block.first);
      }
      for (int64_t h = 0; h < heads; ++h) {
        float *k = grads.data() + h * stride, *v = others.data() + h * stride;
        dot<D>(sum(h, MEAN), rows.of(h), rows.list, block.count, LOW, weights);
        dot<D>(sum(h, OF_KEY), rows.of(h), rows.list, block.count, 0, products[0]);
        dot<D>(sum(h, OF_VALUE), values.of(h), values.list, block.count, 0, products[1]);
        for (int64_t t = 0; t < block.count; t += W) {
          const Vec weight = exponential(load(weights + t) - log_sum[h]);
          store(products[0] + t, weight * ((load(products[0] + t) + load(products[1] + t) - delta[h]) + of_score[h]));
          store(weights + t, weight);
        }
        accumulate<D>(products[0], rows.of(h), rows.list, block.count, sum(h, OF_MEAN));
        int64_t t = 0;
        for (int64_t r = 0; r < block.rows; ++r) {
          const bool listed = t < block.count && block.list[t] == r;
          const float weight = listed ? weights[t] : 0, of_score = listed ? products[0][t] : 0;
          t += listed;
          for (int64_t c = 0; c < D; c += W) {
            store(k + r * D + c, weight * load(sum(h, OF_KEY) + c) + of_score * load(sum(h, MEAN) + c));
            store(v + r * D + c, weight * load(sum(h, OF_VALUE) + c));
          }
        }
      }
      write_rows<D>(dk, task, block.first, block.first + block.rows, grads.data(), BLOCK);
      write_rows<D>(dv, task, block.first, block.first + block.rows, others.data(), BLOCK);
    });
    const float factor = p.scale / static_cast<float>(std::max<int64_t>(1, p.count(b, p.m - p.n)));
    p.for_each_block(b, p.m - p.n, [&](const auto& block) {
      for (int64_t h = 0; h < heads; ++h) {
        int64_t t = 0;
        for (int64_t r = 0; r < block.rows; ++r) {
          const bool listed = t < block.count && block.list[t] == r;
          t += listed;
          for (int64_t c = 0; c < D; c += W)
            store(grads.data() + h * stride + r * D + c, load(sum(h, OF_MEAN) + c) * (listed ? factor : 0));
        }
      }
      const int64_t first = block.first - (p.m - p.n);
      write_rows<D>(dq, task, first, first + block.rows, grads.data(), BLOCK);
    });
  });
}
