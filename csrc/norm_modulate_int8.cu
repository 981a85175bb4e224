// (gated residual,) RMSNorm, modulation, rotation, INT8 quantisation of a row in one pass; kernels/norm_modulate_int8.py has the contract.
// GATE 1: x = bf16(fma(other, gate, x)) is written back first, and the norm reads the rounded value.
//
// The norm keeps the order of torch's fused kernel: 128 threads per row; thread t owns the groups of 4 elements t, t + 128, ..., one
// accumulator, acc = fma(v, v, acc) in rising order; then, per warp of torch, a tree over lane distances 16, 8, 4, 2, 1; then
// (W0 + W2) + (W1 + W3); IEEE division by H; rsqrtf. Compiled without ftz: torch's norm has none.
//
// Here warp w (0 or 1) owns the groups of 256 columns with parity w and plays torch's threads 64w + 4h + i (i = 0..3): group 4j + w goes to
// the first half-warp, 4j + 2 + w to the second, and the half-warps hand the four accumulators to each other in that order.
#define WARPS 2
#include "common.cuh"
#define GROUP_OF(j) (4 * (j) + 2 * half + warp)
#include "int8.cuh"

#define OTHER_BATCH 2  // steps of `other` in flight while the previous ones are added

DEV void square(float& acc, u32 pair) {
  acc = __fmaf_rn(lo(pair), lo(pair), acc);
  acc = __fmaf_rn(hi(pair), hi(pair), acc);
}
DEV void square16(float* acc, const uint4* v) {
  square(acc[0], v[0].x), square(acc[0], v[0].y), square(acc[1], v[0].z), square(acc[1], v[0].w);
  square(acc[2], v[1].x), square(acc[2], v[1].y), square(acc[3], v[1].z), square(acc[3], v[1].w);
}

// bf16(w * (rstd * x)): two rounded fp32 products, one rounding to bf16.
DEV u32 normed2(u32 x, u32 w, float rstd) {
  return pk(__fmul_rn(lo(w), __fmul_rn(rstd, lo(x))), __fmul_rn(hi(w), __fmul_rn(rstd, hi(x))));
}
DEV uint4 normed8(uint4 x, uint4 w, float rstd) {
  return make_uint4(normed2(x.x, w.x, rstd), normed2(x.y, w.y, rstd), normed2(x.z, w.z, rstd), normed2(x.w, w.w, rstd));
}

DEV float row_rstd(const uint4 (*v)[2], float eps, int warp, int lane, int h, int half) {
  float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int j = 0; j < STEPS; j++) {
    square16(acc, v[j]);  // counts for the first half-warp; the second takes its result over and goes on
#pragma unroll
    for (int i = 0; i < 4; i++) acc[i] = __shfl_sync(FULL, acc[i], h);
    if (half) square16(acc, v[j]);
#pragma unroll
    for (int i = 0; i < 4; i++) acc[i] = __shfl_sync(FULL, acc[i], 16 + h);
  }
#pragma unroll
  for (int d = 4; d; d >>= 1)  // lane distances 16, 8, 4 of torch
#pragma unroll
    for (int i = 0; i < 4; i++) acc[i] = __fadd_rn(acc[i], __shfl_xor_sync(FULL, acc[i], d));
  __shared__ float sums[4];  // torch's warps: 2w for h < 8, 2w + 1 above
  if ((lane & 23) == 0) sums[2 * warp + (lane >> 3)] = __fadd_rn(__fadd_rn(acc[0], acc[2]), __fadd_rn(acc[1], acc[3]));  // 2, 1
  __syncthreads();
  const float sum = __fadd_rn(__fadd_rn(sums[0], sums[2]), __fadd_rn(sums[1], sums[3]));
  return rsqrtf(__fadd_rn(__fdiv_rn(sum, (float)K), eps));
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_BLOCKS)
norm_modulate_int8(unsigned short* x, const unsigned short* __restrict__ other, const table_t* __restrict__ gate,
                   const uint4* __restrict__ weight, const table_t* __restrict__ shift, const table_t* __restrict__ scale,
                   const int* __restrict__ row_map, unsigned char* __restrict__ q, float* __restrict__ row_scales,
                   i64 x_stride, i64 other_stride, i64 gate_stride, i64 shift_stride, i64 scale_stride, float eps) {
  __shared__ __align__(16) float tiles[WARPS][TILE_FLOATS];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, h = lane & 15, half = lane >> 4, row = blockIdx.x;
  float* tile = tiles[warp] + half * TILE_SECOND;
  const i64 table_row = __ldg(row_map + row);
  uint4* in = (uint4*)(x + (i64)row * x_stride);
  uint4 v[STEPS][2];
#pragma unroll
  for (int j = 0; j < STEPS; j++) {
    if (HAS_GROUP(GROUP_OF(j))) {
      v[j][0] = load16(in + VECTOR_OF(j));
      v[j][1] = load16(in + VECTOR_OF(j) + 1);
    } else {
      v[j][0] = v[j][1] = make_uint4(0, 0, 0, 0);
    }
  }
#if GATE
  const uint4* o = (const uint4*)(other + (i64)row * other_stride);
  const table_t* g = gate + table_row * gate_stride;
  uint4 batch[2][OTHER_BATCH][2];
#pragma unroll
  for (int i = 0; i < OTHER_BATCH; i++)
    if (i < STEPS && HAS_GROUP(GROUP_OF(i))) {
      batch[0][i][0] = load16(o + VECTOR_OF(i));
      batch[0][i][1] = load16(o + VECTOR_OF(i) + 1);
    }
#pragma unroll
  for (int b = 0; b < (STEPS + OTHER_BATCH - 1) / OTHER_BATCH; b++) {
#pragma unroll
    for (int i = 0; i < OTHER_BATCH; i++) {
      const int j = (b + 1) * OTHER_BATCH + i;
      if (j < STEPS && HAS_GROUP(GROUP_OF(j))) {
        batch[(b + 1) & 1][i][0] = load16(o + VECTOR_OF(j));
        batch[(b + 1) & 1][i][1] = load16(o + VECTOR_OF(j) + 1);
      }
    }
#pragma unroll
    for (int i = 0; i < OTHER_BATCH; i++) {
      const int j = b * OTHER_BATCH + i;
      if (j < STEPS && HAS_GROUP(GROUP_OF(j))) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          v[j][e] = gate8(v[j][e], batch[b & 1][i][e], load16((const uint4*)g + VECTOR_OF(j) + e));
          in[VECTOR_OF(j) + e] = v[j][e];
        }
      }
    }
  }
#endif
#pragma unroll
  for (int j = 0; j < STEPS; j++) {
    HIDE(v[j][0]);
    HIDE(v[j][1]);
  }
  const float rstd = row_rstd(v, eps, warp, lane, h, half);
#pragma unroll
  for (int j = 0; j < STEPS; j++) {
    HIDE(v[j][0]);
    HIDE(v[j][1]);
  }
  const uint4 *sh = (const uint4*)(shift + table_row * shift_stride), *sc = (const uint4*)(scale + table_row * scale_stride);
  float amax = 0.0f;
#pragma unroll
  for (int j = 0; j < STEPS; j++) {
    if (HAS_GROUP(GROUP_OF(j))) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int vector = VECTOR_OF(j) + e;
        uint4 one_plus = load16(sc + vector);
        one_plus = badd4(one_plus, make_uint4(BF16_ONES, BF16_ONES, BF16_ONES, BF16_ONES));
        v[j][e] = modulate8(normed8(v[j][e], load16(weight + vector), rstd), one_plus, load16(sh + vector));
      }
    }
    float f[16];
    unpack16(f, v[j][0], v[j][1]);
    rotate256(f, tile, h);
    keep(v[j], f, amax, HAS_GROUP(GROUP_OF(j)));
  }
  const float s = row_scale(row_max(amax, warp, lane)), inverse = row_inverse(s);
  if (threadIdx.x == 0) row_scales[row] = s;
#pragma unroll
  for (int j = 0; j < STEPS; j++) store_codes(q + (i64)row * K + 256 * GROUP_OF(j), v[j], inverse, h, HAS_GROUP(GROUP_OF(j)));
}
