// Modulation packed as NVFP4; with PACK 0 the amax pass in front of it. With NORM the input is the un-normed stream and `rstd` holds one
// reciprocal root mean square per token, left by norm_modulate_nvfp4.cu (which is also the amax pass then).
//
// Defines besides those of nvfp4.cuh: NORM, TABLE_F32.
#include "common.cuh"
#include "nvfp4.cuh"

struct Modulated {
  const unsigned short* x;
  const table_t *scale, *shift;
  const int* rows;
  i64 x_stride, scale_stride, shift_stride;
  int current;
  uint4 scale_a, scale_b, shift_a, shift_b;
#if NORM
  const float* rstd;
  uint4 weight_a, weight_b;
  struct Raw { uint4 a, b; int table_row; float rstd; };
#else
  struct Raw { uint4 a, b; int table_row; };
#endif
  DEV_METHOD void load(Raw& raw, int row, int block) const {
    raw.table_row = __ldg(rows + row);
#if NORM
    raw.rstd = __ldg(rstd + row);
#endif
    const uint4* p = (const uint4*)(x + row * x_stride) + 2 * block;
    raw.a = load16(p), raw.b = load16(p + 1);
  }
  DEV_METHOD void finish(const Raw& raw, int block, uint4& a, uint4& b) {
    if (raw.table_row != current) {
      current = raw.table_row;
      const table_t *one = scale + current * scale_stride, *two = shift + current * shift_stride;
      scale_a = load_scale(one, 2 * block), scale_b = load_scale(one, 2 * block + 1);
      shift_a = load_table(two, 2 * block), shift_b = load_table(two, 2 * block + 1);
    }
    a = raw.a, b = raw.b;
#if NORM
    a = normalize8(a, weight_a, raw.rstd), b = normalize8(b, weight_b, raw.rstd);
#endif
    a = modulate8(a, scale_a, shift_a), b = modulate8(b, scale_b, shift_b);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS)
modulate_nvfp4(const unsigned short* x, const uint4* weight, const float* rstd, const table_t* scale, const table_t* shift, const int* rows,
               u32* amax, float* g, unsigned char* q, unsigned char* scales,
               i64 x_stride, i64 scale_stride, i64 shift_stride, int n_rows, int rows_per_block) {
  Modulated source;
  source.x = x, source.scale = scale, source.shift = shift, source.rows = rows;
  source.x_stride = x_stride, source.scale_stride = scale_stride, source.shift_stride = shift_stride;
  source.current = -1;
#if NORM
  const int block = min((int)((blockIdx.x % STRIPS) * THREADS + threadIdx.x), BLOCKS - 1);
  source.rstd = rstd;
  source.weight_a = __ldg(weight + 2 * block), source.weight_b = __ldg(weight + 2 * block + 1);
#endif
  walk(source, n_rows, rows_per_block, amax, g, q, scales);
}
