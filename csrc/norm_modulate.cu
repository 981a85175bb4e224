// h = modulate(rms_norm(x)), and with GATE first x = gate(x, other) in place. The bytes are those of torch's CUDA kernels; rms.cuh has the order.
//
// x stays in registers between the sum and the result, so it is read once. One row per block of 64 threads: with GATE, which writes x, no
// row may be processed twice.
//
// Defines: N row width (multiple of 8), GATE, TABLE_F32 (0: the caller rounds the tables), MIN_BLOCKS per SM, AHEAD (vectors of `other` loaded ahead),
// and GATE_TWICE (common.cuh).
#include "common.cuh"
#include "rms.cuh"

extern "C" __global__ void __launch_bounds__(64, MIN_BLOCKS)
norm_modulate(unsigned short* x, const unsigned short* other, const table_t* gate, const uint4* __restrict__ weight,
              const table_t* scale, const table_t* shift, uint4* out, const int* __restrict__ rows,
              i64 x_stride, i64 other_stride, i64 gate_stride, i64 scale_stride, i64 shift_stride, float eps) {
  const i64 row = blockIdx.x;
  uint4* xv = (uint4*)(x + row * x_stride);
  const i64 table_row = __ldg(rows + row);
  uint4 v[STEPS];
  load_row(v, xv);
#if GATE
  gate_row(v, xv, (const uint4*)(other + row * other_stride), gate + table_row * gate_stride);
#endif
  const float rstd = row_rstd(v, eps);
  const table_t* a = scale + table_row * scale_stride;
  const table_t* b = shift + table_row * shift_stride;
  uint4* y = out + row * NV;
#pragma unroll
  for (int j = 0; j < STEPS; j++)
    if (INSIDE(j)) {
      const uint4 n = normalize8(v[j], __ldg(weight + VECTOR(j)), rstd);
      store_stream(y + VECTOR(j), modulate8(n, load_scale(a, VECTOR(j)), load_table(b, VECTOR(j))));
    }
}
