// What every kernel of the pack uses: packed bf16 arithmetic with explicit rounding, and memory access that streams.
//
// NVRTC compiles these sources without any header (none is there on a user's machine), so bf16 is handled as two values packed into
// 32 bits (low half first, as in memory) and the conversions are inline PTX. Needs sm_80 (cvt.rn.bf16x2.f32).
//
// Switches, defined by the Python side in front of the source:
//   FORCE_FMA 1   use the sm_80..89 form of bmul / badd on any chip (tests)
//   GATE_TWICE 1  the gated product rounds to bf16 before it is added (diffusers) instead of being fused into the sum (ComfyUI)
#pragma once

typedef unsigned int u32;
typedef long long i64;
#define DEV static __device__ __forceinline__
#define FULL 0xffffffffu  // every lane of the warp takes part in a shuffle

#ifndef FORCE_FMA
#define FORCE_FMA 0
#endif

// ---- bf16 pairs <-> fp32 ----------------------------------------------------------------------------------------------------
DEV float lo(u32 pair) { return __uint_as_float(pair << 16); }
DEV float hi(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// Both values to bf16, round to nearest even; NaN becomes 0x7fff, as in torch's conversion on CUDA.
DEV u32 pk(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// ---- bf16 pair arithmetic, one rounding per operation -------------------------------------------------------------------------
// torch computes bf16 * and + in fp32 and rounds the result to bf16. A single bf16 rounding of the exact result is the same value
// (fp32 has 24 >= 2 * 8 + 2 significant bits, so its own rounding never moves the bf16 result). Written as asm, a product is never
// contracted with a following sum into one fma, which would round once where torch rounds twice.
// sm_80..89 lack mul/add.bf16x2: a * b is fma(a, b, -0) and a + b is fma(a, 1, b), exact and signed alike.
#if __CUDA_ARCH__ >= 900 && !FORCE_FMA
DEV u32 bmul(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
DEV u32 badd(u32 a, u32 b) {
  u32 r;
  asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
#else
DEV u32 bmul(u32 a, u32 b) {
  u32 r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000u));
  return r;
}
DEV u32 badd(u32 a, u32 b) {
  u32 r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(0x3f803f80u), "r"(b));
  return r;
}
#endif
#define BF16_ONES 0x3f803f80u

DEV uint4 bmul4(uint4 a, uint4 b) { return make_uint4(bmul(a.x, b.x), bmul(a.y, b.y), bmul(a.z, b.z), bmul(a.w, b.w)); }
DEV uint4 badd4(uint4 a, uint4 b) { return make_uint4(badd(a.x, b.x), badd(a.y, b.y), badd(a.z, b.z), badd(a.w, b.w)); }

// bf16(o * g + x) with one fp32 rounding of the fused sum, then one bf16 rounding: what addcmul_ does for bf16 on CUDA.
// With GATE_TWICE bf16(x + bf16(g * o)): what `x + g * o` does.
#ifndef GATE_TWICE
#define GATE_TWICE 0
#endif
DEV u32 gate2(u32 x, u32 o, u32 g) {
#if GATE_TWICE
  return badd(x, bmul(g, o));
#else
  return pk(__fmaf_rn(lo(o), lo(g), lo(x)), __fmaf_rn(hi(o), hi(g), hi(x)));
#endif
}
DEV uint4 gate8(uint4 x, uint4 o, uint4 g) {
  return make_uint4(gate2(x.x, o.x, g.x), gate2(x.y, o.y, g.y), gate2(x.z, o.z, g.z), gate2(x.w, o.w, g.w));
}

// RMSNorm's last step, bf16(weight * (rstd * x)): two rounded fp32 products, one rounding to bf16.
DEV u32 normalize2(u32 x, u32 weight, float rstd) {
  return pk(__fmul_rn(lo(weight), __fmul_rn(rstd, lo(x))), __fmul_rn(hi(weight), __fmul_rn(rstd, hi(x))));
}
DEV uint4 normalize8(uint4 x, uint4 weight, float rstd) {
  return make_uint4(normalize2(x.x, weight.x, rstd), normalize2(x.y, weight.y, rstd),
                    normalize2(x.z, weight.z, rstd), normalize2(x.w, weight.w, rstd));
}

// ---- memory ---------------------------------------------------------------------------------------------------------------------
// Activations are read once and written once: keep them out of L1, and let written lines leave L2 first.
DEV uint4 load_stream(const void* p) {
  uint4 r;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p));
  return r;
}
DEV void store_stream(void* p, uint4 v) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1,%2,%3,%4};" :: "l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w));
}
DEV void store_plain(void* p, uint4 v) { *(uint4*)p = v; }

// Opaque to the compiler: values loaded as packed bf16 stay packed in registers across this point. Without it the unpacked floats
// of a whole row are kept alive and the kernel spills.
#define HIDE(v) asm volatile("" : "+r"((v).x), "+r"((v).y), "+r"((v).z), "+r"((v).w))

// ---- AdaLN tables ---------------------------------------------------------------------------------------------------------------
// Eight table entries as bf16. TABLE_F32 tables (curve checkpoints) are rounded here, as stock's `.to(h.dtype)` does.
#ifdef TABLE_F32
#if TABLE_F32
typedef float table_t;
DEV uint4 load_table(const table_t* row, int vector) {
  const float4* p = (const float4*)row + 2 * vector;
  float4 a = __ldg(p), b = __ldg(p + 1);
  return make_uint4(pk(a.x, a.y), pk(a.z, a.w), pk(b.x, b.y), pk(b.z, b.w));
}
#else
typedef unsigned short table_t;
DEV uint4 load_table(const table_t* row, int vector) { return __ldg((const uint4*)row + vector); }
#endif

// bf16(1 + scale)
DEV uint4 load_scale(const table_t* row, int vector) {
  uint4 s = load_table(row, vector);
  return make_uint4(badd(s.x, BF16_ONES), badd(s.y, BF16_ONES), badd(s.z, BF16_ONES), badd(s.w, BF16_ONES));
}
// bf16(bf16(h * (1 + scale)) + shift)
DEV uint4 modulate8(uint4 h, uint4 one_plus_scale, uint4 shift) { return badd4(bmul4(h, one_plus_scale), shift); }
#endif
