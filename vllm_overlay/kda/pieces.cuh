// SPDX-License-Identifier: Apache-2.0
// What step.cu is made of: operands of the tensor cores, sums over a warp, copies in the
// background, and the small matrices of a window.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

namespace kda {

using bf16 = __nv_bfloat16;
constexpr int K = 128;  // head size, of keys and of values
constexpr int T = 8;    // tokens of a window at most
constexpr int THREADS = 256;
constexpr int TILE = 128 + 16;  // floats between tiles of fragments, padded against bank conflicts

struct Shared {
  union {
    float window[2][16 * TILE];  // [D k; D q] as fragments: high, high, low, low
    struct {                     // before them, what was copied from memory
      bf16 k[T][K], gate[T][K], q[T][K];
      float pending_keys[T][K], pending_gates[T][K];  // or bf16
    } raw;
  };
  float4 fold[16][32];       // keys of the pending tokens, decayed to their end, as fragments
  float decay[K];            // of the pending tokens together
  float sums[3 * T][4];      // squared norms of keys, queries, pending keys, by warp
  float products[4][2][16];  // M and N, see products_of, halves of the sums
  float k[T][K], q[T][K];    // unit keys, scaled queries; before them, D in q
  union {
    float d[T][K];
    float solve[8][2][64];  // by warp: A and N A
  };
  float corrections[T][K];  // of the pending tokens
  bf16 v[T][K];
  alignas(16) uint64_t arrived;
  alignas(16) unsigned char state[0];
};

// A value for a tensor core operand: the tf32 nearest to it, and what is left. The tensor core
// ignores the lowest 13 bits.
struct Split {
  uint32_t high, low;
};

__device__ __forceinline__ Split split(float x) {
  const uint32_t high = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
  return {high, __float_as_uint(x - __uint_as_float(high)) + 0x1000u};
}

// The same of a state's value, where a NaN must stay one: what is left is cut off, not rounded.
__device__ __forceinline__ Split split_state(float x) {
  const uint32_t high = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
  return {high, __float_as_uint(x - __uint_as_float(high))};
}

__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], float b0, float b1) {
  mma(c, a, __float_as_uint(b0), __float_as_uint(b1));
}

// Sum N values of each lane over the warp. Afterwards x[0] of lane l is the sum of value
// l / (32 / N).
template <int N, int D = 16>
__device__ __forceinline__ void transposed_sum(float* x, int lane) {
  if constexpr (N > 1) {
    const bool upper = lane & D;
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
      const float send = upper ? x[i] : x[i + N / 2];
      x[i] = (upper ? x[i + N / 2] : x[i]) + __shfl_xor_sync(~0u, send, D);
    }
    transposed_sum<N / 2, D / 2>(x, lane);
  } else if constexpr (D >= 1) {
    x[0] += __shfl_xor_sync(~0u, x[0], D);
    transposed_sum<1, D / 2>(x, lane);
  }
}

template <bool BOUNDED>
__device__ __forceinline__ float decay_of(float logit, float a, float bias, float lower_bound) {
  const float x = logit + bias;
  if (BOUNDED) return __expf(__fdividef(lower_bound, 1.f + __expf(-a * x)));
  return __expf(-a * (x > 20.f ? x : log1pf(__expf(x))));
}

// Where column c of a tile's fragments lies: tile, and the position in it as one of eight.
__device__ __forceinline__ int tile_of(int c) { return (c >> 4) * 2 + ((c >> 1) & 1); }
__device__ __forceinline__ int place_of(int c) { return ((c >> 2) & 3) * 2 + (c & 1); }

// The squared norms of N vectors, of which a thread has one column.
template <int N>
__device__ __forceinline__ void reduce_squares(Shared& s, int first, const float* x, int lane,
                                               int warp) {
  float squares[N];
#pragma unroll
  for (int t = 0; t < N; t++) squares[t] = x[t] * x[t];
  transposed_sum<N>(squares, lane);
  if (lane % (32 / N) == 0) s.sums[first + lane / (32 / N)][warp] = squares[0];
}

__device__ __forceinline__ float norm_of(const float* sums, float x) {
  const float4 y = *(const float4*)sums;
  return x * rsqrtf((y.x + y.y) + (y.z + y.w) + 1e-6f);
}

__device__ __forceinline__ void put_fragment(float* to, float x) {
  const Split part = split(x);
  to[0] = __uint_as_float(part.high);
  to[2] = __uint_as_float(part.low);
}

// Where M_ti, i < t, and N_ti, i <= t, are among the 64 products. Sixteen at a time are of one i
// below four and of 7 - i: N_ii ... N_7i, M_(i+1)i ... M_7i, for i, then for 7 - i.
__host__ __device__ constexpr int products_of(int i) {
  return i < 4 ? 16 * i : 16 * (7 - i) + 15 - 2 * (7 - i);
}
__host__ __device__ constexpr int n_at(int t, int i) { return products_of(i) + t - i; }
__host__ __device__ constexpr int m_at(int t, int i) { return products_of(i) + 8 - i + t - i - 1; }

template <int I>
__device__ __forceinline__ void add_products(const Shared& s, int c, float* p) {
  float2 carried = *(const float2*)&s.k[I][c];
#pragma unroll
  for (int t = I; t < T; t++) {
    const float2 q = *(const float2*)&s.q[t][c];
    if (t > I) {
      const float2 d = *(const float2*)&s.d[t][c], k = *(const float2*)&s.k[t][c];
      carried.x *= d.x, carried.y *= d.y;
      p[m_at(t, I) % 16] = fmaf(carried.x, k.x, carried.y * k.y);
    }
    p[n_at(t, I) % 16] = fmaf(carried.x, q.x, carried.y * q.y);
  }
}

template <int I>
__device__ __forceinline__ void reduce_products(Shared& s, int half, int lane) {
  float p[16];
  const int c = half * 64 + lane * 2;
  add_products<I>(s, c, p);
  add_products<7 - I>(s, c, p);
  transposed_sum<16>(p, lane);
  if (lane % 2 == 0) s.products[I][half][lane / 2] = p[0];
}

// Lane j < 8 solves for column j of A, then multiplies by N.
__device__ __forceinline__ void solve(Shared& s, int warp, int lane, float beta) {
  float* products = s.solve[warp][1];
#pragma unroll
  for (int at = lane; at < 64; at += 32)
    products[at] = s.products[at / 16][0][at % 16] + s.products[at / 16][1][at % 16];
  __syncwarp();
  float x[T], y[T];
#pragma unroll
  for (int t = 0; t < T; t++) x[t] = t == lane ? 1.f : 0.f;
#pragma unroll
  for (int t = 0; t < T; t++) {
    x[t] *= __shfl_sync(~0u, beta, t);
#pragma unroll
    for (int later = t + 1; later < T; later++) x[later] -= products[m_at(later, t)] * x[t];
  }
#pragma unroll
  for (int t = 0; t < T; t++) {
    y[t] = 0.f;
#pragma unroll
    for (int i = 0; i <= t; i++) y[t] = fmaf(products[n_at(t, i)], x[i], y[t]);
  }
  __syncwarp();
  if (lane < T) {
#pragma unroll
    for (int t = 0; t < T; t++) {
      s.solve[warp][0][t * T + lane] = x[t];
      s.solve[warp][1][t * T + lane] = y[t];
    }
  }
  __syncwarp();
}

__device__ __forceinline__ void read4(const float* from, float (&x)[4]) {
  const float4 y = *(const float4*)from;
  x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
}

__device__ __forceinline__ void read4(const bf16* from, float (&x)[4]) {
  const uint2 y = *(const uint2*)from;
  const float2 low = __bfloat1622float2(*(const __nv_bfloat162*)&y.x),
               high = __bfloat1622float2(*(const __nv_bfloat162*)&y.y);
  x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
}

__device__ __forceinline__ void write4(float* to, float (&x)[4]) {
  *(float4*)to = make_float4(x[0], x[1], x[2], x[3]);
}

// The verify goes on from what was stored: x is rounded too.
__device__ __forceinline__ void write4(bf16* to, float (&x)[4]) {
  __nv_bfloat162 y[2] = {__floats2bfloat162_rn(x[0], x[1]), __floats2bfloat162_rn(x[2], x[3])};
  *(uint2*)to = *(uint2*)y;
  const float2 low = __bfloat1622float2(y[0]), high = __bfloat1622float2(y[1]);
  x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
}

__device__ __forceinline__ uint32_t shared_address(const void* x) {
  return (uint32_t)__cvta_generic_to_shared(x);
}

// The bulk copy engine brings the state, and counts its bytes on `arrived`. For one thread: the
// others call await_bytes only after a barrier with it.
__device__ __forceinline__ void copy_bulk(void* to, const void* from, int bytes,
                                          uint64_t* arrived) {
  const uint32_t counter = shared_address(arrived);
  asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(counter) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(counter), "r"(bytes)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(counter)
      : "memory");
}

__device__ __forceinline__ void await_bytes(uint64_t* arrived) {
  asm volatile(
      "{ .reg .pred p; again: mbarrier.try_wait.parity.shared.b64 p, [%0], 0; @!p bra again; }" ::
          "r"(shared_address(arrived))
      : "memory");
}

// Copies 16 bytes in the background, or zeros.
__device__ __forceinline__ void copy16(void* to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}

// Copies one head's part of some tokens, 16 bytes by each of the T K sizeof(X) / 16 threads that
// are wanted; zeros from `tokens` on.
template <typename X>
__device__ __forceinline__ void copy_tokens(X (*to)[K], const void* base, int64_t first,
                                            int64_t token_stride, int tokens, int thread) {
  constexpr int PIECE = 16 / sizeof(X), PIECES = K / PIECE;
  const int t = thread / PIECES, c = thread % PIECES * PIECE;
  copy16(&to[t][c], (const X*)base + first + (t < tokens ? t : 0) * token_stride + c, t < tokens);
}

// A barrier of all threads that either half may reach at a place of its own.
__device__ __forceinline__ void block_barrier() {
  asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}

}  // namespace kda
