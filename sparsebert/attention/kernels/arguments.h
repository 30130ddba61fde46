// What Python passes to the operator, as a plain C interface: no headers of Python or PyTorch are needed, and one
// library serves all their versions. cpu.py packs `Arguments` in the same order.
//
// Letters: B batch, H heads, n queries (the last n of the m positions), m keys, d head size.

#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>

enum Dtype : int64_t { FLOAT32, BFLOAT16, FLOAT16 };

// A query, key, value, output or gradient (B, H, rows, d). The last dimension is contiguous; strides count elements.
struct Array {
  char* data;
  int64_t stride_b, stride_h, stride_n;
};

// PyTorch's own loop over [begin, end) on its threads (`torch_parallel_for` of its stable C interface).
typedef int32_t (*ParallelFor)(int64_t begin, int64_t end, int64_t grain, void (*function)(int64_t, int64_t, void*),
                               void* context);

struct Arguments {
  Array query, key, value;
  Array output;                            // of the forward, or its gradient
  Array grad_query, grad_key, grad_value;  // of the backward
  const int32_t *begin, *end;              // (H, mask_rows)
  const void* columns;                     // uint16, or int32 offsets of a Toeplitz form, see `Mask`
  const bool* padding;
  const int32_t* last;
  const int64_t* starts;   // first token of each packed sequence; null if they are not packed
  const float* rest_bias;  // (H,), null if there is no rest, see `Problem`
  const bool* rest_keys;
  float* rest;             // what the forward writes and the backward reads
  float* grad_rest;        // (B, H), of the backward
  const float* distances;  // (H, 2 m - 1), null if there are none, see `Problem`
  float* grad_distances;   // of the backward; null if it is not wanted
  ParallelFor parallel_for;
  int64_t mask_rows, B, H, n, m, d, tokens, dtype, threads, seed, first, special_rows, self, causal, block, known,
      keep_self, window;
  double dropout, scale;
};

// Calls function(from, to) for ranges of [0, size). What is thrown on another thread is thrown here.
template <class Function>
void parallel(ParallelFor parallel_for, int64_t size, int64_t grain, Function&& function) {
  struct Context {
    std::remove_reference_t<Function>& function;
    std::atomic<bool> failed{false};
  } context{function};
  const auto call = [](int64_t from, int64_t to, void* pointer) {
    auto& context = *static_cast<Context*>(pointer);
    try {
      context.function(from, to);
    } catch (...) {
      context.failed = true;
    }
  };
  if (parallel_for(0, size, grain, call, &context) || context.failed) throw std::bad_alloc();
}

inline float as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t as_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline float from_bfloat16(uint16_t x) { return as_float(uint32_t{x} << 16); }

// Rounds to nearest even; a NaN stays a NaN.
inline uint16_t to_bfloat16(float x) {
  const uint32_t bits = as_bits(x);
  return x != x ? 0x7FC0 : static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

inline float from_float16(uint16_t x) {
  const uint32_t sign = uint32_t{x} << 16 & 0x80000000u, rest = x & 0x7FFFu;
  const float small = static_cast<float>(static_cast<int32_t>(rest)) * 0x1p-24f;  // below the normal numbers
  const uint32_t normal = (rest << 13) + (rest < 0x7C00 ? 0x38000000u : 0x70000000u);
  return as_float(sign | (rest < 0x0400 ? as_bits(small) : normal));
}

// Rounds to nearest even; a NaN stays a NaN.
inline uint16_t to_float16(float x) {
  const uint32_t bits = as_bits(x), sign = bits >> 16 & 0x8000u, rest = bits & 0x7FFFFFFFu;
  // Below the normal numbers, adding 0.5 rounds to multiples of 2^-24.
  const uint32_t small = as_bits(as_float(rest < 0x38800000u ? rest : 0) + 0.5f) - 0x3F000000u;
  const uint32_t normal = (rest + 0xFFFu + (rest >> 13 & 1) - 0x38000000u) >> 13;
  const uint32_t large = rest > 0x7F800000u ? 0x7E00u : 0x7C00u;
  return static_cast<uint16_t>(sign | (rest < 0x38800000u ? small : rest < 0x47800000u ? normal : large));
}
