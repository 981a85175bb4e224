// ConvRot rotation (groups of 256 columns) and per-row INT8 quantisation with the bytes of comfy-kitchen's CUDA kernel; the contract is
// written out in kernels/quantize_rotate_int8.py. Follows common.cuh.
//
// A half-warp works on one group at a time. Lane h of it first holds elements 16h .. 16h+15 (two 16-byte loads; butterfly strides 1 and 4
// are inside the lane), then, after one transpose through shared memory, elements h, 16+h, .., 240+h (strides 16 and 64 inside the lane).
// Rotated values wait as packed bf16, to which the contract rounds them anyway, until the row's amax is known.
//
// Defined in front:
//   K      columns, a multiple of 256
//   WARPS  warps per row (one row per block)
//   MULS   1: times 0.5 in every stage, as kitchen, so that huge values overflow where kitchen's do; 0: one factor 1/16 at the end
// and by the including source, before the include:
//   GROUP_OF(j)  the group this half-warp works on in step j
#define GROUPS (K / 256)
#define STEPS ((GROUPS + 2 * WARPS - 1) / (2 * WARPS))
#define VECTORS (K / 8)                                      // 16-byte vectors in a row
#define HAS_GROUP(g) (GROUPS % (2 * WARPS) == 0 || (g) < GROUPS)
#define VECTOR_OF(j) (32 * GROUP_OF(j) + 2 * h)              // the first of the lane's two vectors in step j

// kitchen is built with --use_fast_math: every fp32 sum and product flushes subnormals. No product is ever fused into a sum here.
DEV float addz(float a, float b) { float r; asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
DEV float subz(float a, float b) { float r; asm("sub.rn.ftz.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
DEV float mulz(float a, float b) { float r; asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
DEV u32 bmin(u32 a, u32 b) { u32 r; asm("min.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
DEV u32 bmax(u32 a, u32 b) { u32 r; asm("max.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }

// Activations and tables: `volatile` keeps the loads where they are written, ahead of the arithmetic that hides their latency.
DEV uint4 load16(const uint4* p) {
  uint4 r;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p));
  return r;
}

DEV void butterfly(float& x0, float& x1, float& x2, float& x3) {
  float a = addz(x0, x1), b = subz(x0, x1);
  float y0 = subz(addz(a, x2), x3), y1 = addz(subz(a, x2), x3);
  float y2 = addz(addz(b, x2), x3), y3 = addz(subz(x2, b), x3);  // -x0 + x1 is -b exactly
#if MULS
  y0 = mulz(y0, 0.5f), y1 = mulz(y1, 0.5f), y2 = mulz(y2, 0.5f), y3 = mulz(y3, 0.5f);
#endif
  x0 = y0, x1 = y1, x2 = y2, x3 = y3;
}

DEV void two_stages(float* f) {
#pragma unroll
  for (int i = 0; i < 4; i++) butterfly(f[4 * i], f[4 * i + 1], f[4 * i + 2], f[4 * i + 3]);
#pragma unroll
  for (int i = 0; i < 4; i++) butterfly(f[i], f[i + 4], f[i + 8], f[i + 12]);
}

// One padded tile per half-warp: rows of 20 floats, the second tile 336 floats on, so that neither side of the transpose meets a bank twice.
#define TILE_PITCH 20
#define TILE_SECOND 336
#define TILE_FLOATS 672

// f: elements 16h .. 16h+15 of a group on entry, elements 16i + h (i = 0..15) of the rotated group on return.
DEV void rotate256(float* f, float* tile, int h) {
  two_stages(f);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; i++)
    *(float4*)(tile + TILE_PITCH * h + 4 * i) = make_float4(f[4 * i], f[4 * i + 1], f[4 * i + 2], f[4 * i + 3]);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 16; i++) f[i] = tile[TILE_PITCH * i + h];
  two_stages(f);
}

DEV void unpack16(float* f, uint4 a, uint4 b) {
  f[0] = lo(a.x), f[1] = hi(a.x), f[2] = lo(a.y), f[3] = hi(a.y), f[4] = lo(a.z), f[5] = hi(a.z), f[6] = lo(a.w), f[7] = hi(a.w);
  f[8] = lo(b.x), f[9] = hi(b.x), f[10] = lo(b.y), f[11] = hi(b.y), f[12] = lo(b.z), f[13] = hi(b.z), f[14] = lo(b.w), f[15] = hi(b.w);
}

// The rotated group joins the row: largest absolute value (fmaxf passes over NaN), then bf16.
DEV void keep(uint4* v, const float* f, float& amax, bool counts) {
  if (counts) {
#pragma unroll
    for (int i = 0; i < 16; i++) amax = fmaxf(amax, fabsf(f[i]));
  }
  v[0] = make_uint4(pk(f[0], f[1]), pk(f[2], f[3]), pk(f[4], f[5]), pk(f[6], f[7]));
  v[1] = make_uint4(pk(f[8], f[9]), pk(f[10], f[11]), pk(f[12], f[13]), pk(f[14], f[15]));
  HIDE(v[0]);
  HIDE(v[1]);
}

// Largest of the row; every thread of the block gets it.
DEV float row_max(float amax, int warp, int lane) {
#pragma unroll
  for (int d = 16; d; d >>= 1) amax = fmaxf(amax, __shfl_xor_sync(FULL, amax, d));
#if WARPS > 1
  __shared__ float per_warp[WARPS];
  if (lane == 0) per_warp[warp] = amax;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < WARPS; i++) amax = fmaxf(amax, per_warp[i]);
#endif
#if !MULS
  amax = mulz(amax, 0.0625f);
#endif
  return amax;
}

DEV float row_scale(float amax) { return fmaxf(mulz(fminf(amax, 3.38953139e38f), 1.0f / 127.0f), 1.0e-30f); }

// What a rotated value is multiplied by: the approximate reciprocal of bf16(scale), which is in range for it.
DEV float row_inverse(float scale) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(lo(pk(scale, scale))));
#if !MULS
  inverse = mulz(inverse, 0.0625f);
#endif
  return inverse;
}

// bf16(value / scale) of two packed values, clamped; NaN becomes -128. Clamping before rounding gives the same integer.
DEV u32 quotient2(u32 pair, float inverse) {
  return bmin(bmax(pk(mulz(lo(pair), inverse), mulz(hi(pair), inverse)), 0xc300c300u), 0x42fe42feu);  // -128, 127
}

// Adding 1.5 * 2^23 rounds to the nearest integer, half to even; its low byte is the two's complement code.
DEV u32 code(float quotient) { return __float_as_uint(__fadd_rn(quotient, 12582912.0f)); }

// Codes of 16i + h (4 bytes of 4 different 16-byte runs) to 4 consecutive bytes per lane: a 4x4 byte transpose among neighbouring lanes.
// One 32-bit store per 4 codes. `out` is the group's first byte.
DEV void store_codes(unsigned char* out, const uint4* v, float inverse, int h, bool counts) {
  const u32 first = (h & 1) ? 0x3715u : 0x6240u, second = (h & 2) ? 0x3276u : 0x5410u;
#pragma unroll
  for (int c = 0; c < 4; c++) {
    const uint4 word = v[c >> 1];
    const u32 e0 = quotient2(c & 1 ? word.z : word.x, inverse), e1 = quotient2(c & 1 ? word.w : word.y, inverse);
    u32 q = __byte_perm(__byte_perm(code(lo(e0)), code(hi(e0)), 0x0040), __byte_perm(code(lo(e1)), code(hi(e1)), 0x0040), 0x5410);
    q = __byte_perm(q, __shfl_xor_sync(FULL, q, 1), first);
    q = __byte_perm(q, __shfl_xor_sync(FULL, q, 2), second);
    if (counts) *(u32*)(out + 64 * c + 16 * (h & 3) + 4 * (h >> 2)) = q;
  }
}
