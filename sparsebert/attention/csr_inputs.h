// The inputs of the CSR kernels: rows of tensors in any layout, the live keys of a query, random numbers for dropout.
//
// Letters: B batch, H heads, n queries (the last n of the m positions), m keys, d head size.

#pragma once

#include <algorithm>
#include <vector>

#include "arguments.h"
#include "vectors.h"

struct Rows {
  // A query, key, value, output or gradient: (B, H, rows, d), any strides but a contiguous last dimension. With
  // `starts` it is (1, H, tokens, d) instead, and sequence b begins at token starts[b].
  char* data;
  int64_t dtype, stride_b, stride_h, stride_n, itemsize, d;
  const int64_t* starts;

  Rows(const Array& array, const Arguments& a)
      : data(array.data), dtype(a.dtype), stride_b(array.stride_b), stride_h(array.stride_h), stride_n(array.stride_n),
        itemsize(a.dtype == FLOAT32 ? 4 : 2), d(a.d), starts(a.starts) {}

  char* row(int64_t b, int64_t h, int64_t i) const {
    return data + ((starts ? starts[b] * stride_n : b * stride_b) + h * stride_h + i * stride_n) * itemsize;
  }
  // Writes the row's d numbers times a factor to out, and zeros from d to D.
  template <int D>
  void read(int64_t b, int64_t h, int64_t i, float* out, float factor) const {
    const char* from = row(b, h, i);
    if (dtype == FLOAT32) {
      auto p = reinterpret_cast<const float*>(from);
      if (d == D)
        for (int64_t c = 0; c < D; c += W) store(out + c, load(p + c) * factor);
      else
        for (int64_t c = 0; c < d; ++c) out[c] = p[c] * factor;
    } else {
      auto p = reinterpret_cast<const uint16_t*>(from);
      if (dtype == BFLOAT16)
        for (int64_t c = 0; c < d; ++c) out[c] = from_bfloat16(p[c]) * factor;
      else
        for (int64_t c = 0; c < d; ++c) out[c] = from_float16(p[c]) * factor;
    }
    for (int64_t c = d; c < D; ++c) out[c] = 0;
  }
  template <int D>
  void write(int64_t b, int64_t h, int64_t i, const float* from) const {
    char* to = row(b, h, i);
    if (dtype == FLOAT32) {
      auto p = reinterpret_cast<float*>(to);
      if (d == D)
        for (int64_t c = 0; c < D; c += W) store(p + c, load(from + c));
      else
        for (int64_t c = 0; c < d; ++c) p[c] = from[c];
    } else {
      auto p = reinterpret_cast<uint16_t*>(to);
      if (dtype == BFLOAT16)
        for (int64_t c = 0; c < d; ++c) p[c] = to_bfloat16(from[c]);
      else
        for (int64_t c = 0; c < d; ++c) p[c] = to_float16(from[c]);
    }
  }
};

// Philox4x32-10 (Salmon et al., SC 2011): 64 random numbers of 32 bits from 16 consecutive counters.
inline void philox(uint64_t seed, uint32_t block, uint32_t row, uint32_t head, uint32_t* out) {
  uint32_t x0[16], x1[16], x2[16], x3[16];
  for (uint32_t l = 0; l < 16; ++l) {
    x0[l] = block * 16 + l;
    x1[l] = row;
    x2[l] = head;
    x3[l] = 0;
  }
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    for (int l = 0; l < 16; ++l) {
      uint64_t a = uint64_t{0xD2511F53u} * x0[l], b = uint64_t{0xCD9E8D57u} * x2[l];
      x0[l] = static_cast<uint32_t>(b >> 32) ^ x1[l] ^ k0;
      x1[l] = static_cast<uint32_t>(b);
      x2[l] = static_cast<uint32_t>(a >> 32) ^ x3[l] ^ k1;
      x3[l] = static_cast<uint32_t>(a);
    }
  }
  std::memcpy(out, x0, 64);
  std::memcpy(out + 16, x1, 64);
  std::memcpy(out + 32, x2, 64);
  std::memcpy(out + 48, x3, 64);
}

struct Mask {
  // The live keys of row r of head h: columns[begin[h, r]] to columns[end[h, r] - 1], ascending.
  const int32_t* begin;
  const int32_t* end;
  const uint16_t* columns;
  const bool* padding;  // (B, m), true = real token; null without padding
  const int32_t* last;  // (B,), the token whose row and column are on in addition; null if there is none
  int64_t num_rows, m, first_row;
  bool first;   // whether the row and column of each sequence's first real token are on; those of position 0 are listed
  bool self;    // whether these tokens attend to themselves
  bool causal;  // whether a query attends to no later key

  struct Sequence {
    int64_t first_key, end_key, first, last;  // first and last: -1 if there is no such token
    const bool* holes;
  };

  Sequence sequence(int64_t b) const {
    Sequence s{0, m, -1, last ? last[b] : -1, nullptr};
    if (padding) {
      const bool* real = padding + b * m;
      s.first_key = std::find(real, real + m, true) - real;
      s.end_key = m;
      while (s.end_key > s.first_key && !real[s.end_key - 1]) --s.end_key;
      if (std::find(real + s.first_key, real + s.end_key, false) != real + s.end_key) s.holes = real;
      if (first && s.first_key > 0 && s.first_key < m) s.first = s.first_key;
      if (s.last >= 0 && !real[s.last]) s.last = -1;
    }
    return s;
  }

  // Writes the live keys of query i to out, ascending, and returns their number. Three copies of the first key follow,
  // so that a kernel may read keys four at a time.
  int64_t keys(const Sequence& s, int64_t h, int64_t i, int32_t* out) const {
    const int64_t r = first_row + i;
    if (r < s.first_key || r >= s.end_key || (s.holes && !s.holes[r])) return 0;
    int64_t count = 0;
    auto add = [&](int32_t j) {
      out[count] = j;
      count += !s.holes || s.holes[j];
    };
    if (r == s.first || r == s.last) {
      const int64_t end_key = causal ? r + 1 : s.end_key;
      for (int64_t j = s.first_key; j < end_key; ++j)
        if (self || j != r) add(j);
    } else {
      const uint16_t* from = columns + begin[h * num_rows + r];
      const uint16_t* to = columns + end[h * num_rows + r];
      if (padding) {
        if (s.first_key > 0) from = std::lower_bound(from, to, s.first_key);
        if (s.end_key < m) to = std::lower_bound(from, to, s.end_key);
      }
      // No live key is less than the first token or greater than the last one, so the list stays ascending.
      if (s.first >= 0 && !(to > from && from[0] == s.first)) out[count++] = s.first;
      if (s.holes) {
        for (const uint16_t* j = from; j < to; ++j) add(*j);
      } else {
        const int64_t listed = to - from;
        for (int64_t t = 0; t < listed; ++t) out[count + t] = from[t];
        count += listed;
      }
      if (s.last >= 0 && !(to > from && to[-1] == s.last)) out[count++] = s.last;
    }
    std::fill(out + count, out + count + (count ? 3 : 0), out[0]);
    return count;
  }
};

constexpr int64_t BLOCK = 32;  // queries of one head that are processed together

// The live keys of a block of queries.
struct Lists {
  int64_t size, count[BLOCK];
  std::vector<int32_t> keys;

  explicit Lists(int64_t m) : size((m + 31) / 16 * 16), keys(BLOCK * size) {}

  int32_t* of(int64_t r) { return keys.data() + r * size; }

  void find(const Mask& mask, const Mask::Sequence& sequence, int64_t h, int64_t first, int64_t rows) {
    for (int64_t r = 0; r < rows; ++r) count[r] = mask.keys(sequence, h, first + r, of(r));
  }
};

struct Dropout {
  float probability;
  uint64_t seed;

  // Sets factors[r * size + t] to 0 or 1 / (1 - p) for the t-th live key of query first + r. Random numbers are drawn
  // for the live keys of the whole block in one sequence, so few are wasted on short lists.
  void draw(const Lists& lists, int64_t first, int64_t rows, int64_t head, float* factors) const {
    const uint32_t threshold = static_cast<uint32_t>(std::min(double{probability} * 4294967296.0, 4294967295.0));
    const float kept = 1.0f / (1.0f - probability);
    alignas(64) uint32_t numbers[64];
    int64_t used = 64;
    uint32_t calls = 0;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t t = 0; t < lists.count[r];) {
        if (used == 64) {
          philox(seed, calls++, static_cast<uint32_t>(first), static_cast<uint32_t>(head), numbers);
          used = 0;
        }
        const int64_t size = std::min(64 - used, lists.count[r] - t);
        float* to = factors + r * lists.size + t;
        for (int64_t e = 0; e < size; ++e) to[e] = numbers[used + e] >= threshold ? kept : 0.0f;
        used += size;
        t += size;
      }
  }
};
