// Vectors of floats as compiler extensions of GCC and Clang: one source for AVX-512, AVX2, NEON and others.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__AVX__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
constexpr int64_t W = WIDTH;
typedef float Vec __attribute__((vector_size(WIDTH * 4)));
typedef int32_t IntVec __attribute__((vector_size(WIDTH * 4)));

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, IntVec{__VA_ARGS__})
#endif

inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
inline Vec load_bfloat16(const char* p) {
  uint16_t __attribute__((vector_size(WIDTH * 2))) v;
  std::memcpy(&v, p, sizeof(v));
  return (Vec)(__builtin_convertvector(v, IntVec) << 16);
}
inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof(v)); }
inline Vec broadcast(float x) { return x - Vec{}; }  // x + 0 would be an addition, since -0 + 0 is 0
inline Vec broadcast_bits(const float* p) {  // of any 32 bits, which may be no float
  int32_t bits;
  std::memcpy(&bits, p, 4);
  return (Vec)(IntVec{} + bits);
}

// Copies a block of W x W floats and transposes it; strides lead from one of its rows to the next.
inline void transpose(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  Vec x[W];
#pragma GCC unroll 16
  for (int64_t k = 0; k < W; ++k) x[k] = load(from + k * from_stride);
  // Interleaving row k with row k + W / 2 moves the highest bit of a row's number to the lowest of its column's.
  const auto interleave = [&] {
    Vec y[W];
#pragma GCC unroll 8
    for (int64_t k = 0; k < W / 2; ++k) {
      const Vec a = x[k], b = x[k + W / 2];
#if WIDTH == 16
      y[2 * k] = SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      y[2 * k + 1] = SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif WIDTH == 8
      y[2 * k] = SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
      y[2 * k + 1] = SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
      y[2 * k] = SHUFFLE(a, b, 0, 4, 1, 5);
      y[2 * k + 1] = SHUFFLE(a, b, 2, 6, 3, 7);
#endif
    }
#pragma GCC unroll 16
    for (int64_t k = 0; k < W; ++k) x[k] = y[k];
  };
#pragma GCC unroll 4
  for (int64_t bit = 0; bit < (WIDTH == 16 ? 4 : WIDTH == 8 ? 3 : 2); ++bit) interleave();
#pragma GCC unroll 16
  for (int64_t k = 0; k < W; ++k) store(to + k * to_stride, x[k]);
}

// Reduces four vectors to one. Each group of four floats in the result holds the four vectors' sums over that group.
inline Vec sum_lanes(Vec a, Vec b, Vec c, Vec d) {
#if WIDTH == 16
  auto step = [](Vec x, Vec y) {
    return SHUFFLE(x, y, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
           SHUFFLE(x, y, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  };
  Vec x = step(a, b), y = step(c, d);
  return SHUFFLE(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
         SHUFFLE(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
#elif WIDTH == 8
  auto step = [](Vec x, Vec y) {
    return SHUFFLE(x, y, 0, 8, 1, 9, 4, 12, 5, 13) + SHUFFLE(x, y, 2, 10, 3, 11, 6, 14, 7, 15);
  };
  Vec x = step(a, b), y = step(c, d);
  return SHUFFLE(x, y, 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE(x, y, 2, 3, 10, 11, 6, 7, 14, 15);
#else
  auto step = [](Vec x, Vec y) { return SHUFFLE(x, y, 0, 4, 1, 5) + SHUFFLE(x, y, 2, 6, 3, 7); };
  Vec x = step(a, b), y = step(c, d);
  return SHUFFLE(x, y, 0, 1, 4, 5) + SHUFFLE(x, y, 2, 3, 6, 7);
#endif
}

// The sums of W vectors, in order, from W / 4 results of sum_lanes.
inline Vec sum_across(const Vec* part) {
#if WIDTH == 16
  auto step = [](Vec x, Vec y) {
    return SHUFFLE(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           SHUFFLE(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  };
  Vec x = step(part[0], part[1]), y = step(part[2], part[3]);
  return SHUFFLE(x, y, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
         SHUFFLE(x, y, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
#elif WIDTH == 8
  return SHUFFLE(part[0], part[1], 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(part[0], part[1], 4, 5, 6, 7, 12, 13, 14, 15);
#else
  return part[0];
#endif
}

// Stores the sums of four vectors, from one result of sum_lanes.
inline void store_sums(float* out, Vec v) {
#if WIDTH == 16
  v += SHUFFLE(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  v += SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
#elif WIDTH == 8
  v += SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
#endif
  std::memcpy(out, &v, 16);
}

// The sum and the maximum of a vector's W floats, in every place.
template <class Operation>
inline Vec reduce(Vec v, Operation&& operation) {
#if WIDTH == 16
  v = operation(v, SHUFFLE(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = operation(v, SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  v = operation(v, SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  return operation(v, SHUFFLE(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
#elif WIDTH == 8
  v = operation(v, SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3));
  v = operation(v, SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5));
  return operation(v, SHUFFLE(v, v, 1, 0, 3, 2, 5, 4, 7, 6));
#else
  v = operation(v, SHUFFLE(v, v, 2, 3, 0, 1));
  return operation(v, SHUFFLE(v, v, 1, 0, 3, 2));
#endif
}
inline Vec sum_of(Vec v) {
  return reduce(v, [](Vec a, Vec b) { return a + b; });
}
inline Vec max_of(Vec v) {
  return reduce(v, [](Vec a, Vec b) { return a > b ? a : b; });
}

// exp(x) by Cody-Waite reduction and a polynomial of degree 6, with a relative error below 2e-7 for -87 <= x <= 0.
inline Vec exponential(Vec x) {
  const Vec floor = broadcast(-87.0f);
  x = x < floor ? floor : x;
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  Vec shifted = x * 1.44269504f + magic;
  Vec n = shifted - magic;
  Vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  IntVec exponent = ((IntVec)shifted << 23) + (IntVec)p;
  return (Vec)exponent;
}
