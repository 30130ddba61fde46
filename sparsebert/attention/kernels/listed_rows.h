// Products and sums of rows of D floats at the places of a list, which has three more entries than it counts so that
// keys can be read four at a time, and the softmax of their scores.
//
// Letters: D floats per row, W floats per vector.

#pragma once

#include <algorithm>
#include <limits>

#include "vectors.h"

constexpr float LOW = -std::numeric_limits<float>::infinity();

template <int D>
inline void read_vecs(const float* from, Vec* to) {
  for (int64_t c = 0; c < D / W; ++c) to[c] = load(from + c * W);
}

// The products of a query with four rows, as sum_lanes returns them.
template <int D>
inline Vec four_products(const Vec* q, const float* rows, const int32_t* keys) {
  const float *a = rows + keys[0] * D, *b = rows + keys[1] * D, *c = rows + keys[2] * D, *d = rows + keys[3] * D;
  Vec x = q[0] * load(a), y = q[0] * load(b), z = q[0] * load(c), w = q[0] * load(d);
#pragma GCC unroll 64
  for (int64_t i = 1; i < D / W; ++i) {
    x += q[i] * load(a + i * W);
    y += q[i] * load(b + i * W);
    z += q[i] * load(c + i * W);
    w += q[i] * load(d + i * W);
  }
  return sum_lanes(x, y, z, w);
}

// scores[t] = q . rows[keys[t]], and W times `beyond` from scores[count] on: here, long before they are read, since a
// vector that was stored in pieces a moment ago is slow to load.
template <int D>
inline void dot(const float* query, const float* rows, const int32_t* keys, int64_t count, float beyond, float* scores) {
  Vec q[D / W];
  read_vecs<D>(query, q);
  int64_t t = 0;
  for (; t + W <= count; t += W) {
    Vec part[W / 4];
#pragma GCC unroll 4
    for (int64_t g = 0; g < W / 4; ++g) part[g] = four_products<D>(q, rows, keys + t + 4 * g);
    store(scores + t, sum_across(part));
  }
  for (; t < count; t += 4) store_sums(scores + t, four_products<D>(q, rows, keys + t));
  store(scores + count, broadcast(beyond));
}

// sum += sum_t weights[t] * rows[keys[t]]
template <int D>
inline void accumulate(const float* weights, const float* rows, const int32_t* keys, int64_t count, float* sum) {
  // Eight sums at a time: enough to hide the latency of an addition, few enough for 16 registers.
  constexpr int64_t C = std::min<int64_t>(D / W, 8), ways = 8 / C;
  for (int64_t first = 0; first < D; first += C * W) {
    Vec sums[ways][C] = {};
#pragma GCC unroll 8
    for (int64_t c = 0; c < C; ++c) sums[0][c] = load(sum + first + c * W);
    auto add = [&](int64_t t, Vec* to) {
      const float* row = rows + keys[t] * D + first;
      const Vec weight = broadcast(weights[t]);
#pragma GCC unroll 8
      for (int64_t c = 0; c < C; ++c) to[c] += weight * load(row + c * W);
    };
    int64_t t = 0;
    for (; t + ways <= count; t += ways) {
#pragma GCC unroll 8
      for (int64_t way = 0; way < ways; ++way) add(t + way, sums[way]);
    }
    for (; t < count; ++t) add(t, sums[0]);
#pragma GCC unroll 8
    for (int64_t c = 0; c < C; ++c) {
      for (int64_t way = 1; way < ways; ++way) sums[0][c] += sums[way][c];
      store(sum + first + c * W, sums[0][c]);
    }
  }
}

// rows[keys[t]] += weights[t] * q
template <int D>
inline void scatter(const float* weights, const float* query, const int32_t* keys, int64_t count, float* rows) {
  Vec q[D / W];
  read_vecs<D>(query, q);
  for (int64_t t = 0; t < count; ++t) {
    float* to = rows + keys[t] * D;
    const Vec weight = broadcast(weights[t]);
#pragma GCC unroll 16
    for (int64_t c = 0; c < D / W; ++c) store(to + c * W, load(to + c * W) + weight * q[c]);
  }
}

// Replaces scores by exp(scores - max) and returns their sum, in every place of a vector. Entries from count to the
// next multiple of W, which are LOW, become 0. `highest` becomes max.
inline Vec softmax_numerators(float* scores, int64_t count, float* highest = nullptr) {
  Vec high = broadcast(LOW);
  for (int64_t t = 0; t < count; t += W) {
    Vec x = load(scores + t);
    high = x > high ? x : high;
  }
  const Vec max = max_of(high), none = broadcast(LOW);
  if (highest) *highest = max[0];
  Vec total = {};
  for (int64_t t = 0; t < count; t += W) {
    Vec x = load(scores + t);
    Vec p = exponential(x - max);
    p = x == none ? Vec{} : p;
    total += p;
    store(scores + t, p);
  }
  return sum_of(total);
}
