// SPDX-License-Identifier: Apache-2.0
// A KDA layer's speculative step in one pass over its states: fold the pending tokens of the last
// step into the checkpoint, write it, verify this step's window, record what its tokens did.
//
// For a window of tokens t with unit keys k, scaled queries q, decays d and D_t = d_1 ... d_t, the
// state S [values, keys] before it gives, with P = S [D k; D q]^T,
//   u_t = beta_t (v_t - Pk_t - sum_{i<t} M_ti u_i)      M_ti = k_t . (k_i D_t/D_i)
//   o_t = Pq_t + sum_{i<=t} N_ti u_i                    N_ti = q_t . (k_i D_t/D_i)
// so U = (V - Pk) A^T and O = Pq + (V - Pk) (N A)^T with A = (I + diag(beta) M)^-1 diag(beta), all
// 8 x 8. The fold of n tokens is S <- S D_n + sum_{i<=n} u_i (k_i D_n/D_i)^T.
//
// A block of eight warps serves one head of one row. Its states are copied to shared memory while
// the window is prepared, one column of the keys a thread. Then a warp takes 16 rows of the state:
// as the fragments that `mma.m16n8k8` wants, thread (g, c) of it has the rows 2 g and 2 g + 1, of
// the columns 16 j + 4 c ... + 3. Products run on tensor cores in tf32 with both operands split in
// two, which keeps fp32's precision. What a chain of steps carries along (state times decay plus
// update) is a fp32 fused multiply-add, rounded to nearest: the tensor core's own accumulation
// truncates and would drift. D_t/D_i is multiplied up from decays, never divided: nothing can
// overflow, whatever the gate.
#include <cuda_runtime.h>

#include "pieces.cuh"

#define EXPORT extern "C" __attribute__((visibility("default")))

// Shared with native.py, field by field. Strides count elements; those of `correction`, `key` and
// `gate_row` ... `gate_record_token` are the records'. `window`: tokens that a record has room for.
struct KdaStepArgs {
  const void *q, *k, *v, *gate, *beta;  // bf16
  const float *a_log, *gate_bias;
  void* state;  // [blocks, heads, values, keys], fp32 or bf16
  float* corrections;
  void *keys, *gates;  // fp32 unit keys and decays, or bf16 raw keys and gate logits
  void* out;           // bf16 or fp32
  const int *start, *block, *write_row, *fold_len, *fold_row;
  int64_t q_token, k_token, v_token, gate_token, beta_token, out_token;
  int64_t state_block, block_stride;
  int64_t correction_row, correction_head, correction_token;
  int64_t key_row, key_head, key_token;
  int64_t gate_row, gate_head, gate_record_token;
  float lower_bound;
  int32_t bounded, unit, state_bf16, out_fp32;
  int32_t heads, rows, window, scratch_row;
};

namespace kda {

// What a block works on: a head, a row's tokens from `bos` on, its record rows, the pending tokens.
struct Work {
  int head, length, due;
  int64_t bos, read_row, write_row;
};

// One column of this step's keys: decays, D, unit keys, their fragments, their records.
template <bool UNIT, bool BOUNDED>
__device__ __forceinline__ void prepare_keys(Shared& s, const KdaStepArgs& a, const Work& w,
                                             int c) {
  using Record = typename std::conditional<UNIT, float, bf16>::type;
  const int lane = c & 31, warp = c >> 5;
  const float rate = __expf(a.a_log[w.head]), bias = a.gate_bias[w.head * K + c];
  float k[T], d[T], through[T], before = 1.f;
#pragma unroll
  for (int t = 0; t < T; t++) {
    k[t] = __bfloat162float(s.raw.k[t][c]);
    d[t] = decay_of<BOUNDED>(__bfloat162float(s.raw.gate[t][c]), rate, bias, a.lower_bound);
    if (t >= w.length) d[t] = 1.f;
    through[t] = before *= d[t];
    s.d[t][c] = d[t];
    s.q[t][c] = before;
  }
  Record* to_key = (Record*)a.keys + w.write_row * a.key_row + w.head * a.key_head + c;
  Record* to_gate = (Record*)a.gates + w.write_row * a.gate_row + w.head * a.gate_head + c;
  if (!UNIT) {
#pragma unroll
    for (int t = 0; t < T; t++) {
      if (t < w.length) {
        to_key[t * a.key_token] = Record(s.raw.k[t][c]);
        to_gate[t * a.gate_record_token] = Record(s.raw.gate[t][c]);
      }
    }
  }
  reduce_squares<T>(s, 0, k, lane, warp);
  block_barrier();
  float* fragment = s.window[0] + tile_of(c) * TILE + ((c >> 2) & 3) * 4 + (c & 1);
#pragma unroll
  for (int t = 0; t < T; t++) {
    k[t] = norm_of(s.sums[t], k[t]);
    s.k[t][c] = k[t];
    put_fragment(fragment + t * 16, k[t] * through[t]);
    if (UNIT && t < w.length) {
      to_key[t * a.key_token] = Record(k[t]);
      to_gate[t * a.gate_record_token] = Record(d[t]);
    }
  }
}

// One column of this step's queries, and of the pending tokens.
template <bool UNIT, bool BOUNDED>
__device__ __forceinline__ void prepare_queries(Shared& s, const KdaStepArgs& a, const Work& w,
                                                int c) {
  using Record = typename std::conditional<UNIT, float, bf16>::type;
  const int lane = c & 31, warp = c >> 5;
  const auto keys = (const Record(*)[K])s.raw.pending_keys,
             gates = (const Record(*)[K])s.raw.pending_gates;
  float x[2 * T], d[T];  // queries, pending keys and decays
#pragma unroll
  for (int t = 0; t < T; t++) {
    x[t] = __bfloat162float(s.raw.q[t][c]);
    x[T + t] = (float)keys[t][c];
    d[t] = (float)gates[t][c];
  }
  if (!UNIT) {
    const float rate = __expf(a.a_log[w.head]), bias = a.gate_bias[w.head * K + c];
#pragma unroll
    for (int t = 0; t < T; t++) d[t] = decay_of<BOUNDED>(d[t], rate, bias, a.lower_bound);
  }
  reduce_squares<UNIT ? T : 2 * T>(s, T, x, lane, warp);
  block_barrier();
  float* fragment = s.window[1] + tile_of(c) * TILE + ((c >> 2) & 3) * 4 + (c & 1);
#pragma unroll
  for (int t = 0; t < T; t++) {
    const float q = norm_of(s.sums[T + t], x[t]) * 0.08838834764831845f;  // 128^-1/2
    put_fragment(fragment + t * 16, q * s.q[t][c]);
    s.q[t][c] = q;
  }
  if (w.due == 0) return;
  float after = 1.f;
#pragma unroll
  for (int t = T - 1; t >= 0; t--) {
    if (!UNIT) x[T + t] = norm_of(s.sums[2 * T + t], x[T + t]);
    x[T + t] *= after;  // 0 of a token that is not pending
    after *= t < w.due ? d[t] : 1.f;
  }
  s.decay[c] = after;
  float4* to = &s.fold[tile_of(c)][place_of(c) * 4];
#pragma unroll
  for (int t = 0; t < T / 2; t++) {
    const Split low = split(x[T + t]), high = split(x[T + t + T / 2]);
    to[t] = make_float4(__uint_as_float(low.high), __uint_as_float(high.high),
                        __uint_as_float(low.low), __uint_as_float(high.low));
  }
}

// Fold the pending tokens into 16 columns of a thread's two rows, from column 16 j on. `high`,
// `low`: their corrections as an operand.
__device__ __forceinline__ void fold_columns(const Shared& s, int j, int lane,
                                             const uint32_t (&high)[4], const uint32_t (&low)[4],
                                             float (&x)[2][4]) {
  const float4 decay = *(const float4*)&s.decay[16 * j + 4 * (lane & 3)];
  const float d[4] = {decay.x, decay.y, decay.z, decay.w};
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const float4 b = s.fold[2 * j + e][lane];
    float update[4] = {};
    mma(update, low, b.x, b.y);
    mma(update, high, b.z, b.w);
    mma(update, high, b.x, b.y);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float& element = x[i >> 1][2 * e + (i & 1)];
      element = fmaf(element, d[2 * e + (i & 1)], update[i]);
    }
  }
}

// Multiply the same columns by the window's vectors; `product`: of keys and of queries, the parts
// of high x high, high x low and low x high.
template <typename State>
__device__ __forceinline__ void multiply_columns(const Shared& s, int j, int lane,
                                                 const float (&x)[2][4],
                                                 float (&product)[2][3][4]) {
#pragma unroll
  for (int e = 0; e < 2; e++) {
    uint32_t high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const Split part = split_state(x[i & 1][2 * e + (i >> 1)]);
      high[i] = part.high, low[i] = part.low;
    }
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const float4 b = *(const float4*)&s.window[n][(2 * j + e) * TILE + lane * 4];
      mma(product[n][0], high, b.x, b.y);
      mma(product[n][1], high, b.z, b.w);
      if (sizeof(State) == 4) mma(product[n][2], low, b.x, b.y);  // a bf16 has no low part
    }
  }
}

// A thread's two rows of the state, 16 columns at a time: fold, write, multiply.
template <bool FOLD, typename State>
__device__ __forceinline__ void pass(const Shared& s, State* state, int value, int lane,
                                     float (&product)[2][3][4]) {
  const State* copied = (const State*)s.state + value * K + 4 * (lane & 3);
  uint32_t high[4], low[4];
#pragma unroll
  for (int i = 0; FOLD && i < 4; i++) {
    const Split part = split(s.corrections[(lane & 3) + 4 * (i >> 1)][value + (i & 1)]);
    high[i] = part.high, low[i] = part.low;
  }
#pragma unroll 2
  for (int j = 0; j < 8; j++) {
    float x[2][4];
#pragma unroll
    for (int r = 0; r < 2; r++) read4(copied + r * K + 16 * j, x[r]);
    if (FOLD) {
      fold_columns(s, j, lane, high, low, x);
#pragma unroll
      for (int r = 0; r < 2; r++) write4(state + r * K + 16 * j, x[r]);
    }
    multiply_columns<State>(s, j, lane, x, product);
  }
}

// Begins all copies of a block's work, what is wanted first in a group of its own.
template <typename State, bool UNIT>
__device__ __forceinline__ void start_copies(Shared& s, const KdaStepArgs& a, const Work& w,
                                             const State* state) {
  using Record = typename std::conditional<UNIT, float, bf16>::type;
  const int thread = threadIdx.x, half = thread % K;
  const int64_t first = w.head * K;
  if (thread == 0) copy_bulk(s.state, state, K * K * sizeof(State), &s.arrived);
  if (thread < K) {
    copy_tokens(s.raw.k, a.k, w.bos * a.k_token + first, a.k_token, w.length, half);
    copy_tokens(s.raw.gate, a.gate, w.bos * a.gate_token + first, a.gate_token, w.length, half);
  } else {
    copy_tokens(s.raw.q, a.q, w.bos * a.q_token + first, a.q_token, w.length, half);
  }
  if (UNIT || thread >= K) {
    const int part = UNIT ? thread : half;
    const auto keys = (Record(*)[K])s.raw.pending_keys, gates = (Record(*)[K])s.raw.pending_gates;
    copy_tokens(keys, a.keys, w.read_row * a.key_row + w.head * a.key_head, a.key_token, w.due,
                part);
    copy_tokens(gates, a.gates, w.read_row * a.gate_row + w.head * a.gate_head, a.gate_record_token,
                w.due, part);
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
  const int64_t record = w.read_row * a.correction_row + w.head * a.correction_head;
  copy_tokens(s.corrections, a.corrections, record, a.correction_token, w.due, thread);
  if (thread < K) copy_tokens(s.v, a.v, w.bos * a.v_token + first, a.v_token, w.length, half);
  asm volatile("cp.async.commit_group;" ::: "memory");
}

__device__ __forceinline__ void write_outputs(const KdaStepArgs& a, int64_t at, float x, float y) {
  if (a.out_fp32)
    *(float2*)((float*)a.out + at) = make_float2(x, y);
  else
    *(__nv_bfloat162*)((bf16*)a.out + at) = __floats2bfloat162_rn(x, y);
}

// Corrections and outputs of two values, from their products with the window's vectors.
__device__ __forceinline__ void finish(const Shared& s, const KdaStepArgs& a, const Work& w,
                                       int value, const float (&product)[2][3][4]) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, c = lane & 3;
  // A product's row has token 2 c + i at position 2 c + i; an operand wants it at c + 4 i.
  uint32_t high[4], low[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int token = i >> 1, from = (i & 1) * 2 + token;
    const float known = product[0][0][from] + (product[0][1][from] + product[0][2][from]);
    const Split part = split(__bfloat162float(s.v[2 * c + token][value + (i & 1)]) - known);
    high[i] = part.high, low[i] = part.low;
  }
  float result[2][4] = {};  // corrections, and what they add to outputs
#pragma unroll
  for (int n = 0; n < 2; n++) {
    const float2 b = *(const float2*)&s.solve[warp][n][(lane >> 2) * T + 2 * c];
    const Split b0 = split(b.x), b1 = split(b.y);
    mma(result[n], low, b0.high, b1.high);
    mma(result[n], high, b0.low, b1.low);
    mma(result[n], high, b0.high, b1.high);
  }
  float* record =
      a.corrections + w.write_row * a.correction_row + w.head * a.correction_head + value;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int t = 2 * c + i;
    if (t >= w.length) break;
    *(float2*)(record + t * a.correction_token) = make_float2(result[0][i], result[0][i + 2]);
    float out[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int from = i + 2 * r;
      out[r] =
          result[1][from] + (product[1][0][from] + (product[1][1][from] + product[1][2][from]));
    }
    write_outputs(a, (w.bos + t) * a.out_token + w.head * K + value, out[0], out[1]);
  }
}

template <typename State, bool UNIT, bool BOUNDED>
__global__ void __launch_bounds__(THREADS, 2) step(const KdaStepArgs a) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& s = *(Shared*)memory;
  const int row = blockIdx.y, thread = threadIdx.x, lane = thread & 31, warp = thread >> 5,
            c = lane & 3;
  Work w;
  w.head = blockIdx.x;
  const int64_t block = a.block[row * a.block_stride];
  w.bos = a.start[row];
  w.length = min(a.start[row + 1] - (int)w.bos, a.window);
  w.due = min(a.fold_len[row], a.window);
  w.read_row = a.fold_row[row];
  w.write_row = a.write_row[row];
  if (w.write_row < 0) w.write_row = a.scratch_row;
  const int value = warp * 16 + 2 * (lane >> 2);  // and the one after it
  if (block <= 0) {                               // a padded row
    for (int t = c; t < w.length; t += 4)
      write_outputs(a, (w.bos + t) * a.out_token + w.head * K + value, 0.f, 0.f);
    return;
  }
  State* state = (State*)a.state + block * a.state_block + w.head * K * K;
  start_copies<State, UNIT>(s, a, w, state);
  float beta = 0.f;  // of token `lane`
  if (lane < w.length) {
    const bf16 logit = ((const bf16*)a.beta)[(w.bos + lane) * a.beta_token + w.head];
    beta = __fdividef(1.f, 1.f + __expf(-__bfloat162float(logit)));
  }
  asm volatile("cp.async.wait_group 1;" ::: "memory");
  __syncthreads();
  if (thread < K)
    prepare_keys<UNIT, BOUNDED>(s, a, w, thread);
  else
    prepare_queries<UNIT, BOUNDED>(s, a, w, thread - K);
  __syncthreads();
  switch (warp >> 1) {
    case 0: reduce_products<0>(s, warp & 1, lane); break;
    case 1: reduce_products<1>(s, warp & 1, lane); break;
    case 2: reduce_products<2>(s, warp & 1, lane); break;
    default: reduce_products<3>(s, warp & 1, lane);
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
  solve(s, warp, lane, beta);
  float product[2][3][4] = {};
  await_bytes(&s.arrived);
  if (w.due > 0)
    pass<true>(s, state + value * K + 4 * c, value, lane, product);
  else
    pass<false>(s, state + value * K + 4 * c, value, lane, product);
  finish(s, a, w, value, product);
}

using Kernel = void (*)(KdaStepArgs);
const Kernel kernels[2][2][2] = {{{step<float, false, false>, step<float, false, true>},
                                  {step<float, true, false>, step<float, true, true>}},
                                 {{step<bf16, false, false>, step<bf16, false, true>},
                                  {step<bf16, true, false>, step<bf16, true, true>}}};

}  // namespace kda

EXPORT int kda_step_abi() { return 2; }

// Bytes of shared memory that a block wants for a state of fp32 or bf16.
EXPORT int kda_step_shared_bytes(int state_bf16) {
  return sizeof(kda::Shared) + kda::K * kda::K * (state_bf16 ? 2 : 4);
}

EXPORT const char* kda_step_error(int code) { return cudaGetErrorString((cudaError_t)code); }

// Returns a cudaError_t. Does not wait for the kernel.
EXPORT int kda_step_launch(const KdaStepArgs* a, void* stream) {
  const kda::Kernel kernel = kda::kernels[a->state_bf16 != 0][a->unit != 0][a->bounded != 0];
  const int bytes = kda_step_shared_bytes(a->state_bf16);
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return (int)cudaGetLastError();  // which also forgets it
  kernel<<<dim3(a->heads, a->rows), kda::THREADS, bytes, (cudaStream_t)stream>>>(*a);
  return (int)cudaGetLastError();
}
