// h = bf16(bf16(h * bf16(1 + scale)) + shift), in place, one table row per token.
//
// A block owns THREADS * 8 columns and walks down `rows_per_block` tokens, so a table row is read once per run of tokens that use it
// instead of once per token. BATCH tokens are loaded ahead of the arithmetic.
//
// Defines: N row width, THREADS, TABLE_F32.
#include "common.cuh"

#define NV (N / 8)
#define CHUNKS ((NV + THREADS - 1) / THREADS)
#define BATCH 4

extern "C" __global__ void __launch_bounds__(THREADS)
modulate(unsigned short* h, const table_t* scale, const table_t* shift, const int* __restrict__ rows,
         i64 h_stride, i64 scale_stride, i64 shift_stride, int n_rows, int rows_per_block) {
  const int column = (blockIdx.x % CHUNKS) * THREADS + threadIdx.x;
  const int first = (blockIdx.x / CHUNKS) * rows_per_block;
  const int last = min(first + rows_per_block, n_rows);
  if (column >= NV) return;

  int current = -1;
  uint4 a, b;
  for (int r = first; r < last; r += BATCH) {
    uint4 v[BATCH];
    int row[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; i++)
      if (r + i < last) {
        row[i] = __ldg(rows + r + i);
        v[i] = load_stream((const uint4*)(h + (r + i) * h_stride) + column);
      }
#pragma unroll
    for (int i = 0; i < BATCH; i++)
      if (r + i < last) {
        if (row[i] != current) {
          current = row[i];
          a = load_scale(scale + current * scale_stride, column);
          b = load_table(shift + current * shift_stride, column);
        }
        store_stream((uint4*)(h + (r + i) * h_stride) + column, modulate8(v[i], a, b));
      }
  }
}
