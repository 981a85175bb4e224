// silu_fast of packed bf16 values, for the comparison with torch over all inputs.
#include "common.cuh"
#include "silu.cuh"

extern "C" __global__ void fast_silu(const unsigned short* in, unsigned short* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const float y = silu_fast(lo(in[i]));
  out[i] = (unsigned short)pk(y, y);
}
