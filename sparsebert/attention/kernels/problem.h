// How the work of the CSR kernels is split into tasks, and how a task copies rows of its heads.
//
// Letters: B batch, H heads, n queries (the last n of the m positions), m keys, d head size.

#pragma once

#include "csr_inputs.h"

// An array of floats that starts at a cache line.
class Buffer {
 public:
  explicit Buffer(int64_t size) : memory_(size + 16) {
    const auto address = reinterpret_cast<uintptr_t>(memory_.data());
    start_ = memory_.data() + (64 - address % 64) % 64 / 4;
  }
  float* data() { return start_; }
  const float* data() const { return start_; }
  int64_t size() const { return static_cast<int64_t>(memory_.size()) - 16; }

 private:
  std::vector<float> memory_;
  float* start_;
};

struct Problem {
  Rows query, key, value;
  Mask mask;
  Dropout dropout;
  float scale;
  int64_t B, H, n, m;
  int64_t group;           // heads per task, whose keys and values fit the second-level cache together
  int64_t rows;            // queries per task
  int64_t groups, chunks;  // groups of heads and chunks of queries per sequence; a task is one of each
  const int64_t* starts;   // first token of each packed sequence; null if they are not packed
  std::vector<int64_t> lengths;  // of the packed sequences
  // The rest of each sequence and head: a key and its value for every query that lacks real keys, a number that is added
  // to its score, and so is the logarithm of the number of keys that the query lacks, and for the backward what it was
  // pooled with: the mean query times `scale`, and the weights of the keys. (B, H, 3 d + 1 + m), null if there is none.
  float* rest;
  const float* rest_bias;   // (H,), a part of the number that is added
  const bool* rest_keys;    // (B, m), true = a key that the rest stands for; null if all are
  std::vector<float> logs;  // of 0 to m
  const float* distances;   // (H, 2 m - 1), added to the scores of row r and key j: column r - j + m - 1; null for none
  ParallelFor parallel_for;

  // Column r + m - 1 of a head, from which that of key j is at -j.
  int64_t distances_from(int64_t h, int64_t r) const { return h * (2 * m - 1) + r + m - 1; }
  int64_t rest_size() const { return 3 * query.d + 1 + m; }
  float* rest_of(int64_t b, int64_t h) const { return rest + (b * H + h) * rest_size(); }
  int64_t key_rows() const { return m + (rest != nullptr); }  // of packed keys or values; the last is the rest's
  int64_t num_keys(int64_t b) const { return starts ? lengths[b] : m; }
  struct Task {
    int64_t b, first_head, end_head, chunk = 0, first_row = 0, end_row = 0;
  };
  Task task(int64_t number) const {
    const int64_t b = number / chunks / groups, g = number / chunks % groups, chunk = number % chunks;
    return {b,     g * group,    std::min(H, (g + 1) * group),
            chunk, chunk * rows, std::min(starts ? lengths[b] : n, (chunk + 1) * rows)};
  }
  template <class Function>
  void for_each_range(Function&& function) const {  // calls function(begin, end) for ranges of task numbers
    parallel(parallel_for, B * groups * chunks, 1, function);
  }
};

// Floats from the rows of one head to those of the next: an odd number of cache lines, since otherwise all heads would
// use the same cache sets.
inline int64_t head_stride(int64_t rows, int64_t D) { return rows * D + 16; }

// Copies rows first to end of a task's heads to memory of shape (heads, rows, D), or back. The loop over heads is the
// inner one because in the host's layout the heads of a row are adjacent.
template <int D>
void read_rows(const Rows& from, const Problem::Task& task, int64_t first, int64_t end, float* to, int64_t rows,
               float factor = 1.0f) {
  const int64_t stride = head_stride(rows, D);
  for (int64_t i = first; i < end; ++i)
    for (int64_t h = task.first_head; h < task.end_head; ++h)
      from.read<D>(task.b, h, i, to + (h - task.first_head) * stride + (i - first) * D, factor);
}
template <int D>
void write_rows(const Rows& to, const Problem::Task& task, int64_t first, int64_t end, const float* from,
                int64_t rows) {
  const int64_t stride = head_stride(rows, D);
  for (int64_t i = first; i < end; ++i)
    for (int64_t h = task.first_head; h < task.end_head; ++h)
      to.write<D>(task.b, h, i, from + (h - task.first_head) * stride + (i - first) * D);
}
