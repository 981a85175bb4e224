// NVFP4 packing with the bytes of comfy-kitchen's CUDA kernel; the contract is written out in kernels/nvfp4_quantize.py. Follows common.cuh.
//
// Two layers: the arithmetic of one 16-column block (amax, E4M3 scale, E2M1 codes), and a walk over a strip of the matrix for sources whose
// values need nothing but their own column and row. A strip is THREADS blocks wide; each thread owns one block of 16 columns and walks down
// `rows_per_block` tokens, so that a table row is read once per run of tokens that use it.
//
// Defines: K columns (multiple of 16), DYNAMIC (tensor scale from the amax pass), FORCE_SOFTWARE 1: conversions without the E2M1 and E4M3
// instructions on any chip (tests). For the strip also THREADS, BATCH (tokens loaded ahead of the arithmetic), PACK (0: amax pass, 1: packing).

#define DEV_METHOD __device__ __forceinline__
#ifndef FORCE_SOFTWARE
#define FORCE_SOFTWARE 0
#endif
// ptxas 12.8 and 12.9 lose one of two e4m3x2 results that are used both merged and on their own: the instruction from 13.0 on only.
#define HARDWARE_E4M3 (__CUDA_ARCH__ >= 890 && __CUDACC_VER_MAJOR__ >= 13 && !FORCE_SOFTWARE)
#define HARDWARE_E2M1 (__CUDA_ARCH__ >= 1000 && !FORCE_SOFTWARE)

#define BLOCKS (K / 16)                // scales of a row
#define SCALE_WORDS ((BLOCKS + 3) / 4)  // 4 neighbouring scales of a row are one 32-bit word of the swizzled layout

// ---- one block --------------------------------------------------------------------------------------------------------------------
// kitchen is built with --use_fast_math: every fp32 operation flushes subnormals and the reciprocal is the approximate one.
DEV float mulz(float a, float b) { float r; asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
DEV float minz(float a, float b) { float r; asm("min.ftz.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }  // of a number and NaN: the number
DEV float rcpz(float a) { float r; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a)); return r; }
DEV u32 max2(u32 a, u32 b) { u32 r; asm("max.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }           // passes over NaN
DEV u32 max2_nan(u32 a, u32 b) { u32 r; asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }   // propagates NaN

DEV uint4 abs8(uint4 v) { return make_uint4(v.x & 0x7fff7fffu, v.y & 0x7fff7fffu, v.z & 0x7fff7fffu, v.w & 0x7fff7fffu); }

// E4M3 byte of 0 <= s <= 448, round to nearest even. Adding a power of two 2^20 times the binade (at least 2^-6, where E4M3's spacing becomes
// constant) rounds s to a multiple of E4M3's spacing; the integer difference is the count of spacings, to which each binade adds 8.
DEV u32 e4m3_byte(float s) {
#if HARDWARE_E4M3
  unsigned short pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.f), "f"(s));
  return pair;
#else
  const u32 binade = max(__float_as_uint(s) & 0x7f800000u, 0x3c800000u);
  const u32 magic = binade + 0x0a000000u;
  return __float_as_uint(__fadd_rn(s, __uint_as_float(magic))) - magic + ((binade - 0x3c800000u) >> 20);
#endif
}

// Value of an E4M3 byte without sign: its bits as fp32 exponent and mantissa (a subnormal stays one), times 2^120.
DEV float e4m3_value(u32 byte) { return __fmul_rn(__uint_as_float(byte << 20), 1.329227995784916e36f); }

// What a block's elements are multiplied by before E2M1, and its scale byte. `reciprocal` is rcpz(g).
DEV float block_scale(float amax, float g, float reciprocal, u32& byte) {
  byte = e4m3_byte(minz(mulz(mulz(amax, 0.16666667163372040f), reciprocal), 448.f));
  return minz(rcpz(mulz(g, e4m3_value(byte))), 3.4028234663852886e38f);
}

#if HARDWARE_E2M1
DEV u32 e2m1x8(uint4 v, float enc, bool) {
  u32 codes;
  asm("{\n.reg .b8 b0, b1, b2, b3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b0, %1, %2;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b1, %3, %4;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b2, %5, %6;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b3, %7, %8;\n"
      "mov.b32 %0, {b0, b1, b2, b3};\n}"
      : "=r"(codes)
      : "f"(mulz(lo(v.x), enc)), "f"(mulz(hi(v.x), enc)), "f"(mulz(lo(v.y), enc)), "f"(mulz(hi(v.y), enc)),
        "f"(mulz(lo(v.z), enc)), "f"(mulz(hi(v.z), enc)), "f"(mulz(lo(v.w), enc)), "f"(mulz(hi(v.w), enc)));
  return codes;
}
#else
// The codes 0..7 stand for 0, .5, 1, 1.5, 2, 3, 4, 6, so code = round(min(2a, a + 2, a / 2 + 4, 7)), and ties go to the even code exactly when
// they go to the even integer. Rounding is monotone, so each line may be rounded before the minimum: adding 1.5 * 2^23 does that with one
// rounding of the exact sum. As integers these sums order like the floats they are, and NaN lies above all of them: code 7.
#define MAGIC 12582912.f
#define MAGIC_BITS 0x4b400000u
DEV u32 magnitude_code(float a) {  // MAGIC_BITS + code
  const int line = __vimin3_s32(__float_as_int(__fmaf_rn(a, 2.f, MAGIC)), __float_as_int(__fadd_rn(a, MAGIC + 2.f)),
                                __float_as_int(__fmaf_rn(a, .5f, MAGIC + 4.f)));
  return min(line, (int)MAGIC_BITS + 7);
}
// The signs come from the input; an element whose product is NaN (NaN itself, or an infinity times 0) must become +6, so it loses its sign first.
DEV u32 drop_signs(u32 pair, u32 from) {
  if ((pair & 0x7fffu) >= from) pair &= 0xffff7fffu;
  if ((pair >> 16 & 0x7fffu) >= from) pair &= 0x7fffffffu;
  return pair;
}
// Eight codes, the element of an even column in the high half of its byte. `special`: there is an infinity or NaN among them.
DEV u32 e2m1x8(uint4 v, float enc, bool special) {
  if (special) {
    const u32 from = enc == 0.f ? 0x7f80u : 0x7f81u;
    v = make_uint4(drop_signs(v.x, from), drop_signs(v.y, from), drop_signs(v.z, from), drop_signs(v.w, from));
  }
  const uint4 a = abs8(v);
  u32 codes = magnitude_code(mulz(lo(a.w), enc));
  codes = codes * 16 + magnitude_code(mulz(hi(a.w), enc));
  codes = codes * 16 + magnitude_code(mulz(lo(a.z), enc));
  codes = codes * 16 + magnitude_code(mulz(hi(a.z), enc));
  codes = codes * 16 + magnitude_code(mulz(lo(a.y), enc));
  codes = codes * 16 + magnitude_code(mulz(hi(a.y), enc));
  codes = codes * 16 + magnitude_code(mulz(lo(a.x), enc));
  codes = codes * 16 + magnitude_code(mulz(hi(a.x), enc));
  codes -= MAGIC_BITS * 0x11111111u;
  const u32 xy = __byte_perm(v.x, v.y, 0x7351), zw = __byte_perm(v.z, v.w, 0x7351);  // sign bytes: low of either word, high of either word
  const u32 even = __byte_perm(xy, zw, 0x5410), odd = __byte_perm(xy, zw, 0x7632);
  return codes | (even & 0x80808080u) | ((odd >> 4) & 0x08080808u);
}
#endif

// Largest magnitudes of packed values, NaN ignored (NaN where there is nothing else).
DEV u32 amax8(uint4 v, bool& special) {
  const uint4 a = abs8(v);
#if HARDWARE_E2M1
  special = false;  // the instruction needs no help
#else
  const u32 m = max2_nan(max2_nan(a.x, a.y), max2_nan(a.z, a.w));
  special = (m & 0x7fffu) >= 0x7f80u || m >= 0x7f800000u;
  if (!special) return m;
#endif
  return max2(max2(a.x, a.y), max2(a.z, a.w));
}
DEV float max_of_pair(u32 pair) { return lo(max2(pair, pair >> 16)); }

// Byte offset of the scale word of 4 blocks: 128 x 4 tiles of 512 bytes; in a tile row r % 32 has 16 bytes, 4 for each of r / 32 % 4.
DEV i64 scale_offset(int row, int word) {
  return ((i64)(row >> 7) * SCALE_WORDS + word) * 512 + (row & 31) * 16 + ((row >> 5) & 3) * 4;
}

// ---- tensor scale -----------------------------------------------------------------------------------------------------------------
// The amax pass leaves the fp32 bits of the largest magnitude in a zeroed word: as integers they order like the values, NaN above all.
DEV float tensor_scale(const u32* amax, float* g) {
#if DYNAMIC
  // torch divides by multiplying with fp32(1 / 2688), rounds to bf16, then widens
  const float scaled = __fmul_rn(__uint_as_float(__ldg(amax)), 3.7202381645329297e-04f);
  const float scale = lo(pk(scaled, scaled));
  if (blockIdx.x == 0 && threadIdx.x == 0) *g = scale;
  return scale;
#else
  return __ldg(g);
#endif
}

// `pair`: the packed magnitudes' maximum of this thread, NaN kept. `seen` is *amax at some earlier time: most blocks need no atomic.
template <int WARPS>
DEV void merge_amax(u32 pair, u32* amax, u32 seen) {
  __shared__ u32 of_warp[WARPS];
  u32 m = __reduce_max_sync(FULL, max(pair & 0xffffu, pair >> 16));
  if (WARPS > 1) {
    if ((threadIdx.x & 31) == 0) of_warp[threadIdx.x >> 5] = m;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    m = __reduce_max_sync(FULL, threadIdx.x < WARPS ? of_warp[threadIdx.x] : 0u);
  }
  if (threadIdx.x == 0 && (m << 16) > seen) atomicMax(amax, m << 16);
}
DEV u32 peek(const u32* p) { u32 r; asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(r) : "l"(p)); return r; }

#ifdef THREADS
// ---- strips -----------------------------------------------------------------------------------------------------------------------
// The including source defines `struct Source` with a Raw type, `load(raw, row, block)` (loads only) and `finish(raw, a, b)`: the 16 bf16
// values to quantise. Threads right of the last block take part with zeros.
#define STRIPS ((SCALE_WORDS * 4 + THREADS - 1) / THREADS)

DEV uint4 load16(const uint4* p) {  // the two halves of 32 bytes are separate loads of one sector: L1 serves the second
  uint4 r;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p));
  return r;
}

#if !PACK
template <class Source>
DEV void walk(Source& source, int n_rows, int rows_per_block, u32* amax, float*, unsigned char*, unsigned char*) {
  const u32 seen = peek(amax);
  const int block = (blockIdx.x % STRIPS) * THREADS + threadIdx.x;
  const int first = (blockIdx.x / STRIPS) * rows_per_block, last = min(first + rows_per_block, n_rows);
  u32 m = 0;
  if (block < BLOCKS)
    for (int r = first; r < last; r += BATCH) {
      typename Source::Raw raw[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; i++)
        if (r + i < last) source.load(raw[i], r + i, block);
#pragma unroll
      for (int i = 0; i < BATCH; i++)
        if (r + i < last) {
          uint4 a, b;
          source.finish(raw[i], block, a, b);
          a = abs8(a), b = abs8(b);
          m = max2_nan(m, max2_nan(max2_nan(max2_nan(a.x, a.y), max2_nan(a.z, a.w)), max2_nan(max2_nan(b.x, b.y), max2_nan(b.z, b.w))));
        }
    }
  merge_amax<THREADS / 32>(m, amax, seen);
}
#else
// Covers the rows of the swizzled scales, a multiple of 128: tokens, then the quantised padding up to 16 (zeros), then zero scales.
template <class Source>
DEV void walk(Source& source, int n_rows, int rows_per_block, const u32* amax, float* scale, unsigned char* q, unsigned char* scales) {
  const float g = tensor_scale(amax, scale), reciprocal = rcpz(g);
  const int block = (blockIdx.x % STRIPS) * THREADS + threadIdx.x;
  const int first = (blockIdx.x / STRIPS) * rows_per_block;
  const int padded = (n_rows + 15) & ~15, last = min(first + rows_per_block, (n_rows + 127) & ~127);
  const bool inside = block < BLOCKS;
  if ((block & ~31) >= SCALE_WORDS * 4) return;  // a warp beyond the last scale word
  for (int r = first; r < last; r += BATCH) {
    typename Source::Raw raw[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; i++)
      if (inside && r + i < n_rows) source.load(raw[i], r + i, block);
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const int row = r + i;
      if (row >= last) break;  // the same for the whole block
      uint4 a = make_uint4(0, 0, 0, 0), b = a;
      if (inside && row < n_rows) source.finish(raw[i], block, a, b);
      u32 byte;
      bool special_a, special_b;
      const u32 m = max2(amax8(a, special_a), amax8(b, special_b));
      const float enc = block_scale(max_of_pair(m), g, reciprocal, byte);
      if (inside && row < padded) *(uint2*)(q + (i64)row * (K / 2) + block * 8) = make_uint2(e2m1x8(a, enc, special_a), e2m1x8(b, enc, special_b));
      if (!inside || row >= padded) byte = 0;
      byte <<= 8 * (threadIdx.x & 3);
      byte |= __shfl_xor_sync(FULL, byte, 1);
      byte |= __shfl_xor_sync(FULL, byte, 2);
      if ((threadIdx.x & 3) == 0 && block < SCALE_WORDS * 4) *(u32*)(scales + scale_offset(row, block >> 2)) = byte;
    }
  }
}
#endif
#endif
