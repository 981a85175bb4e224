// Per-head RMSNorm and split-half RoPE on the first 96 of 128 channels of q and k, in place. The bytes are those of comfy-kitchen's CUDA
// rms_rope_split_half_ (0.2.31 and 0.2.40), which gives one head to a warp:
//   1. Lane l accumulates its elements l, l + 32, l + 64, l + 96 in that order: acc = fma(v, v, acc) from 0.
//   2. Tree over lane distances 16, 8, 4, 2, 1.
//   3. r = rsqrt.approx(fma(sum, 1/128, eps)).
//   4. n = bf16((v * r) * weight) for all 128 channels; 96..127 are stored as they are.
//   5. Pair (e, e + 48), e < 48, with f = freqs[token, e]: y_e = bf16(fma(f00, n_e, f01 * n_e48)), y_e48 = bf16(fma(f10, n_e, f11 * n_e48)).
// Kitchen is built with --use_fast_math, so every fp32 operation flushes subnormals: compile this with --ftz=true.
//
// With TORCH_NORM the bytes are those of torch's RMSNorm over a head and of the rotation in separate bf16 operations (diffusers):
//   1. Torch's thread g of a head owns the elements 4g .. 4g + 3, acc = fma(v, v, acc) from 0 (rms.cuh with a row of 128: one warp has them all).
//   2. Tree over thread distances 16, 8, 4, 2, 1.
//   3. r = rsqrt.approx(sum / 128 + eps).
//   4. As above.
//   5. y_e = bf16(bf16(f00 * n_e) + bf16(f01 * n_e48)), y_e48 = bf16(bf16(f10 * n_e) + bf16(f11 * n_e48)).
// Subnormals count there: compile it without --ftz.
//
// Here one warp takes one row of q or of k, eight heads per step, four lanes per head. Lane t of a head holds the elements
// 8t + 32k + i (k < 4, i < 8) as four 16-byte vectors v0..v3. Kitchen's lane 8t + i reads exactly the elements i of the four vectors, so each of its
// chains lives in one lane here. Its tree: distance 16 is lane t ^ 2, distance 8 is t ^ 1, and 4, 2, 1 are inside the lane.
// Torch's threads 2t + 8k and 2t + 1 + 8k are the two halves of vector vk of lane t: its distances 16 and 8 are inside the lane, 4 is lane
// t ^ 2, 2 is t ^ 1, and 1 adds the two halves.
// The rotation partner (48 = 32 + 16 channels away) is always in lane t ^ 2:
//   lanes 0, 1 ("low"):   v0 is x0 of pairs 8t.., partner v1;   v1 is x0 of pairs 8t + 32.., partner v2;   v2 is x1 of pairs 8t + 16.., partner v0
//   lanes 2, 3 ("high"):  v1 is x1 of pairs 8t - 16.., v2 is x1 of pairs 8t + 16.., v0 is x0 of pairs 8t..
// so the three vectors to rotate are (v0, v1, v2) in low lanes and (v1, v2, v0) in high ones, exchanged slot by slot.
// The token's rotation table and the weights stay in registers over all heads.
//
// Defines: HEADS, TORCH_NORM.
#include "common.cuh"

#ifndef TORCH_NORM
#define TORCH_NORM 0
#endif
#define HEADS_PER_STEP 8
#define HEAD_VECTORS 16  // 128 channels

DEV uint4 select4(bool c, uint4 a, uint4 b) { return make_uint4(c ? a.x : b.x, c ? a.y : b.y, c ? a.z : b.z, c ? a.w : b.w); }

DEV uint4 partner4(uint4 a) {
  return make_uint4(__shfl_xor_sync(FULL, a.x, 2), __shfl_xor_sync(FULL, a.y, 2), __shfl_xor_sync(FULL, a.z, 2), __shfl_xor_sync(FULL, a.w, 2));
}

// c0, c1: the two bf16 coefficients (of x0, of x1) for the low and for the high element
DEV u32 rotate2(u32 x0, u32 x1, u32 c0, u32 c1) {
#if TORCH_NORM
  return badd(pk(__fmul_rn(lo(c0), lo(x0)), __fmul_rn(lo(c1), hi(x0))), pk(__fmul_rn(hi(c0), lo(x1)), __fmul_rn(hi(c1), hi(x1))));
#else
  return pk(__fmaf_rn(lo(c0), lo(x0), __fmul_rn(hi(c0), lo(x1))), __fmaf_rn(lo(c1), hi(x0), __fmul_rn(hi(c1), hi(x1))));
#endif
}
DEV uint4 rotate8(uint4 x0, uint4 x1, const u32* c) {
  return make_uint4(rotate2(x0.x, x1.x, c[0], c[1]), rotate2(x0.y, x1.y, c[2], c[3]),
                    rotate2(x0.z, x1.z, c[4], c[5]), rotate2(x0.w, x1.w, c[6], c[7]));
}

// The coefficients of 8 pairs, 8 bytes {f00 f01 f10 f11} each: the first row for an element that is x0, the second for x1.
DEV void load_coefficients(u32* c, const uint4* f, bool is_x1) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint4 two = __ldg(f + i);
    c[2 * i] = is_x1 ? two.y : two.x;
    c[2 * i + 1] = is_x1 ? two.w : two.z;
  }
}

// Half a vector as one thread of torch accumulates it.
DEV float squares4(u32 a, u32 b) {
  float acc = __fmaf_rn(lo(a), lo(a), 0.f);
  acc = __fmaf_rn(hi(a), hi(a), acc);
  acc = __fmaf_rn(lo(b), lo(b), acc);
  return __fmaf_rn(hi(b), hi(b), acc);
}

extern "C" __global__ void __launch_bounds__(32, 16)
qk_norm_rope(unsigned short* q, unsigned short* k, const uint4* __restrict__ freqs, const uint4* __restrict__ q_weight,
             const uint4* __restrict__ k_weight, i64 q_stride, i64 k_stride, float eps) {
  const int lane = threadIdx.x & 31, t = lane & 3;
  const i64 token = blockIdx.x >> 1;
  const bool is_k = blockIdx.x & 1, low = t < 2;
  uint4* x = (uint4*)(is_k ? k + token * k_stride : q + token * q_stride) + (lane >> 2) * HEAD_VECTORS + t;

  u32 ca[8], cb[8], cc[8];
  const uint4* f = freqs + token * 24;  // 48 pairs * 8 bytes
  load_coefficients(ca, f + (low ? 4 * t : 4 * t - 8), !low);
  load_coefficients(cb, f + (low ? 4 * t + 16 : 4 * t + 8), !low);
  load_coefficients(cc, f + (low ? 4 * t + 8 : 4 * t), low);
  const uint4* w = (is_k ? k_weight : q_weight) + t;
  const uint4 w0 = __ldg(w), w1 = __ldg(w + 4), w2 = __ldg(w + 8), w3 = __ldg(w + 12);

#pragma unroll 1
  for (int first = 0; first < HEADS; first += HEADS_PER_STEP, x += HEADS_PER_STEP * HEAD_VECTORS) {
    const bool inside = HEADS % HEADS_PER_STEP == 0 || first + (lane >> 2) < HEADS;
    uint4 v0, v1, v2, v3;
    v0 = v1 = v2 = v3 = make_uint4(0, 0, 0, 0);
    if (inside) {
      v0 = load_stream(x);
      v1 = load_stream(x + 4);
      v2 = load_stream(x + 8);
      v3 = load_stream(x + 12);
    }
#if TORCH_NORM
    float even = __fadd_rn(__fadd_rn(squares4(v0.x, v0.y), squares4(v2.x, v2.y)), __fadd_rn(squares4(v1.x, v1.y), squares4(v3.x, v3.y)));  // 16, 8
    float odd = __fadd_rn(__fadd_rn(squares4(v0.z, v0.w), squares4(v2.z, v2.w)), __fadd_rn(squares4(v1.z, v1.w), squares4(v3.z, v3.w)));
    even = __fadd_rn(even, __shfl_xor_sync(FULL, even, 2));  // 4
    odd = __fadd_rn(odd, __shfl_xor_sync(FULL, odd, 2));
    even = __fadd_rn(even, __shfl_xor_sync(FULL, even, 1));  // 2
    odd = __fadd_rn(odd, __shfl_xor_sync(FULL, odd, 1));
    const float r = rsqrtf(__fadd_rn(__fdiv_rn(__fadd_rn(even, odd), 128.f), eps));  // 1
#else
    float c[8];
#define CHAIN(i, half, part)                          \
  c[i] = __fmaf_rn(half(v0.part), half(v0.part), 0.f);  \
  c[i] = __fmaf_rn(half(v1.part), half(v1.part), c[i]); \
  c[i] = __fmaf_rn(half(v2.part), half(v2.part), c[i]); \
  c[i] = __fmaf_rn(half(v3.part), half(v3.part), c[i])
    CHAIN(0, lo, x); CHAIN(1, hi, x); CHAIN(2, lo, y); CHAIN(3, hi, y);
    CHAIN(4, lo, z); CHAIN(5, hi, z); CHAIN(6, lo, w); CHAIN(7, hi, w);
#pragma unroll
    for (int i = 0; i < 8; i++) c[i] = __fadd_rn(c[i], __shfl_xor_sync(FULL, c[i], 2));  // distance 16
#pragma unroll
    for (int i = 0; i < 8; i++) c[i] = __fadd_rn(c[i], __shfl_xor_sync(FULL, c[i], 1));  // 8
    const float sum = __fadd_rn(__fadd_rn(__fadd_rn(c[0], c[4]), __fadd_rn(c[2], c[6])),
                                __fadd_rn(__fadd_rn(c[1], c[5]), __fadd_rn(c[3], c[7])));  // 4, 2, 1
    const float r = rsqrtf(__fmaf_rn(sum, 0.0078125f, eps));
#endif

    HIDE(v0); HIDE(v1); HIDE(v2); HIDE(v3);
    v0 = normalize8(v0, w0, r);
    v1 = normalize8(v1, w1, r);
    v2 = normalize8(v2, w2, r);
    v3 = normalize8(v3, w3, r);
    const uint4 a = select4(low, v0, v1), b = select4(low, v1, v2), d = select4(low, v2, v0);
    const uint4 pa = partner4(a), pb = partner4(b), pd = partner4(d);
    const uint4 ya = rotate8(select4(low, a, pa), select4(low, pa, a), ca);
    const uint4 yb = rotate8(select4(low, b, pb), select4(low, pb, b), cb);
    const uint4 yd = rotate8(select4(low, pd, d), select4(low, d, pd), cc);
    if (inside) {
      store_plain(x, select4(low, ya, yd));
      store_plain(x + 4, select4(low, yb, ya));
      store_plain(x + 8, select4(low, yd, yb));
      store_plain(x + 12, v3);
    }
  }
}
