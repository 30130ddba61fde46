// The forward of attention under a mask in a Toeplitz form, W queries of a head at a time.
//
// Keys are packed transposed: a row of channel c holds that channel of all keys. The scores of W adjacent queries with
// the keys at one distance are then sums of products of adjacent numbers: no sum across a vector, and one list of
// distances for all queries. With blocks of tokens, the W queries share their keys instead. Values are packed as rows:
// W numbers that begin at a cache line are read twice as fast as W across two lines. The entries of the first and the
// last token are apart from both: their columns are read as keys that the queries share, their rows are computed on
// their own, unless they are like all others. The rest is one more key that the queries share.
//
// Letters: B batch, H heads, n queries (the last n of the m positions), m keys, d head size, W floats per vector.

#pragma once

#include <array>
#include <numeric>

#include "rest.h"

// Transposes rows i to i + count - 1 of a head, at most W: a row of `to` is a channel's. Rows that `skipped` tells of
// are read as 0.
template <class Format, int D, class Skipped>
inline void read_columns(const Rows& rows, int64_t b, int64_t h, int64_t i, int64_t count, Skipped&& skipped, float* to,
                         int64_t stride) {
  constexpr int64_t R = D / Format::size;
  alignas(64) float block[W * R];
  const float* from = block;
  int64_t from_stride = R;
  bool all = count == W;
  for (int64_t l = 0; l < count; ++l) all &= !skipped(l);
  // A copy of the rows would cost more than transposing them.
  if (all && Format::template is_packed<D>(rows)) {
    from = reinterpret_cast<const float*>(rows.row(b, h, i));
    from_stride = rows.stride_n / Format::size;
  } else {
    for (int64_t l = 0; l < W; ++l)
      if (l < count && !skipped(l)) Format::template read<D>(rows, b, h, i + l, block + l * R);
      else std::fill(block + l * R, block + (l + 1) * R, 0.0f);
  }
  for (int64_t c = 0; c < R; c += W) transpose(from + c, from_stride, to + c * stride, stride);
}

// The keys of a head, transposed. Column j is that of key j. Zeros are beyond both ends, so that W keys may be read of
// which but one is there, and in the place of keys that are padding, which may not be finite.
template <class Format, int D>
struct Columns {
  int64_t stride;  // an odd number of cache lines, since otherwise all channels of a key would use the same cache set
  Buffer numbers;

  explicit Columns(int64_t m) : stride(stride_of(m)), numbers(D / Format::size * stride) {}
  static int64_t stride_of(int64_t m) { return ((m + 3 * W + 15) / 16 | 1) * 16; }
  float* data() { return numbers.data() + W; }
  const float* data() const { return numbers.data() + W; }

  void pack(const Rows& rows, int64_t b, int64_t h, int64_t count, const float* bias) {
    for (int64_t j = 0; j < count + W; j += W)
      read_columns<Format, D>(
          rows, b, h, j, std::min(W, count - j), [&](int64_t l) { return bias[j + l] != 0; },
          numbers.data() + W + j, stride);
  }
};

// Where W queries find their keys: at `places` beyond a column, each its own (`SHIFTED`) or all the same.
template <bool SHIFTED>
inline Vec at(const float* place) {
  return SHIFTED ? load(place) : broadcast_bits(place);
}

// scores[t] += queries . keys at places[t], for C rows of channels
template <class Format, int64_t C, bool SHIFTED>
inline void add_scores(const Vec* queries, const float* keys, int64_t stride, const int32_t* places, int64_t count,
                       float* scores) {
  Vec q[C];  // in registers, even where the compiler makes this a function of its own
#pragma GCC unroll 16
  for (int64_t c = 0; c < C; ++c) q[c] = queries[c];
  for (int64_t t = 0; t < count; ++t) {
    Vec sum = load(scores + t * W);
    const float* key = keys + places[t];
#pragma GCC unroll 16
    for (int64_t c = 0; c < C; ++c) sum = Format::add_products(sum, q[c], at<SHIFTED>(key + c * stride));
    store(scores + t * W, sum);
  }
}

// sums += the values at `places` times the weights[t * W + l] of query l, for W queries. Destroys the weights.
template <class Format, int D, bool SHIFTED>
inline void add_values(float* weights, const float* values, const int32_t* places, int64_t count, float* sums) {
  constexpr int64_t size = Format::size, R = D / size;
  constexpr int64_t Q = std::min(W, 16 * W / D);  // queries whose sums fit the registers
  for (int64_t t = 0; size > 1 && t < count; t += size)
    store(weights + t / size * W,
          Format::weights(load(weights + t * W), t + 1 < count ? load(weights + (t + 1) * W) : Vec{}));
  for (int64_t l = 0; l < W; l += Q) {
    Vec sum[Q * D / W];
    for (int64_t k = 0; k < Q * D / W; ++k) sum[k] = load(sums + l * D + k * W);
    for (int64_t t = 0; t < count; t += size) {
      const float* const weight = weights + t / size * W + l;
      const float* const one = values + places[t] * R + (SHIFTED ? l * R : 0);
      const float* const other = values + places[std::min(t + size, count) - 1] * R + (SHIFTED ? l * R : 0);
#pragma GCC unroll 16
      for (int64_t k = 0; k < Q; ++k)
#pragma GCC unroll 16
        for (int64_t c = 0; c < R / W; ++c) {
          const Vec x = load(one + (SHIFTED ? k * R : 0) + c * W), y = load(other + (SHIFTED ? k * R : 0) + c * W);
          Format::add_rows(sum + k * D / W + c * size, broadcast_bits(weight + k), x, y);
        }
    }
    for (int64_t k = 0; k < Q * D / W; ++k) store(sums + l * D + k * W, sum[k]);
  }
}

// sums = the values of keys that W queries share times their weights; a weight of 0 hides its value.
template <class Format, int D>
inline void set_guarded(const float* weights, const float* values, const int32_t* places, int64_t count, float* sums) {
  constexpr int64_t size = Format::size, R = D / size;
  for (int64_t l = 0; l < W; ++l) {
    Vec sum[D / W] = {};
    for (int64_t t = 0; t < count; ++t) {
      if (weights[t * W + l] == 0) continue;
      for (int64_t c = 0; c < R / W; ++c)
        Format::add_rows(sum + c * size, Format::weights(broadcast(weights[t * W + l]), Vec{}),
                         load(values + places[t] * R + c * W), Vec{});
    }
    for (int64_t c = 0; c < D / W; ++c) store(sums + l * D + c * W, sum[c]);
  }
}

// scores[j] = query . key j for N W keys
template <class Format, int D, int64_t N>
inline void set_scores(const float* query, const float* keys, int64_t stride, float* scores) {
  Vec sums[N * Format::size] = {};
  for (int64_t c = 0; c < D / Format::size; ++c)
#pragma GCC unroll 4
    for (int64_t k = 0; k < N; ++k)
      Format::add_scaled(sums + k * Format::size, query + c * Format::size, load(keys + c * stride + k * W));
#pragma GCC unroll 4
  for (int64_t k = 0; k < N; ++k) store(scores + k * W, Format::sum(sums + k * Format::size));
}

// sum = sum_j weights[j] * key j for the first `count` keys, up to a multiple of W
template <class Format, int D>
inline void weighted_sum(const float* weights, const Columns<Format, D>& keys, int64_t count, float* sum) {
  constexpr int64_t V = W / Format::size;
  for (int64_t c = 0; c < D / Format::size; c += V) {
    Vec sums[W] = {}, part[W / 4];
    for (int64_t j = 0; j < count; j += W) {
      const Vec weight = load(weights + j);
#pragma GCC unroll 16
      for (int64_t k = 0; k < V; ++k)
        Format::add_weighted(sums + k * Format::size, weight, load(keys.data() + (c + k) * keys.stride + j));
    }
#pragma GCC unroll 4
    for (int64_t g = 0; g < W / 4; ++g) part[g] = sum_lanes(sums[4 * g], sums[4 * g + 1], sums[4 * g + 2], sums[4 * g + 3]);
    store(sum + c * Format::size, sum_across(part));
  }
}

// The softmax of W queries: turns their scores into numerators, rounded, and returns the inverse of the sums, 0 where
// all are LOW. REST: one more score follows, which counts as often as each query lacks one of `num_real` keys.
template <class Format, bool REST>
inline Vec softmax_numerators_of_each(float* scores, int64_t count, float scale, int64_t num_real) {
  Vec high = broadcast(LOW), total = {};
  for (int64_t t = 0; t < count + REST; ++t) {
    const Vec x = load(scores + t * W);
    high = x > high ? x : high;
  }
  IntVec removed = IntVec{} + static_cast<int32_t>(num_real - count);
  for (int64_t t = 0; t < count; ++t) {
    const Vec x = load(scores + t * W);
    const IntVec none = x == broadcast(LOW);
    const Vec p = none ? Vec{} : Format::rounded(Format::exponential((x - high) * scale));
    if (REST) removed -= none;
    total += p;
    store(scores + t * W, p);
  }
  if (REST) {
    const Vec x = load(scores + count * W);
    const Vec all = __builtin_convertvector(removed, Vec) * Format::exponential((x - high) * scale);
    const Vec p = removed == 0 ? Vec{} : Format::rounded(all);
    total += p;
    store(scores + count * W, p);
  }
  return total == 0.0f ? Vec{} : 1.0f / total;
}

// Memory of one thread, and what it computes with the keys of one head.
template <class Format, int D>
struct Toeplitz {
  static constexpr int64_t R = D / Format::size;
  static constexpr int64_t C = std::min<int64_t>(R, WIDTH == 16 ? 16 : 8);  // rows whose numbers fit the registers
  const Problem& p;
  const float query_scale, score_scale;  // one of both is the scale
  Columns<Format, D> keys;
  Buffer values;  // rows of the same numbers, with zeros like those of the keys
  Buffer biases, scores, queries, sums, parts, distances;
  std::vector<int32_t> steps;
  std::vector<float> pooled;  // what is kept of the rest of the head
  float* const bias;  // added to the scores of a key: 0, or LOW where it is no key or one of the special tokens
  const int32_t rest;  // the column of the rest, which no W keys reach that begin at one of the others
  Mask::Sequence s;

  explicit Toeplitz(const Problem& p)
      : p(p), query_scale(Format::size == 1 ? p.scale : 1.0f), score_scale(Format::size == 1 ? 1.0f : p.scale),
        keys(p.m), values((p.m + 3 * W) * R), biases(keys.stride), scores((p.m + 2 * W) * W), queries(R * W),
        sums(D * W), parts(D * W), distances(p.distances ? 2 * p.m + W : 0), steps(p.m / W + 1),
        pooled(p.rest ? p.rest_size() : 0), bias(biases.data() + W), rest(static_cast<int32_t>(p.m + W)) {
    for (size_t t = 0; t < steps.size(); ++t) steps[t] = static_cast<int32_t>(t * W);
  }

  float* value(int64_t j) { return values.data() + (j + W) * R; }
  bool has_all(int64_t r) const { return p.mask.rows && (r == s.first || r == s.last); }

  void pack(int64_t b, int64_t h) {
    s = p.mask.sequence(b);
    for (int64_t c = 0; p.distances && c < 2 * p.m - 1; ++c)
      distances.data()[c] = p.distances[h * (2 * p.m - 1) + c] / score_scale;
    std::fill(biases.data(), biases.data() + biases.size(), LOW);
    for (int64_t j = s.first_key; j < s.end_key; ++j) bias[j] = s.is_real(j) ? 0 : LOW;
    keys.pack(p.key, b, h, p.num_keys(b), bias);
    for (int64_t j = 0, count = p.num_keys(b); j < count + W; ++j)
      if (j < count && bias[j] == 0) Format::template read<D>(p.value, b, h, j, value(j));
      else std::fill_n(value(j), R, 0.0f);
    if (p.rest) {
      pool(b, h);
      set_rest(pooled.data(), keys.data() + rest, keys.stride);
      set_rest(pooled.data() + p.query.d, value(rest), 1);
    }
    set_special(LOW);
  }

  void pool(int64_t b, int64_t h) {
    const RestKeys listed(p, b);
    const int64_t count = p.num_keys(b);
    alignas(64) float mean[D], key[D], mean_value[D];
    float high = 0, *const weights = scores.data();
    mean_queries<D>(p, {b, h, h + 1}, listed, mean);
    int64_t j = 0;
    for (; j + 4 * W <= count; j += 4 * W) set_scores<Format, D, 4>(mean, keys.data() + j, keys.stride, weights + j);
    for (; j < count; j += W) set_scores<Format, D, 1>(mean, keys.data() + j, keys.stride, weights + j);
    if (p.rest_keys)
      for (j = 0; j < count; ++j) weights[j] = p.rest_keys[b * p.m + j] ? weights[j] : LOW;
    store(weights + count, broadcast(LOW));
    const Vec total = softmax_numerators(weights, count, &high), inverse = total == 0.0f ? Vec{} : 1.0f / total;
    for (j = 0; j < count; j += W) store(weights + j, load(weights + j) * inverse);
    weighted_sum<Format, D>(weights, keys, count, key);
    Vec sum[D / W] = {};
    for (j = 0; j < count; ++j)
      for (int64_t c = 0; c < R / W; ++c)
        Format::add_weighted(sum + c * Format::size, broadcast(weights[j]), load(value(j) + c * W));
    constexpr int64_t size = Format::size;
    for (int64_t c = 0; c < D; ++c) mean_value[c] = sum[c / (W * size) * size + c % size][c / size % W];
    keep_rest(p, h, listed.count, key, mean_value, mean, high, total[0], pooled.data());
    std::copy_n(weights, count, pooled.data() + 3 * p.query.d + 1);
  }

  float rest_score() const { return pooled[2 * p.query.d] / score_scale; }

  // output = sums in the order of channels, times a factor
  static void set_output(const float* sums, Vec factor, float* output) {
    Vec sum[D / W];
    read_vecs<D>(sums, sum);
    for (int64_t c = 0; c < D / W; c += Format::size) Format::sort(sum + c);
    for (int64_t c = 0; c < D / W; ++c) store(output + c * W, sum[c] * factor);
  }

  void set_rest(const float* row, float* to, int64_t stride) {
    float channels[D] = {};
    std::copy_n(row, p.query.d, channels);
    for (int64_t c = 0; c < R; ++c)
      to[c * stride] = Format::packed(channels + c * Format::size);
  }

  // Adds what depends on the distance of a key to the first scores of queries r to r + W - 1.
  template <bool SHIFTED>
  void add_distances(int64_t r, int64_t origin, const int32_t* places, int64_t count, float* to) {
    for (int64_t t = 0; t < count; ++t) {
      const float* const from = of_distance(r - origin - places[t]);
      store(to + t * W, load(to + t * W) + (SHIFTED ? broadcast(*from) : load(from)));
    }
  }
  float* of_distance(int64_t distance) { return distances.data() + distance + p.m - 1; }

  void set_special(float live) {
    for (const int64_t j : {s.first, s.last})
      if (j >= 0) bias[j] = live;
  }

  // Sets the first scores of keys that queries r to r + W - 1 share: LOW where they are not live.
  void begin_shared(int64_t r, const int32_t* places, int64_t origin, int64_t count, bool special, float* to) {
    alignas(64) int32_t lanes[W];
    std::iota(lanes, lanes + W, static_cast<int32_t>(r - origin));
    IntVec row;
    std::memcpy(&row, lanes, sizeof(row));
    const int32_t most = static_cast<int32_t>(p.mask.window >= 0 ? p.mask.window : p.m);
    for (int64_t t = 0; t < count; ++t) {
      const IntVec distance = row - places[t];
      Vec x = broadcast(special ? 0.0f : bias[origin + places[t]]);
      x = (distance > most) | (distance < (p.mask.causal ? 0 : -most)) ? broadcast(LOW) : x;
      if (!p.mask.self) x = distance == 0 ? broadcast(LOW) : x;
      store(to + t * W, x);
    }
  }

  // The first scores of the rest, for W queries of whose keys these are the first scores: LOW where they lack none.
  Vec begin_rest(const float* first, int64_t count) {
    const Vec score = broadcast(rest_score());
    if (count < s.num_real) return score;
    IntVec removed = IntVec{} + static_cast<int32_t>(s.num_real - count);
    for (int64_t t = 0; t < count; ++t) removed -= load(first + t * W) != 0.0f;
    return removed == 0 ? broadcast(LOW) : score;
  }

  // The outputs of queries r to r + W - 1, from `queries` to `sums`, transposed.
  template <bool SHIFTED>
  void attend(int64_t h, int64_t r) {
    const Mask& mask = p.mask;
    const int64_t stride = keys.stride, origin = r - r % mask.block, most = mask.window >= 0 ? mask.window : p.m;
    // The keys of the first of the queries, as far as one of all has such a key.
    const int64_t before = SHIFTED ? 0 : W - 1;
    const int64_t from = std::max(s.first_key - (W - 1 - before), r - most);
    const int64_t to = std::min({s.end_key, r + before + most + 1, mask.causal ? r + 1 : p.m});
    const int32_t *begin = mask.offsets + mask.begin[h], *end = mask.offsets + mask.end[h];
    begin = std::lower_bound(begin, end, from - origin);
    const int64_t listed = std::max<int64_t>(std::lower_bound(begin, end, to - origin) - begin, 0);
    int32_t special[3];
    int64_t specials = 0;
    if (s.first >= 0) special[specials++] = static_cast<int32_t>(s.first);
    if (s.last >= 0 && s.last != s.first) special[specials++] = static_cast<int32_t>(s.last);

    float *const own = scores.data(), *const shared = own + listed * W;
    if (SHIFTED)
      for (int64_t t = 0; t < listed; ++t) store(own + t * W, load(bias + r + begin[t]));
    else
      begin_shared(r, begin, origin, listed, false, own);
    begin_shared(r, special, 0, specials, true, shared);
    const int64_t count = listed + specials;
    const Vec of_rest = p.rest ? begin_rest(own, count) : Vec{};
    if (p.distances) {
      add_distances<SHIFTED>(r, origin, begin, listed, own);
      add_distances<false>(r, 0, special, specials, shared);
    }
    if (p.rest) {
      store(shared + specials * W, of_rest);
      special[specials++] = rest;
    }
    for (int64_t c = 0; c < R; c += C) {
      Vec q[C];
#pragma GCC unroll 16
      for (int64_t k = 0; k < C; ++k) q[k] = Format::scaled(load(queries.data() + (c + k) * W), query_scale);
      const float* key = keys.data() + c * stride;
      add_scores<Format, C, SHIFTED>(q, key + origin, stride, begin, listed, own);
      add_scores<Format, C, false>(q, key, stride, special, specials, shared);
    }
    const Vec inverse = p.rest ? softmax_numerators_of_each<Format, true>(own, count, score_scale, s.num_real)
                               : softmax_numerators_of_each<Format, false>(own, count, score_scale, s.num_real);
    set_guarded<Format, D>(shared, value(0), special, specials, sums.data());
    add_values<Format, D, SHIFTED>(own, value(origin), begin, listed, sums.data());
    for (int64_t l = 0; l < W; ++l) set_output(sums.data() + l * D, broadcast(inverse[l]), sums.data() + l * D);
  }

  // The output of query r = first_row + i that attends to all keys.
  void attend_to_all(int64_t b, int64_t h, int64_t i, float* output) {
    const Mask& mask = p.mask;
    const int64_t stride = keys.stride, r = mask.first_row + i, most = mask.window >= 0 ? mask.window : p.m;
    const int64_t from = std::max(s.first_key, r - most), to = std::min(mask.causal ? r + 1 : s.end_key, r + most + 1);
    alignas(64) float query[R];
    std::array<float, R> hidden{};
    Format::template read<D>(p.query, b, h, i, query);
    set_special(0);
    if (!mask.self) bias[r] = LOW;
    // In the place of W queries is this one, and each vector holds its scores with W keys. The rest, which stands for
    // its own key, is alone in a vector before them.
    const int64_t vectors = (to - from + W - 1) / W, others = p.rest && !mask.self ? W : 0;
    float* const own = scores.data() + others;
    for (int64_t t = 0; t < vectors; ++t) store(own + t * W, load(bias + from + t * W));
    set_special(LOW);
    for (int64_t j = from; p.distances && j < to; ++j) own[j - from] += *of_distance(r - j);
    if (others) {
      store(scores.data(), broadcast(LOW));
      scores.data()[0] = rest_score();
    }
    for (int64_t c = 0; c < R; c += C) {
      Vec q[C];
      for (int64_t k = 0; k < C; ++k) q[k] = Format::scaled(broadcast_bits(query + c + k), query_scale);
      add_scores<Format, C, true>(q, keys.data() + c * stride + from, stride, steps.data(), vectors, own);
      if (others) add_scores<Format, C, false>(q, keys.data() + c * stride, stride, &rest, 1, scores.data());
    }
    store(own + to - from, broadcast(LOW));
    const int64_t count = others + to - from;
    for (int64_t t = 0; t < count; t += W) store(scores.data() + t, load(scores.data() + t) * score_scale);
    const Vec total = softmax_numerators(scores.data(), count);
    const Vec inverse = total == 0.0f ? Vec{} : 1.0f / total;
    set_guarded<Format, D>(scores.data(), value(0), &rest, others ? 1 : 0, parts.data());
    // A weight of 0 would not hide its own value.
    if (!mask.self) std::swap_ranges(value(r), value(r) + R, hidden.data());
    add_values<Format, D, true>(own, value(from), steps.data(), vectors, parts.data());
    if (!mask.self) std::swap_ranges(value(r), value(r) + R, hidden.data());
    for (int64_t c = D; c < W * D; ++c) parts.data()[c % D] += parts.data()[c];
    set_output(parts.data(), inverse, output);
  }

  // The outputs of queries i to i + count - 1, at most W.
  void run(int64_t b, int64_t h, int64_t i, int64_t count, const Rows& output) {
    const int64_t r = p.mask.first_row + i;
    bool any = false;
    for (int64_t l = 0; l < count; ++l) any |= s.is_real(r + l);
    if (any) {
      read_columns<Format, D>(p.query, b, h, i, count, [](int64_t) { return false; }, queries.data(), W);
      if (p.mask.block == 1) attend<true>(h, r);
      else attend<false>(h, r);
    }
    for (int64_t l = 0; l < count; ++l) {
      float* const row = sums.data() + l * D;
      if (!s.is_real(r + l)) std::fill(row, row + D, 0.0f);
      else if (has_all(r + l)) attend_to_all(b, h, i + l, row);
      output.write<D>(b, h, i + l, row);
    }
  }
};

// Whether this kernel serves a mask, and is not slower than one query at a time, as it is for few keys.
inline bool is_toeplitz(const Problem& p) {
  const Mask& mask = p.mask;
  return mask.block && p.m >= 64 && p.m <= mask.known && p.dropout.probability == 0 &&
         (mask.block == 1 || (mask.block % W == 0 && mask.first_row % W == 0 && !mask.keep_self && !mask.causal));
}

template <class Format, int D>
void toeplitz_forward(const Problem& p, const Rows& output) {
  p.for_each_range([&](int64_t from, int64_t to) {
    Toeplitz<Format, D> kernel(p);
    int64_t packed = -1;
    for (int64_t number = from; number < to; ++number) {
      const auto task = p.task(number);
      if (task.first_row >= task.end_row) continue;  // a chunk beyond the end of a packed sequence
      for (int64_t h = task.first_head; h < task.end_head; ++h) {
        if (packed != task.b * p.H + h) kernel.pack(task.b, h);
        packed = task.b * p.H + h;
        if (p.rest && task.chunk == 0) std::copy(kernel.pooled.begin(), kernel.pooled.end(), p.rest_of(task.b, h));
        for (int64_t i = task.first_row; i < task.end_row; i += W)
          kernel.run(task.b, h, i, std::min(W, task.end_row - i), output);
      }
    }
  });
}
