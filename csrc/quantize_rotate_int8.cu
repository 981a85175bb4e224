// bf16 rows -> rotated INT8 codes and one fp32 scale per row; kernels/quantize_rotate_int8.py has the contract. One block per row, one pass.
#include "common.cuh"
#define GROUP_OF(j) (2 * ((j) * WARPS + warp) + half)
#include "int8.cuh"

extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_BLOCKS)
quantize_rotate_int8(const unsigned short* __restrict__ x, unsigned char* __restrict__ q, float* __restrict__ scale, i64 x_stride) {
  __shared__ __align__(16) float tiles[WARPS][TILE_FLOATS];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, h = lane & 15, half = lane >> 4, row = blockIdx.x;
  float* tile = tiles[warp] + half * TILE_SECOND;
  const uint4* in = (const uint4*)(x + (i64)row * x_stride);
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
#pragma unroll
  for (int j = 0; j < STEPS; j++) {
    HIDE(v[j][0]);
    HIDE(v[j][1]);
  }
  float amax = 0.0f;
#pragma unroll
  for (int j = 0; j < STEPS; j++) {
    float f[16];
    unpack16(f, v[j][0], v[j][1]);
    rotate256(f, tile, h);
    keep(v[j], f, amax, HAS_GROUP(GROUP_OF(j)));
  }
  const float s = row_scale(row_max(amax, warp, lane)), inverse = row_inverse(s);
  if (threadIdx.x == 0) scale[row] = s;
#pragma unroll
  for (int j = 0; j < STEPS; j++) store_codes(q + (i64)row * K + 256 * GROUP_OF(j), v[j], inverse, h, HAS_GROUP(GROUP_OF(j)));
}
