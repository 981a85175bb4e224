// swiglu of [gate | up] rows, packed as NVFP4; with PACK 0 the amax pass in front of it. The activation is computed in both passes.
//
// Defines besides those of nvfp4.cuh: FAST_SILU, chosen when its bf16 equals torch's for every input on the device at hand (silu.cuh).
#include "common.cuh"
#include "nvfp4.cuh"
#include "silu.cuh"

#if FAST_SILU
#define SILU silu_fast
#else
#define SILU silu_exact
#endif
DEV u32 swiglu2(u32 gate, u32 up) { return bmul(pk(SILU(lo(gate)), SILU(hi(gate))), up); }
DEV uint4 swiglu8(uint4 gate, uint4 up) {
  return make_uint4(swiglu2(gate.x, up.x), swiglu2(gate.y, up.y), swiglu2(gate.z, up.z), swiglu2(gate.w, up.w));
}

struct Swiglu {
  const unsigned short* gate_up;
  i64 stride;
  struct Raw { uint4 gate_a, gate_b, up_a, up_b; };
  DEV_METHOD void load(Raw& raw, int row, int block) const {
    const uint4* p = (const uint4*)(gate_up + row * stride) + 2 * block;
    raw.gate_a = load16(p), raw.gate_b = load16(p + 1);
    raw.up_a = load16(p + K / 8), raw.up_b = load16(p + K / 8 + 1);
  }
  DEV_METHOD void finish(const Raw& raw, int, uint4& a, uint4& b) const {
    a = swiglu8(raw.gate_a, raw.up_a), b = swiglu8(raw.gate_b, raw.up_b);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS)
swiglu_nvfp4(const unsigned short* gate_up, u32* amax, float* scale, unsigned char* q, unsigned char* scales,
             i64 stride, int n_rows, int rows_per_block) {
  Swiglu source{gate_up, stride};
  walk(source, n_rows, rows_per_block, amax, scale, q, scales);
}
