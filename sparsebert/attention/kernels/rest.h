// The rest of a head; rest.py has the formula. It is what one more query, the mean of the head's queries, attends to
// among the keys that the rest stands for, so a task pools it like any query's output, from keys and values that it has
// packed. See `Problem::rest` for what is kept of it.
//
// Letters: B batch, H heads, n queries (the last n of the m positions), m keys, d head size.

#pragma once

#include <cmath>

#include "listed_rows.h"
#include "problem.h"

// The keys of a sequence that the rest stands for, as listed_rows.h reads them, and its queries among them.
struct RestKeys {
  std::vector<int32_t> list;
  int64_t count, first_query;
  float factor;  // of the sum of these queries in their mean times the scale

  RestKeys(const Problem& p, int64_t b) {
    const bool* const keys = p.rest_keys ? p.rest_keys + b * p.m : nullptr;
    const int64_t length = p.num_keys(b);
    list.resize(length + 3);
    count = 0;
    for (int64_t j = 0; j < length; ++j) {
      list[count] = static_cast<int32_t>(j);
      count += !keys || keys[j];
    }
    std::fill_n(list.begin() + count, 3, count ? list[0] : 0);
    first_query = std::lower_bound(list.begin(), list.begin() + count, p.m - p.n) - list.begin();
    factor = p.scale / static_cast<float>(std::max<int64_t>(1, count - first_query));
  }

  // Calls function(i) for each of the queries.
  template <class Function>
  void for_each_query(const Problem& p, int64_t from, int64_t to, Function&& function) const {
    for (int64_t t = std::max(from, first_query); t < to; ++t) function(list[t] - (p.m - p.n));
  }
};

// The mean queries of a task's heads times the scale, D numbers each.
template <int D>
void mean_queries(const Problem& p, const Problem::Task& task, const RestKeys& keys, float* means) {
  const int64_t heads = task.end_head - task.first_head;
  std::fill_n(means, heads * D, 0.0f);
  for (int64_t t = keys.first_query; t < keys.count; t += BLOCK)
    for (int64_t h = 0; h < heads; ++h) {
      Vec sum[D / W];
      read_vecs<D>(means + h * D, sum);
      keys.for_each_query(p, t, std::min(keys.count, t + BLOCK), [&](int64_t i) {
        p.query.add_to<D>(task.b, task.first_head + h, i, sum);
      });
      for (int64_t c = 0; c < D / W; ++c) store(means + h * D + c * W, sum[c]);
    }
  for (int64_t c = 0; c < heads * D; ++c) means[c] *= keys.factor;
}

// What is kept of a rest but for its weights, whose numerators exp(score - high) add up to `total`.
inline void keep_rest(const Problem& p, int64_t h, int64_t count, const float* key, const float* value,
                      const float* mean, float high, float total, float* rest) {
  const int64_t d = p.query.d;
  float product = 0;
  for (int64_t c = 0; c < d; ++c) product += key[c] * mean[c];
  std::copy_n(value, d, std::copy_n(key, d, rest));
  // Of numbers that are as small as the scores differ, which round less than logarithms of sums.
  rest[2 * d] = p.rest_bias[h] + (count ? high - product + std::log(total / static_cast<float>(count)) : -1e9f);
  std::copy_n(mean, d, rest + 2 * d + 1);
}

// Pools the rests of a task's heads, and makes their keys and values the last rows of the packed ones.
template <int D>
void pool(const Problem& p, const Problem::Task& task, float* keys, float* values, float* rest) {
  const RestKeys listed(p, task.b);
  const int64_t count = listed.count, stride = head_stride(p.key_rows(), D);
  Buffer means((task.end_head - task.first_head) * D), weights(count + 2 * W);
  mean_queries<D>(p, task, listed, means.data());
  for (int64_t h = task.first_head; h < task.end_head; ++h, keys += stride, values += stride, rest += p.rest_size()) {
    const float* const mean = means.data() + (h - task.first_head) * D;
    float *const key = keys + p.m * D, *const value = values + p.m * D, *const own = rest + 3 * p.query.d + 1;
    float high = 0;
    dot<D>(mean, keys, listed.list.data(), count, LOW, weights.data());
    const Vec total = softmax_numerators(weights.data(), count, &high), inverse = 1.0f / total;
    for (int64_t t = 0; t < count; t += W) store(weights.data() + t, load(weights.data() + t) * inverse);
    std::fill_n(key, D, 0.0f);
    std::fill_n(value, D, 0.0f);
    accumulate<D>(weights.data(), keys, listed.list.data(), count, key);
    accumulate<D>(weights.data(), values, listed.list.data(), count, value);
    keep_rest(p, h, count, key, value, mean, high, total[0], rest);
    std::fill_n(own, p.m, 0.0f);
    for (int64_t t = 0; t < count; ++t) own[listed.list[t]] = weights.data()[t];
  }
}

// Adds to the gradients of a head's keys and values what they receive from those of the rest's key, value and score in
// `grad`, and sets that of each of its queries. The rest is the last row of the packed keys and values.
template <int D>
void pool_backward(const Problem& p, const RestKeys& listed, const float* rest, const float* grad, const float* keys,
                   const float* values, float* sum_k, float* sum_v, float* of_query) {
  const int64_t d = p.query.d;
  const float *const key = rest, *const mean_query = rest + 2 * d + 1, *const own = mean_query + d;
  const float of_score = grad[2 * d];
  alignas(64) float of_key[D] = {}, of_value[D] = {}, mean[D] = {}, weights[BLOCK + W] = {};
  alignas(64) float products[BLOCK + W], others[BLOCK + W];
  std::fill_n(of_query, D, 0.0f);
  for (int64_t c = 0; c < d; ++c) {
    mean[c] = mean_query[c];
    of_key[c] = grad[c] - of_score * mean[c];
    of_value[c] = grad[d + c];
    of_query[c] = -of_score * key[c];
  }
  // Rounded like the products below, which are the same if there is a single key.
  const int32_t last = static_cast<int32_t>(p.m), lasts[4] = {last, last, last, last};
  dot<D>(of_key, keys, lasts, 1, 0, products);
  dot<D>(of_value, values, lasts, 1, 0, others);
  const float delta = products[0] + others[0];
  for (int64_t t = 0; t < listed.count; t += BLOCK) {
    const int64_t count = std::min(BLOCK, listed.count - t);
    const int32_t* const list = listed.list.data() + t;
    dot<D>(of_key, keys, list, count, 0, products);
    dot<D>(of_value, values, list, count, 0, others);
    for (int64_t e = 0; e < count; ++e) weights[e] = own[list[e]];
    for (int64_t e = 0; e < count; e += W) {
      const Vec product = load(products + e) + load(others + e) - delta;
      store(products + e, load(weights + e) * (product + of_score));
    }
    accumulate<D>(products, keys, list, count, of_query);
    scatter<D>(products, mean, list, count, sum_k);
    scatter<D>(weights, of_key, list, count, sum_k);
    scatter<D>(weights, of_value, list, count, sum_v);
  }
  for (int64_t c = 0; c < D; ++c) of_query[c] *= listed.factor;
}
