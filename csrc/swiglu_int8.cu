// [gate | up] rows -> SwiGLU in fp32 -> rotated INT8 codes and one fp32 scale per row; kernels/swiglu_int8.py has the contract.
// Compiled with --use_fast_math, as kitchen's kernel is: expf and the division are the chip's approximations. One block per row, one pass.
#include "common.cuh"
#define GROUP_OF(j) (2 * ((j) * WARPS + warp) + half)
#include "int8.cuh"

DEV float swiglu(float gate, float up) { return (gate / (1.0f + expf(-gate))) * up; }

DEV void swiglu8(float* f, uint4 g, uint4 u) {
  f[0] = swiglu(lo(g.x), lo(u.x)), f[1] = swiglu(hi(g.x), hi(u.x)), f[2] = swiglu(lo(g.y), lo(u.y)), f[3] = swiglu(hi(g.y), hi(u.y));
  f[4] = swiglu(lo(g.z), lo(u.z)), f[5] = swiglu(hi(g.z), hi(u.z)), f[6] = swiglu(lo(g.w), lo(u.w)), f[7] = swiglu(hi(g.w), hi(u.w));
}

DEV void load_pair(uint4* g, uint4* u, const uint4* gate, const uint4* up, int vector) {
  g[0] = load16(gate + vector), g[1] = load16(gate + vector + 1), u[0] = load16(up + vector), u[1] = load16(up + vector + 1);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_BLOCKS)
swiglu_int8(const unsigned short* __restrict__ x, unsigned char* __restrict__ q, float* __restrict__ scale, i64 x_stride) {
  __shared__ __align__(16) float tiles[WARPS][TILE_FLOATS];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, h = lane & 15, half = lane >> 4, row = blockIdx.x;
  float* tile = tiles[warp] + half * TILE_SECOND;
  const uint4 *gate = (const uint4*)(x + (i64)row * x_stride), *up = gate + VECTORS;
  uint4 v[STEPS][2], g[2], u[2];
  g[0] = g[1] = u[0] = u[1] = make_uint4(0, 0, 0, 0);
  if (HAS_GROUP(GROUP_OF(0))) load_pair(g, u, gate, up, VECTOR_OF(0));
  float amax = 0.0f;
#pragma unroll
  for (int j = 0; j < STEPS; j++) {
    const uint4 g0 = g[0], g1 = g[1], u0 = u[0], u1 = u[1];
    if (j + 1 < STEPS && HAS_GROUP(GROUP_OF(j + 1))) load_pair(g, u, gate, up, VECTOR_OF(j + 1));  // in flight during this step
    float f[16];
    swiglu8(f, g0, u0);
    swiglu8(f + 8, g1, u1);
    rotate256(f, tile, h);
    keep(v[j], f, amax, HAS_GROUP(GROUP_OF(j)));
  }
  const float s = row_scale(row_max(amax, warp, lane)), inverse = row_inverse(s);
  if (threadIdx.x == 0) scale[row] = s;
#pragma unroll
  for (int j = 0; j < STEPS; j++) store_codes(q + (i64)row * K + 256 * GROUP_OF(j), v[j], inverse, h, HAS_GROUP(GROUP_OF(j)));
}
