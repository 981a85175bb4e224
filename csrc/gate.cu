// x = bf16(fma(other, bf16(gate), x)), in place, one table row per token: the bytes of torch's addcmul_ on bf16, which computes in fp32 and
// lets the compiler fuse the product into the sum.
//
// Same walk as modulate.cu: a block owns THREADS * 8 columns and reads a gate row once per run of tokens that use it.
//
// Defines: N row width, THREADS, TABLE_F32, and GATE_TWICE for bf16(x + bf16(gate * other)).
#include "common.cuh"

#define NV (N / 8)
#define CHUNKS ((NV + THREADS - 1) / THREADS)
#define BATCH 4

extern "C" __global__ void __launch_bounds__(THREADS)
gate(unsigned short* x, const unsigned short* other, const table_t* gate_table, const int* __restrict__ rows,
     i64 x_stride, i64 other_stride, i64 gate_stride, int n_rows, int rows_per_block) {
  const int column = (blockIdx.x % CHUNKS) * THREADS + threadIdx.x;
  const int first = (blockIdx.x / CHUNKS) * rows_per_block;
  const int last = min(first + rows_per_block, n_rows);
  if (column >= NV) return;

  int current = -1;
  uint4 g;
  for (int r = first; r < last; r += BATCH) {
    uint4 v[BATCH], o[BATCH];
    int row[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; i++)
      if (r + i < last) {
        row[i] = __ldg(rows + r + i);
        v[i] = load_stream((const uint4*)(x + (r + i) * x_stride) + column);
        o[i] = load_stream((const uint4*)(other + (r + i) * other_stride) + column);
      }
#pragma unroll
    for (int i = 0; i < BATCH; i++)
      if (r + i < last) {
        if (row[i] != current) {
          current = row[i];
          g = load_table(gate_table + current * gate_stride, column);
        }
        store_stream((uint4*)(x + (r + i) * x_stride) + column, gate8(v[i], o[i], g));
      }
  }
}
