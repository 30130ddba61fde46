// The inputs of the CSR kernels: rows of tensors in any layout, the live keys of a query, random numbers for dropout.
//
// Letters: B batch, H heads, n queries (the last n of the m positions), m keys, d head size.

#pragma once

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

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
      if (dtype == BFLOAT16 && d == D)
        for (int64_t c = 0; c < D; ++c) out[c] = from_bfloat16(p[c]) * factor;
      else if (dtype == BFLOAT16)
        for (int64_t c = 0; c < d; ++c) out[c] = from_bfloat16(p[c]) * factor;
      else
        for (int64_t c = 0; c < d; ++c) out[c] = from_float16(p[c]) * factor;
    }
    for (int64_t c = d; c < D; ++c) out[c] = 0;
  }
  // Writes the row's d numbers of 16 bits to out as they are, and zeros from d to D.
  template <int D>
  void copy(int64_t b, int64_t h, int64_t i, float* out) const {
    if (d == D) {
      std::memcpy(out, row(b, h, i), 2 * D);
    } else {
      std::memset(out, 0, 2 * D);
      std::memcpy(out, row(b, h, i), 2 * d);
    }
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
      if (dtype == BFLOAT16 && d == D)
        for (int64_t c = 0; c < D; ++c) p[c] = to_bfloat16(from[c]);
      else if (dtype == BFLOAT16)
        for (int64_t c = 0; c < d; ++c) p[c] = to_bfloat16(from[c]);
      else
        for (int64_t c = 0; c < d; ++c) p[c] = to_float16(from[c]);
    }
  }
  // sum += the row's d numbers
  template <int D>
  void add_to(int64_t b, int64_t h, int64_t i, Vec* sum) const {
    const char* const from = row(b, h, i);
    alignas(64) float copy[D];
    if (dtype == FLOAT32 && d == D) {
#pragma GCC unroll 16
      for (int64_t c = 0; c < D / W; ++c) sum[c] += load(reinterpret_cast<const float*>(from) + c * W);
    } else if (dtype == BFLOAT16 && d == D) {
#pragma GCC unroll 16
      for (int64_t c = 0; c < D / W; ++c) sum[c] += load_bfloat16(from + 2 * c * W);
    } else {
      read<D>(b, h, i, copy, 1.0f);
      for (int64_t c = 0; c < D / W; ++c) sum[c] += load(copy + c * W);
    }
  }
  template <int D>
  void add(int64_t b, int64_t h, int64_t i, const float* from) const {
    alignas(64) float sum[D];
    read<D>(b, h, i, sum, 1.0f);
    for (int64_t c = 0; c < D; ++c) sum[c] += from[c];
    write<D>(b, h, i, sum);
  }
};

// How 32 bits of a packed row hold `size` channels: as they are, so that a factor of the query is left for later.
struct Singles {
  static constexpr int64_t size = 1;
  template <int D>
  static bool is_packed(const Rows& rows) { return rows.dtype == FLOAT32 && rows.d == D; }  // in the host's memory
  template <int D>
  static void read(const Rows& rows, int64_t b, int64_t h, int64_t i, float* out) { rows.read<D>(b, h, i, out, 1.0f); }
  static Vec scaled(Vec query, float scale) { return query * scale; }
  static Vec add_products(Vec sum, Vec a, Vec b) { return sum + a * b; }
  static void add_weighted(Vec* sums, Vec weight, Vec value) { sums[0] += weight * value; }
  static void add_scaled(Vec* sums, const float* factors, Vec value) { sums[0] += factors[0] * value; }
  static Vec sum(const Vec* sums) { return sums[0]; }
  static float packed(const float* channels) { return channels[0]; }
  static Vec rounded(Vec weight) { return weight; }
  static Vec weights(Vec one, Vec) { return one; }
  static void add_rows(Vec* sums, Vec weight, Vec one, Vec) { sums[0] += weight * one; }
  static void sort(Vec*) {}
  static Vec exponential(Vec x) { return ::exponential(x); }
};
#if defined(__AVX512BF16__)
struct Pairs {  // of bfloat16, whose products are exact
  static constexpr int64_t size = 2;
  template <int D>
  static bool is_packed(const Rows& rows) { return rows.d == D && rows.stride_n % 2 == 0; }
  template <int D>
  static void read(const Rows& rows, int64_t b, int64_t h, int64_t i, float* out) { rows.copy<D>(b, h, i, out); }
  static Vec scaled(Vec query, float) { return query; }
  static Vec add_products(Vec sum, Vec a, Vec b) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
  static void add_weighted(Vec* sums, Vec weight, Vec value) {
    sums[0] += weight * (Vec)((IntVec)value << 16);
    sums[1] += weight * (Vec)((IntVec)value & -65536);
  }
  static void add_scaled(Vec* sums, const float* factors, Vec value) {
    sums[0] += factors[0] * (Vec)((IntVec)value << 16);
    sums[1] += factors[1] * (Vec)((IntVec)value & -65536);
  }
  static Vec sum(const Vec* sums) { return sums[0] + sums[1]; }
  static float packed(const float* channels) {
    return as_float(to_bfloat16(channels[0]) | uint32_t{to_bfloat16(channels[1])} << 16);
  }
  static Vec rounded(Vec weight) { return (Vec)(((IntVec)weight + 0x8000) & -65536); }
  // The weights of two values.
  static Vec weights(Vec one, Vec other) {
    return (Vec)(((IntVec)rounded(one) >> 16 & 0xFFFF) | (IntVec)rounded(other));
  }
  // Adds two rows of values to sums, which `sort` puts in order.
  static void add_rows(Vec* sums, Vec weight, Vec one, Vec other) {
    asm("" : "+v"(other));  // or it would be loaded twice
    sums[0] = add_products(sums[0], weight, (Vec)_mm512_unpacklo_epi16((__m512i)one, (__m512i)other));
    sums[1] = add_products(sums[1], weight, (Vec)_mm512_unpackhi_epi16((__m512i)one, (__m512i)other));
  }
  // exp(x) with a relative error of 1e-4 at most, less than weights are rounded by.
  static Vec exponential(Vec x) {
    const __m512 y = (__m512)(x * 1.44269504f);
    const Vec r = (Vec)_mm512_reduce_ps(y, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    const Vec power = ((r * 0.0780243892f + 0.226067393f) * r + 0.695833441f) * r + 0.999925229f;
    return (Vec)_mm512_scalef_ps((__m512)power, y);
  }
  static void sort(Vec* sums) {
    const Vec low = sums[0], high = sums[1];
    sums[0] = SHUFFLE(low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    sums[1] = SHUFFLE(low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  }
};
#endif

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
  // The live keys of row r of head h, ascending. In compressed rows: columns[t] for t from begin[h, r] to
  // end[h, r] - 1. In a Toeplitz form, where block is not 0: r - r % block + offsets[t] for t from begin[h] to
  // end[h] - 1, as far as they are between 0 and known, and all keys from known on; rows from known on have all keys.
  const int32_t* begin;
  const int32_t* end;
  const uint16_t* columns;
  const int32_t* offsets;
  int64_t block, known;
  const bool* padding;  // (B, m), true = real token; null without padding
  const int32_t* last;  // (B,), the token whose row and column are on in addition; null if there is none
  int64_t num_rows, m, first_row;
  bool first;      // whether the row and column of each sequence's first real token are on; compressed rows of an input
                   // without padding list those of position 0 themselves
  bool rows;       // whether the rows of these tokens are on at all, or only their columns
  bool self;       // whether these tokens, and those of a Toeplitz form, attend to themselves
  bool keep_self;  // whether all tokens of a Toeplitz form do
  bool causal;     // whether a query attends to no later key
  int64_t window;  // largest distance between a query and a key; negative if there is none

  struct Sequence {
    int64_t first_key, end_key, first, last;  // first and last: -1 if there is no such token
    int64_t num_real;
    const bool* holes;

    bool is_real(int64_t r) const { return r >= first_key && r < end_key && !(holes && !holes[r]); }
  };

  Sequence sequence(int64_t b) const {
    Sequence s{0, m, block && first ? 0 : -1, last ? last[b] : -1, m, nullptr};
    if (padding) {
      const bool* real = padding + b * m;
      s.first_key = std::find(real, real + m, true) - real;
      s.end_key = m;
      while (s.end_key > s.first_key && !real[s.end_key - 1]) --s.end_key;
      s.num_real = std::count(real + s.first_key, real + s.end_key, true);
      if (s.num_real < s.end_key - s.first_key) s.holes = real;
      if (first && (block || s.first_key > 0) && s.first_key < m) s.first = s.first_key;
      if (s.last >= 0 && !real[s.last]) s.last = -1;
    }
    return s;
  }

  // Where the offsets of the query before were, from which those of the next are not far.
  struct Cursor {
    const int32_t *begin = nullptr, *end = nullptr;
  };

  // Writes the live keys of query i to out, ascending, and returns their number. Three copies of the first key follow,
  // so that a kernel may read keys four at a time.
  int64_t keys(const Sequence& s, int64_t h, int64_t i, int32_t* out, Cursor& cursor) const {
    const int64_t r = first_row + i;
    if (!s.is_real(r)) return 0;
    int64_t from = s.first_key, to = causal ? r + 1 : s.end_key;
    if (window >= 0) {
      from = std::max(from, r - window);
      to = std::min(to, r + window + 1);
    }
    int64_t count = 0;
    auto add = [&](int64_t j) {
      out[count] = static_cast<int32_t>(j);
      count += !s.holes || s.holes[j];
    };
    auto add_listed = [&](const auto* begin, const auto* end, int64_t origin) {
      if (s.holes) {
        for (; begin < end; ++begin) add(origin + *begin);
      } else {
        const int64_t listed = end - begin;
        const int32_t shift = static_cast<int32_t>(origin);
        for (int64_t t = 0; t < listed; ++t) out[count + t] = begin[t] + shift;
        count += listed;
      }
    };
    const bool special = r == s.first || r == s.last;
    if ((special && rows) || (block && r >= known)) {
      for (int64_t j = from; j < to; ++j)
        if (self || j != r) add(j);
    } else {
      // No live key is before the first token or after the last one, so the list stays ascending.
      const bool has_first = s.first >= from && (self || r != s.first);
      const bool has_last = s.last >= 0 && s.last < to && (self || r != s.last);
      if (has_first) out[count++] = static_cast<int32_t>(s.first);
      // The first token may be listed as well.
      if (has_first) from = s.first + 1;
      if (block) {
        const int64_t origin = r - r % block;
        find(cursor, offsets + begin[h], offsets + end[h], from - origin, std::min(to, known) - origin);
        add_listed(cursor.begin, cursor.end, origin);
        if (block > 1 && (keep_self || !self)) set_self(out, count, r);
        for (int64_t j = std::max(from, known); j < to; ++j) add(j);
      } else {
        const uint16_t* begins = columns + begin[h * num_rows + r];
        const uint16_t* ends = columns + end[h * num_rows + r];
        if (from > 0) begins = std::lower_bound(begins, ends, from);
        if (to < m && !causal) ends = std::lower_bound(begins, ends, to);
        add_listed(begins, ends, 0);
      }
      if (has_last && !(count > 0 && out[count - 1] == s.last)) out[count++] = static_cast<int32_t>(s.last);
    }
    std::fill(out + count, out + count + (count ? 3 : 0), out[0]);
    return count;
  }

 private:
  // Moves a cursor to the offsets from `from` to `to` - 1 among those from begin to end.
  static void find(Cursor& cursor, const int32_t* begin, const int32_t* end, int64_t from, int64_t to) {
    if (!cursor.begin) {
      cursor.begin = std::lower_bound(begin, end, from);
      cursor.end = std::lower_bound(cursor.begin, end, to);
    }
    const auto move = [&](const int32_t* place, int64_t bound) {
      while (place > begin && place[-1] >= bound) --place;
      while (place < end && *place < bound) ++place;
      return place;
    };
    cursor.begin = move(cursor.begin, from);
    cursor.end = std::max(move(cursor.end, to), cursor.begin);
  }

  // Adds a query's own key to its ascending list of keys, or removes it.
  void set_self(int32_t* keys, int64_t& count, int64_t r) const {
    int32_t* const place = std::lower_bound(keys, keys + count, r);
    const bool listed = place < keys + count && *place == r;
    if (listed && !keep_self) {
      std::copy(place + 1, keys + count, place);
      --count;
    } else if (!listed && keep_self) {
      std::copy_backward(place, keys + count, keys + count + 1);
      *place = static_cast<int32_t>(r);
      ++count;
    }
  }
};

constexpr int64_t BLOCK = 32;  // queries of one head that are processed together

// The live keys of a block of queries. With a rest it is the last one of each query that lacks some, as key m.
struct Lists {
  int64_t size, count[BLOCK];
  int64_t removed[BLOCK];  // how many real keys the rest stands for; 0 if there is none
  std::vector<int32_t> keys;

  explicit Lists(int64_t m) : size((m + 31) / 16 * 16), keys(BLOCK * size) {}

  int32_t* of(int64_t r) { return keys.data() + r * size; }
  int64_t listed(int64_t r) const { return count[r] - (removed[r] > 0); }  // without the rest

  void find(const Mask& mask, const Mask::Sequence& sequence, int64_t h, int64_t first, int64_t rows, bool rest) {
    Mask::Cursor cursor;
    for (int64_t r = 0; r < rows; ++r) {
      count[r] = mask.keys(sequence, h, first + r, of(r), cursor);
      removed[r] = rest && sequence.is_real(mask.first_row + first + r) ? sequence.num_real - count[r] : 0;
      if (removed[r]) std::fill_n(of(r) + count[r]++, 4, static_cast<int32_t>(mask.m));  // and three copies
    }
  }
};

struct Dropout {
  float probability;
  uint64_t seed;

  // Sets factors[r * size + t] to 0 or 1 / (1 - p) for the t-th live key of query first + r, and to 1 for the rest.
  // Random numbers are drawn for the live keys of the whole block in one sequence, so few are wasted on short lists.
  void draw(const Lists& lists, int64_t first, int64_t rows, int64_t head, float* factors) const {
    const uint32_t threshold = static_cast<uint32_t>(std::min(double{probability} * 4294967296.0, 4294967295.0));
    const float kept = 1.0f / (1.0f - probability);
    alignas(64) uint32_t numbers[64];
    int64_t used = 64;
    uint32_t calls = 0;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t count = lists.listed(r);
      factors[r * lists.size + count] = 1.0f;
      for (int64_t t = 0; t < count;) {
        if (used == 64) {
          philox(seed, calls++, static_cast<uint32_t>(first), static_cast<uint32_t>(head), numbers);
          used = 0;
        }
        const int64_t size = std::min(64 - used, count - t);
        float* to = factors + r * lists.size + t;
        for (int64_t e = 0; e < size; ++e) to[e] = numbers[used + e] >= threshold ? kept : 0.0f;
        used += size;
        t += size;
      }
    }
  }
};
