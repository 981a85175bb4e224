// RMSNorm (with GATE after the gated residual, x in place), modulation, and either the amax of the result together with each row's rstd (PACK 0;
// modulate_nvfp4.cu then packs), or, when the tensor scale is given, the packed result itself (PACK 1): one pass over x.
//
// One row per block of 64 threads; with PACK 1 also the rows of the padding. Defines besides those of nvfp4.cuh and rms.cuh: N = K, GATE,
// PACK, MIN_BLOCKS per SM.
#include "common.cuh"
#include "rms.cuh"
#include "nvfp4.cuh"

extern "C" __global__ void __launch_bounds__(64, MIN_BLOCKS)
norm_modulate_nvfp4(unsigned short* x, const unsigned short* other, const table_t* gate, const uint4* __restrict__ weight,
                    const table_t* scale, const table_t* shift, const int* __restrict__ rows, float* rstd_out, u32* amax, float* g,
                    unsigned char* q, unsigned char* scales,
                    i64 x_stride, i64 other_stride, i64 gate_stride, i64 scale_stride, i64 shift_stride, int n_rows, float eps) {
  const int row = blockIdx.x;
#if PACK
  const float tensor = __ldg(g), reciprocal = rcpz(tensor);
  if (row >= n_rows) {
    u32 byte;
    block_scale(0.f, tensor, reciprocal, byte);
    const bool quantised = row < ((n_rows + 15) & ~15);
#pragma unroll
    for (int j = 0; j < STEPS; j++) {
      if (quantised && INSIDE(j)) *(u32*)(q + row * (i64)(K / 2) + VECTOR(j) * 4) = 0;
      if ((threadIdx.x & 7) == 0 && VECTOR(j) < SCALE_WORDS * 8) {
        const int left = BLOCKS - VECTOR(j) / 2;  // blocks of this word that exist
        *(u32*)(scales + scale_offset(row, VECTOR(j) / 8)) = quantised ? byte * 0x01010101u & (0xffffffffu >> (left < 4 ? 32 - 8 * left : 0)) : 0u;
      }
    }
    return;
  }
#else
  const u32 seen = peek(amax);
#endif
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
#if PACK
#pragma unroll
  for (int j = 0; j < STEPS; j++) {
    uint4 y = make_uint4(0, 0, 0, 0);
    if (INSIDE(j)) y = modulate8(normalize8(v[j], __ldg(weight + VECTOR(j)), rstd), load_scale(a, VECTOR(j)), load_table(b, VECTOR(j)));
    bool special;
    u32 m = amax8(y, special), byte;  // of half a block: its other half is in the neighbouring lane
    m = max2(m, __shfl_xor_sync(FULL, m, 1));
    const float enc = block_scale(max_of_pair(m), tensor, reciprocal, byte);
    if (INSIDE(j)) *(u32*)(q + row * (i64)(K / 2) + VECTOR(j) * 4) = e2m1x8(y, enc, special);
    else byte = 0;
    byte <<= 8 * ((threadIdx.x >> 1) & 3);
    byte |= __shfl_xor_sync(FULL, byte, 2);
    byte |= __shfl_xor_sync(FULL, byte, 4);
    if ((threadIdx.x & 7) == 0 && VECTOR(j) < SCALE_WORDS * 8) *(u32*)(scales + scale_offset(row, VECTOR(j) / 8)) = byte;
  }
#else
  u32 m = 0;
#pragma unroll
  for (int j = 0; j < STEPS; j++)
    if (INSIDE(j)) {
      const uint4 y = abs8(modulate8(normalize8(v[j], __ldg(weight + VECTOR(j)), rstd), load_scale(a, VECTOR(j)), load_table(b, VECTOR(j))));
      m = max2_nan(m, max2_nan(max2_nan(y.x, y.y), max2_nan(y.z, y.w)));
    }
  merge_amax<2>(m, amax, seen);
  if (threadIdx.x == 0) rstd_out[row] = rstd;
#endif
}
