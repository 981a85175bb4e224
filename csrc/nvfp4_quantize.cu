// Packs a bf16 matrix as NVFP4; with PACK 0 the amax pass in front of it.
#include "common.cuh"
#include "nvfp4.cuh"

struct Plain {
  const unsigned short* x;
  i64 stride;
  struct Raw { uint4 a, b; };
  DEV_METHOD void load(Raw& raw, int row, int block) const {
    const uint4* p = (const uint4*)(x + row * stride) + 2 * block;
    raw.a = load16(p), raw.b = load16(p + 1);
  }
  DEV_METHOD void finish(const Raw& raw, int, uint4& a, uint4& b) const { a = raw.a, b = raw.b; }
};

extern "C" __global__ void __launch_bounds__(THREADS)
nvfp4_quantize(const unsigned short* x, u32* amax, float* scale, unsigned char* q, unsigned char* scales,
               i64 x_stride, int n_rows, int rows_per_block) {
  Plain source{x, x_stride};
  walk(source, n_rows, rows_per_block, amax, scale, q, scales);
}
