// out = bf16(bf16(silu(gate)) * up) from rows of [gate | up], or of [up | gate] with VALUE_FIRST.
//
// silu(g) = g / (1 + exp(-g)) with the full-precision expf and an IEEE division, as torch computes it in fp32: the kernel is bound by
// memory, so nothing is gained by an approximate reciprocal.
//
// Defines: F output width, THREADS, VECTORS (16-byte vectors per thread), VALUE_FIRST.
#include "common.cuh"

#ifndef VALUE_FIRST
#define VALUE_FIRST 0
#endif
#define FV (F / 8)
#define CHUNKS ((FV + THREADS * VECTORS - 1) / (THREADS * VECTORS))

DEV float silu(float g) { return __fdiv_rn(g, __fadd_rn(1.0f, expf(-g))); }
DEV u32 swiglu2(u32 gate, u32 up) { return bmul(pk(silu(lo(gate)), silu(hi(gate))), up); }

extern "C" __global__ void __launch_bounds__(THREADS)
swiglu(const unsigned short* gate_up, uint4* out, i64 stride) {
  const int row = blockIdx.x / CHUNKS;
  const int first = (blockIdx.x % CHUNKS) * THREADS * VECTORS + threadIdx.x;
  const uint4* halves = (const uint4*)(gate_up + row * stride);
  const uint4* gate = halves + (VALUE_FIRST ? FV : 0);
  const uint4* up = halves + (VALUE_FIRST ? 0 : FV);
  uint4* y = out + (i64)row * FV;
  uint4 g[VECTORS], u[VECTORS];
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    const int column = first + i * THREADS;
    if (column < FV) {
      g[i] = load_stream(gate + column);
      u[i] = load_stream(up + column);
    }
  }
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    const int column = first + i * THREADS;
    if (column < FV)
      store_stream(y + column, make_uint4(swiglu2(g[i].x, u[i].x), swiglu2(g[i].y, u[i].y), swiglu2(g[i].z, u[i].z), swiglu2(g[i].w, u[i].w)));
  }
}
