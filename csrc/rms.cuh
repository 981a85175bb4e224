// RMSNorm of one row by two warps, with the bytes of torch's CUDA kernel. Follows common.cuh.
//
// Torch's fused RMSNorm (vectorized_layer_norm_kernel, 2.9 and later) gives one row to a block of 4 warps, 128 threads:
//   1. The row is cut into groups of 4 consecutive elements; thread t owns the groups t, t + 128, t + 256, ...
//   2. Each thread has one fp32 accumulator, from 0, over its elements in rising order: acc = fma(v, v, acc).
//   3. Inside a warp a tree: lane l adds lane l + d for d = 16, 8, 4, 2, 1. Lane 0 then holds the warp's sum W.
//   4. Across warps (W0 + W2) + (W1 + W3).
//   5. rstd = rsqrt.approx(sum / N + eps) with an IEEE division.
//   6. y = bf16(weight * (rstd * x)): two rounded fp32 products, one rounding to bf16.
//
// The layout here keeps every accumulator of step 2 in one lane but loads 16 bytes at a time. Cut the row into vectors of 8 elements; vector
// u + 32m belongs to lane u. It holds the groups 2u + 64m and 2u + 1 + 64m, so with even m it feeds torch's threads t = 2u and 2u + 1
// (torch warps 0 and 1), with odd m t = 64 + 2u and 65 + 2u (torch warps 2 and 3). Two warps share a row, one takes the even m, one the odd, and
// each lane keeps two accumulators. Adding over lane distances 8, 4, 2, 1 here is torch's tree over 16, 8, 4, 2; adding a lane's two
// accumulators is torch's distance 1; lanes 0..15 then hold W0 (or W2), lanes 16..31 W1 (or W3). A butterfly gives every lane what the tree
// gives lane 0, because each addition has the same two operands.
// A row that does not fill the last vector group reads zeros there: fma(0, 0, acc) = acc.
//
// Blocks have 64 threads and one row each. Defines: N row width (multiple of 8), and for gate_row TABLE_F32 and AHEAD.

#define NV (N / 8)
#define STEPS ((NV + 63) / 64)  // vectors per lane
#define VECTOR(j) ((int)(threadIdx.x & 31) + 32 * (2 * (j) + (int)(threadIdx.x >> 5)))  // this lane's j-th vector
#define INSIDE(j) (NV % 64 == 0 || VECTOR(j) < NV)

DEV void add_squares(float& acc, u32 pair) {
  acc = __fmaf_rn(lo(pair), lo(pair), acc);
  acc = __fmaf_rn(hi(pair), hi(pair), acc);
}

DEV void load_row(uint4 (&v)[STEPS], const uint4* x) {
#pragma unroll
  for (int j = 0; j < STEPS; j++) v[j] = INSIDE(j) ? load_stream(x + VECTOR(j)) : make_uint4(0, 0, 0, 0);
}

// v = gate(v, other), also written to x. Loads of `other` are issued AHEAD vectors before their use: volatile loads are not moved across stores.
#ifdef AHEAD
DEV void gate_row(uint4 (&v)[STEPS], uint4* x, const uint4* other, const table_t* gate) {
  uint4 o[2][AHEAD];
#pragma unroll
  for (int i = 0; i < AHEAD; i++)
    if (i < STEPS && INSIDE(i)) o[0][i] = load_stream(other + VECTOR(i));
#pragma unroll
  for (int c = 0; c < (STEPS + AHEAD - 1) / AHEAD; c++) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int j = (c + 1) * AHEAD + i;
      if (j < STEPS && INSIDE(j)) o[(c + 1) & 1][i] = load_stream(other + VECTOR(j));
    }
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int j = c * AHEAD + i;
      if (j < STEPS && INSIDE(j)) {
        v[j] = gate8(v[j], o[c & 1][i], load_table(gate, VECTOR(j)));
        store_stream(x + VECTOR(j), v[j]);
      }
    }
  }
}
#endif

// Steps 2 to 5; every thread gets the result.
DEV float row_rstd(uint4 (&v)[STEPS], float eps) {
#pragma unroll
  for (int j = 0; j < STEPS; j++) HIDE(v[j]);
  float p0 = 0.f, p1 = 0.f;
#pragma unroll
  for (int j = 0; j < STEPS; j++) {
    add_squares(p0, v[j].x);
    add_squares(p0, v[j].y);
    add_squares(p1, v[j].z);
    add_squares(p1, v[j].w);
  }
#pragma unroll
  for (int d = 8; d; d >>= 1) {
    p0 = __fadd_rn(p0, __shfl_xor_sync(FULL, p0, d));
    p1 = __fadd_rn(p1, __shfl_xor_sync(FULL, p1, d));
  }
  __shared__ float w[4];
  if ((threadIdx.x & 15) == 0) w[threadIdx.x >> 4] = __fadd_rn(p0, p1);  // W0, W1, W2, W3
  __syncthreads();
  const float sum = __fadd_rn(__fadd_rn(w[0], w[2]), __fadd_rn(w[1], w[3]));
#pragma unroll
  for (int j = 0; j < STEPS; j++) HIDE(v[j]);
  return rsqrtf(__fadd_rn(__fdiv_rn(sum, (float)N), eps));
}
