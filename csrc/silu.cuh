// silu(g) to be rounded to bf16 afterwards. Follows common.cuh.

// As torch computes it: g / (1 + expf(-g)), IEEE division.
DEV float silu_exact(float g) { return __fdiv_rn(g, __fadd_rn(1.0f, expf(-g))); }

// With two approximate instructions. Everything is taken by a quarter, so that the reciprocal stays above the range that is flushed to zero.
// Its bf16 equals torch's for every bf16 input where kernels/swiglu_nvfp4.py found so on the device at hand.
DEV float silu_fast(float g) {
  float e, r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(__fmul_rn(g, -1.4426950408889634f)));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(__fmaf_rn(e, 0.25f, 0.25f)));
  return __fmul_rn(__fmul_rn(g, 0.25f), r);
}
