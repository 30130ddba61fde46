// Attention under a mask in compressed rows (CSR), or in a Toeplitz form by its offsets, forward and backward, for CPUs.
//
// The work is split into tasks by batch and head and, if there are few of them, by rows. A task first packs the keys
// and values of its heads into contiguous float32 rows of D >= d numbers: in the host's layout, rows are H * d apart
// and would compete for the same cache sets. It then processes one query at a time: the list of live keys, their
// scores, the softmax, the sum of values. The rest is one more row of keys and values. All arithmetic is in float32.
// Packed sequences lie one after the other in one row of tokens; each is computed at its own length. What toeplitz.h
// serves, it computes instead.
//
// Letters: B batch, H heads, n queries (the last n of the m positions), m keys, d head size, W floats per vector.

#include <cmath>
#include <stdexcept>
#include <type_traits>

#include "rest.h"
#include "sleeping_threads.h"
#include "toeplitz.h"

namespace {

// Packs the keys and values of a task's heads, and the rests that the forward found as their last rows.
template <int D>
void read_keys(const Problem& p, const Problem::Task& task, float* keys, float* values) {
  read_rows<D>(p.key, task, 0, p.num_keys(task.b), keys, p.key_rows());
  read_rows<D>(p.value, task, 0, p.num_keys(task.b), values, p.key_rows());
  for (int64_t h = task.first_head; p.rest && h < task.end_head; ++h) {
    const int64_t row = (h - task.first_head) * head_stride(p.key_rows(), D) + p.m * D;
    std::copy_n(p.rest_of(task.b, h), p.query.d, keys + row);
    std::copy_n(p.rest_of(task.b, h) + p.query.d, p.query.d, values + row);
  }
}

// Adds what depends on the distance to the scores of row r and its keys.
inline void add_distances(const Problem& p, int64_t h, int64_t r, const int32_t* keys, int64_t count, float* scores) {
  const float* const from = p.distances + p.distances_from(h, r);
  for (int64_t t = 0; t < count; ++t) scores[t] += from[-keys[t]];
}

template <int D>
void forward_kernel(const Problem& p, const Rows& output) {
  p.for_each_range([&](int64_t from, int64_t to) {
    const int64_t key_stride = head_stride(p.key_rows(), D), query_stride = head_stride(BLOCK, D);
    Buffer keys(p.group * key_stride), values(keys.size()), queries(p.group * query_stride), sums(queries.size());
    Lists lists(p.m);
    Buffer scores(BLOCK * lists.size), factors(scores.size()), rests(p.rest ? p.group * p.rest_size() : 0);
    Vec inverse[BLOCK];  // of the sums of a query's numerators
    int64_t packed = -1;
    for (int64_t number = from; number < to; ++number) {
      const auto task = p.task(number);
      if (task.first_row >= task.end_row) continue;  // a chunk beyond the end of a packed sequence
      const auto sequence = p.mask.sequence(task.b);
      if (packed != number / p.chunks) {
        packed = number / p.chunks;
        read_rows<D>(p.key, task, 0, p.num_keys(task.b), keys.data(), p.key_rows());
        read_rows<D>(p.value, task, 0, p.num_keys(task.b), values.data(), p.key_rows());
        if (p.rest) pool<D>(p, task, keys.data(), values.data(), rests.data());
        if (p.rest && task.chunk == 0)
          std::copy_n(rests.data(), (task.end_head - task.first_head) * p.rest_size(), p.rest_of(task.b, task.first_head));
      }
      for (int64_t first = task.first_row; first < task.end_row; first += BLOCK) {
        const int64_t rows = std::min(BLOCK, task.end_row - first);
        read_rows<D>(p.query, task, first, first + rows, queries.data(), BLOCK, p.scale);
        std::fill(sums.data(), sums.data() + sums.size(), 0.0f);
        for (int64_t h = task.first_head; h < task.end_head; ++h) {
          const float* q = queries.data() + (h - task.first_head) * query_stride;
          const float* k = keys.data() + (h - task.first_head) * key_stride;
          const float* v = values.data() + (h - task.first_head) * key_stride;
          float* sum = sums.data() + (h - task.first_head) * query_stride;
          const float rest_score = p.rest ? rests.data()[(h - task.first_head) * p.rest_size() + 2 * p.query.d] : 0;
          lists.find(p.mask, sequence, h, first, rows, p.rest);
          for (int64_t r = 0; r < rows; ++r) {
            float* score = scores.data() + r * lists.size;
            dot<D>(q + r * D, k, lists.of(r), lists.count[r], LOW, score);
            if (lists.removed[r]) score[lists.count[r] - 1] += p.logs[lists.removed[r]] + rest_score;
          }
          for (int64_t r = 0; p.distances && r < rows; ++r)
            add_distances(p, h, p.mask.first_row + first + r, lists.of(r), lists.listed(r), scores.data() + r * lists.size);
          if (p.dropout.probability > 0) p.dropout.draw(lists, first, rows, task.b * p.H + h, factors.data());
          for (int64_t r = 0; r < rows; ++r) {
            if (lists.count[r] == 0) continue;
            float* weights = scores.data() + r * lists.size;
            inverse[r] = 1.0f / softmax_numerators(weights, lists.count[r]);
            if (p.dropout.probability > 0) {
              const float* factor = factors.data() + r * lists.size;
              for (int64_t t = 0; t < lists.count[r]; t += W) store(weights + t, load(weights + t) * load(factor + t));
            }
          }
          for (int64_t r = 0; r < rows; ++r)
            accumulate<D>(scores.data() + r * lists.size, v, lists.of(r), lists.count[r], sum + r * D);
          for (int64_t r = 0; r < rows; ++r)
            if (lists.count[r])
              for (int64_t c = 0; c < D; c += W) store(sum + r * D + c, load(sum + r * D + c) * inverse[r]);
        }
        write_rows<D>(output, task, first, first + rows, sums.data(), BLOCK);
      }
    }
  });
}

template <int D>
void backward_kernel(const Problem& p, const Rows& grad, const Rows& dq, const Rows& dk, const Rows& dv,
                     float* grad_rest, float* grad_distances) {
  // Every chunk of rows has its own sums of dK and dV, which are added up afterwards: no races, and a fixed order.
  const int64_t key_rows = p.key_rows(), key_stride = head_stride(key_rows, D), query_stride = head_stride(BLOCK, D);
  const int64_t size = p.group * key_stride, blocks = (p.n + BLOCK - 1) / BLOCK;
  std::vector<float> partial(p.chunks > 1 ? p.B * p.groups * p.chunks * size * 2 : 0);
  const int64_t d = p.query.d, all_distances = p.H * (2 * p.m - 1);
  std::vector<float> of_distances(grad_distances ? p.B * p.chunks * all_distances : 0);
  std::vector<float> of_blocks(p.rest ? p.B * p.H * blocks : 0);  // gradients of the rest's score, by block of queries
  std::vector<float> of_rests(p.rest ? p.B * p.H * (2 * d + 1) : 0);  // of the rest's key, value and score
  const auto set_of_rest = [&](int64_t b, int64_t h, const float* of_key, const float* of_value) {
    const int64_t head = b * p.H + h;
    const float* const from = of_blocks.data() + head * blocks;
    float* const to = of_rests.data() + head * (2 * d + 1);
    std::copy_n(of_value, d, std::copy_n(of_key, d, to));
    grad_rest[head] = to[2 * d] = std::accumulate(from, from + blocks, 0.0f);
    return to;
  };
  p.for_each_range([&](int64_t from, int64_t to) {
    Buffer keys(size), values(size), queries(p.group * query_stride), grads(queries.size()), sums(queries.size());
    Lists lists(p.m);
    Buffer weights(BLOCK * lists.size), others(weights.size()), factors(weights.size()), own(p.chunks > 1 ? 0 : 2 * size);
    std::fill(factors.data(), factors.data() + factors.size(), 1.0f);
    alignas(64) float of_query[D];
    int64_t packed = -1;
    for (int64_t number = from; number < to; ++number) {
      const auto task = p.task(number);
      if (task.first_row >= task.end_row) continue;  // a chunk beyond the end of a packed sequence
      const auto sequence = p.mask.sequence(task.b);
      if (packed != number / p.chunks) {
        packed = number / p.chunks;
        read_keys<D>(p, task, keys.data(), values.data());
      }
      float* const sum_k = p.chunks > 1 ? partial.data() + number * size * 2 : own.data();
      float* const sum_v = sum_k + size;
      if (p.chunks == 1) std::fill(sum_k, sum_k + 2 * size, 0.0f);
      for (int64_t first = task.first_row; first < task.end_row; first += BLOCK) {
        const int64_t rows = std::min(BLOCK, task.end_row - first);
        read_rows<D>(p.query, task, first, first + rows, queries.data(), BLOCK, p.scale);
        read_rows<D>(grad, task, first, first + rows, grads.data(), BLOCK);
        std::fill(sums.data(), sums.data() + sums.size(), 0.0f);
        for (int64_t h = task.first_head; h < task.end_head; ++h) {
          const float* q = queries.data() + (h - task.first_head) * query_stride;
          const float* g = grads.data() + (h - task.first_head) * query_stride;
          float* sum = sums.data() + (h - task.first_head) * query_stride;
          const int64_t head = (h - task.first_head) * key_stride;
          const int64_t block = (task.b * p.H + h) * blocks + first / BLOCK;

          const float rest_score = p.rest ? p.rest_of(task.b, h)[2 * p.query.d] : 0;
          lists.find(p.mask, sequence, h, first, rows, p.rest);
          for (int64_t r = 0; r < rows; ++r) {
            float* weight = weights.data() + r * lists.size;
            dot<D>(q + r * D, keys.data() + head, lists.of(r), lists.count[r], LOW, weight);
            if (lists.removed[r]) weight[lists.count[r] - 1] += p.logs[lists.removed[r]] + rest_score;
          }
          for (int64_t r = 0; p.distances && r < rows; ++r)
            add_distances(p, h, p.mask.first_row + first + r, lists.of(r), lists.listed(r), weights.data() + r * lists.size);
          for (int64_t r = 0; r < rows; ++r)
            dot<D>(g + r * D, values.data() + head, lists.of(r), lists.count[r], 0, others.data() + r * lists.size);
          if (p.dropout.probability > 0) p.dropout.draw(lists, first, rows, task.b * p.H + h, factors.data());
          for (int64_t r = 0; r < rows; ++r) {
            const int64_t count = lists.count[r];
            if (count == 0) continue;
            float *weight = weights.data() + r * lists.size, *other = others.data() + r * lists.size;
            const float* factor = factors.data() + r * lists.size;
            const Vec total = 1.0f / softmax_numerators(weight, count);
            // Turn weight into P after dropout, for dV, and other into dS = P (dP - delta) with delta = sum(P dP).
            Vec delta = {};
            for (int64_t t = 0; t < count; t += W) {
              const Vec dp = load(other + t) * load(factor + t);
              delta += load(weight + t) * dp;
              store(other + t, dp);
            }
            const Vec d = sum_of(delta) * total;
            for (int64_t t = 0; t < count; t += W) {
              const Vec probability = load(weight + t) * total;
              store(other + t, probability * (load(other + t) - d));
              store(weight + t, probability * load(factor + t));
            }
          }
          for (int64_t r = 0; grad_distances && r < rows; ++r) {
            float* const to = of_distances.data() + (task.b * p.chunks + task.chunk) * p.H * (2 * p.m - 1) +
                              p.distances_from(h, p.mask.first_row + first + r);
            for (int64_t t = 0; t < lists.listed(r); ++t) to[-lists.of(r)[t]] += others.data()[r * lists.size + t];
          }
          for (int64_t r = 0; r < rows; ++r)
            if (lists.removed[r]) of_blocks[block] += others.data()[r * lists.size + lists.count[r] - 1];
          for (int64_t r = 0; r < rows; ++r)
            accumulate<D>(others.data() + r * lists.size, keys.data() + head, lists.of(r), lists.count[r], sum + r * D);
          for (int64_t r = 0; r < rows; ++r)
            scatter<D>(others.data() + r * lists.size, q + r * D, lists.of(r), lists.count[r], sum_k + head);
          for (int64_t r = 0; r < rows; ++r)
            scatter<D>(weights.data() + r * lists.size, g + r * D, lists.of(r), lists.count[r], sum_v + head);
        }
        for (int64_t c = 0; c < sums.size(); ++c) sums.data()[c] *= p.scale;
        write_rows<D>(dq, task, first, first + rows, sums.data(), BLOCK);
      }
      if (p.chunks == 1) {
        if (p.rest) {
          const RestKeys listed(p, task.b);
          for (int64_t h = task.first_head; h < task.end_head; ++h) {
            const int64_t head = (h - task.first_head) * key_stride, row = head + p.m * D;
            const float* const of_rest = set_of_rest(task.b, h, sum_k + row, sum_v + row);
            pool_backward<D>(p, listed, p.rest_of(task.b, h), of_rest, keys.data() + head, values.data() + head,
                             sum_k + head, sum_v + head, of_query);
            listed.for_each_query(p, 0, listed.count, [&](int64_t i) { dq.add<D>(task.b, h, i, of_query); });
          }
        }
        write_rows<D>(dk, task, 0, p.num_keys(task.b), sum_k, key_rows);
        write_rows<D>(dv, task, 0, p.num_keys(task.b), sum_v, key_rows);
      }
    }
  });
  for (int64_t from = 0; from < static_cast<int64_t>(of_distances.size()); from += all_distances)
    for (int64_t c = 0; c < all_distances; ++c) grad_distances[c] += of_distances[from + c];
  if (p.chunks == 1) return;
  parallel(p.parallel_for, p.B * p.H * key_rows, 64, [&](int64_t from, int64_t to) {
    for (int64_t item = from; item < to; ++item) {
      const int64_t head = item / key_rows, b = head / p.H, h = head % p.H, j = item % key_rows;
      if (j >= p.num_keys(b) && j < p.m) continue;
      float sums[2][D] = {};
      for (int64_t chunk = 0; chunk < p.chunks; ++chunk) {
        const int64_t number = (b * p.groups + h / p.group) * p.chunks + chunk;
        for (int64_t which = 0; which < 2; ++which) {
          const float* part = partial.data() + (number * 2 + which) * size + h % p.group * key_stride + j * D;
          for (int64_t c = 0; c < D; ++c) sums[which][c] += part[c];
        }
      }
      if (j == p.m) {
        set_of_rest(b, h, sums[0], sums[1]);
      } else {
        dk.write<D>(b, h, j, sums[0]);
        dv.write<D>(b, h, j, sums[1]);
      }
    }
  });
  if (!p.rest) return;
  parallel(p.parallel_for, p.B * p.H, 1, [&](int64_t from, int64_t to) {
    Buffer keys(key_stride), values(key_stride);
    for (int64_t head = from; head < to; ++head) {
      const int64_t b = head / p.H, h = head % p.H;
      const RestKeys listed(p, b);
      Buffer sum_k(key_stride), sum_v(key_stride);
      alignas(64) float of_query[D];
      read_keys<D>(p, {b, h, h + 1}, keys.data(), values.data());
      pool_backward<D>(p, listed, p.rest_of(b, h), of_rests.data() + head * (2 * d + 1), keys.data(), values.data(),
                       sum_k.data(), sum_v.data(), of_query);
      for (int64_t t = 0; t < listed.count; ++t) {
        dk.add<D>(b, h, listed.list[t], sum_k.data() + listed.list[t] * D);
        dv.add<D>(b, h, listed.list[t], sum_v.data() + listed.list[t] * D);
      }
      listed.for_each_query(p, 0, listed.count, [&](int64_t i) { dq.add<D>(b, h, i, of_query); });
    }
  });
}

template <class Function>
void for_head_size(int64_t d, Function&& function) {
  if (d <= 16) function(std::integral_constant<int, 16>{});
  else if (d <= 32) function(std::integral_constant<int, 32>{});
  else if (d <= 64) function(std::integral_constant<int, 64>{});
  else if (d <= 128) function(std::integral_constant<int, 128>{});
  else function(std::integral_constant<int, 256>{});
}

void check_place(const Arguments& a, int64_t b, int64_t length) {
  if (a.starts[b] < 0 || a.starts[b] + length > a.tokens)
    throw std::out_of_range("a packed sequence is not among the tokens");
}

Problem problem(const Arguments& a, int64_t buffers) {
  Mask mask{a.begin, a.end, a.block ? nullptr : static_cast<const uint16_t*>(a.columns),
            a.block ? static_cast<const int32_t*>(a.columns) : nullptr, a.block, a.known, a.padding, a.last, a.mask_rows,
            a.m, a.m - a.n, a.first != 0, a.special_rows != 0, a.self != 0, a.keep_self != 0, a.causal != 0, a.window};
  // At least two tasks per thread, split by heads first and then by rows. Fewer than 64 rows are not worth packing the
  // keys.
  const int64_t floats = buffers * a.m * std::max<int64_t>(a.d, 16);
  const int64_t wanted = (2 * a.threads + a.B - 1) / a.B;
  const int64_t group = std::max<int64_t>(1, std::min((1 << 18) / floats, a.H / std::min(a.H, wanted)));
  const int64_t groups = (a.H + group - 1) / group;
  // In the backward, the chunks' own sums (buffers 3 and 4) may take at most 256 MiB.
  const int64_t sums = buffers > 2 ? (int64_t{1} << 27) / (a.B * a.H * floats) : a.n;
  const int64_t chunks = std::max<int64_t>(1, std::min({(wanted + groups - 1) / groups, a.n / 64, sums}));
  // A multiple of BLOCK, so that the random numbers do not depend on the number of threads.
  const int64_t rows = ((a.n + chunks - 1) / chunks + BLOCK - 1) / BLOCK * BLOCK;
  std::vector<int64_t> lengths(a.starts ? a.B : 0);
  for (size_t b = 0; b < lengths.size(); ++b) {
    lengths[b] = mask.sequence(b).end_key;
    check_place(a, b, lengths[b]);
  }
  std::vector<float> logs(a.rest_bias ? a.m + 1 : 0);
  for (size_t count = 0; count < logs.size(); ++count) logs[count] = std::log(static_cast<float>(count));
  return Problem{Rows(a.query, a), Rows(a.key, a), Rows(a.value, a), mask,
                 Dropout{static_cast<float>(a.dropout), static_cast<uint64_t>(a.seed)}, static_cast<float>(a.scale),
                 a.B, a.H, a.n, a.m, group, rows, groups, std::max<int64_t>(1, (a.n + rows - 1) / rows), a.starts,
                 std::move(lengths), a.rest_bias ? a.rest : nullptr, a.rest_bias,
                 a.rest_keys ? a.rest_keys : a.padding, std::move(logs), a.distances, a.parallel_for};
}

// The rows of a result, (B, H, rows, d) in the memory order (B, rows, H, d). Tokens that belong to no packed sequence
// are 0.
Rows results(const Array& array, const Arguments& a, const std::vector<int64_t>& lengths) {
  const Rows rows(array, a);
  if (a.starts && std::accumulate(lengths.begin(), lengths.end(), int64_t{0}) < a.tokens)
    std::memset(array.data, 0, a.tokens * a.H * a.d * rows.itemsize);
  return rows;
}

// Calls function and returns null, or what was wrong.
template <class Function>
const char* message(Function&& function) {
  try {
    function();
  } catch (const std::out_of_range&) {
    return "a packed sequence is not among the tokens";
  } catch (...) {
    return "out of memory";
  }
  return nullptr;
}

// Of the call that this thread is in.
thread_local int64_t num_threads = 1;

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

// A `ParallelFor` on threads that sleep between loops, as many as the arguments of the call say.
EXPORTED int32_t sleeping_parallel_for(int64_t begin, int64_t end, int64_t, SleepingThreads::Function function,
                                       void* context) {
  SleepingThreads::loop(begin, end, num_threads, function, context);
  return 0;
}

EXPORTED const char* csr_attention(const Arguments* arguments) {
  const auto& a = *arguments;
  num_threads = a.threads;
  return message([&] {
    const auto p = problem(a, 2);
    const auto output = results(a.output, a, p.lengths);
    const bool toeplitz = is_toeplitz(p);
#if defined(__AVX512BF16__)
    if (toeplitz && a.dtype == BFLOAT16 && a.scale > 0)
      return for_head_size(a.d, [&](auto D) { toeplitz_forward<Pairs, std::max<int>(D, 2 * W)>(p, output); });
#endif
    for_head_size(a.d, [&](auto D) {
      // Reading W numbers across two cache lines takes twice as long, which cancels the gain for large heads.
      if constexpr (W == 16)
        if (toeplitz && (D <= 32 || a.block > 1)) return toeplitz_forward<Singles, D>(p, output);
      forward_kernel<D>(p, output);
    });
  });
}

EXPORTED const char* csr_attention_backward(const Arguments* arguments) {
  const auto& a = *arguments;
  num_threads = a.threads;
  return message([&] {
    const auto p = problem(a, 4);
    const Rows grad(a.output, a);
    const auto& lengths = p.lengths;
    const auto dq = results(a.grad_query, a, lengths), dk = results(a.grad_key, a, lengths),
               dv = results(a.grad_value, a, lengths);
    for_head_size(a.d, [&](auto D) { backward_kernel<D>(p, grad, dq, dk, dv, a.grad_rest, a.grad_distances); });
  });
}
