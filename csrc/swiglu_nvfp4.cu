// swiglu of [gate | up] rows, packed as NVFP4; with PACK 0 the amax pass in front of it. The activation is computed in both passes.
//
// Defines besides those of nvfp4.cuh: FAST_SILU. 0: torch's own silu, g / (1 + expf(-g)). 1: two approximate instructions; its result is rounded
// to bf16, and the Python side has compared all 65536 inputs with torch on this very chip before choosing it.
#include "common.cuh"
#include "nvfp4.cuh"

DEV float silu(float g) {
#if FAST_SILU
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(__fmul_rn(g, -1.4426950408889634f)));
  return __fmul_rn(__fmul_rn(g, 0.25f), rcpz(__fmaf_rn(e, 0.25f, 0.25f)));  // a quarter of everything: the reciprocal stays above the flushed range
#else
  return __fdiv_rn(g, __fadd_rn(1.0f, expf(-g)));
#endif
}
DEV u32 swiglu2(u32 gate, u32 up) { return bmul(pk(silu(lo(gate)), silu(hi(gate))), up); }
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
