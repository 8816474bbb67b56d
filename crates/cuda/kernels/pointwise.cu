// Elementwise kernels: fill, add, scale, conversions, dropout, residuals, biases, activations and their backward.
//
// Layouts: row-major, rows of `width` elements. Flat kernels: one thread an element, grid = ceil(n / 256). Kernels of
// rows: one block of 256 threads a row, grid = rows; threads go along the row, so accesses are coalesced.
// Limits: rows below 2^31. A bias or dropout that is not wanted is a null pointer, or `on` = 0. In-place use is allowed
// wherever an output has the layout of an input, so no pointer is declared __restrict__.
#include "activation.h"
#include "random.h"

constexpr u32 THREADS = 256;

__device__ inline u64 flat_index() { return u64(blockIdx.x) * THREADS + threadIdx.x; }

KERNEL(256, fill, real *x, u64 n, float value) {
    u64 i = flat_index();
    if (i < n)
        store(x[i], value);
}
// x += y
KERNEL(256, add, real *x, const real *y, u64 n) {
    u64 i = flat_index();
    if (i < n)
        store(x[i], load(x[i]) + load(y[i]));
}
KERNEL(256, scale, real *x, u64 n, float factor) {
    u64 i = flat_index();
    if (i < n)
        store(x[i], load(x[i]) * factor);
}
// To bf16, the nearest, ties to even: factors of products.
KERNEL(256, to_bf16, const float *x, u16 *y, u64 n) {
    u64 i = flat_index();
    if (i < n)
        y[i] = rounded(x[i]);
}

// y = x, every element multiplied by its factor of dropout; y may be x.
KERNEL(256, dropout, const real *x, real *y, u32 width, Dropout d) {
    u64 row = blockIdx.x;
    RowKey key = row_key(d, row);
    for (u32 c = threadIdx.x; c < width; c += THREADS)
        store(y[row * width + c], load(x[row * width + c]) * kept(d, key, c));
}
// x = residual + dropout(x)
KERNEL(256, residual, real *x, const real *residual, u32 width, Dropout d) {
    u64 row = blockIdx.x;
    RowKey key = row_key(d, row);
    for (u32 c = threadIdx.x; c < width; c += THREADS) {
        u64 i = row * width + c;
        store(x[i], fmaf(load(x[i]), kept(d, key, c), load(residual[i])));
    }
}
// x += bias, row by row.
KERNEL(256, add_bias, real *x, const float *bias, u32 width) {
    u64 row = blockIdx.x;
    for (u32 c = threadIdx.x; c < width; c += THREADS)
        store(x[row * width + c], load(x[row * width + c]) + bias[c]);
}

// An element of `u + bias`; rows of `u` and the bias have `stored` elements.
__device__ inline float biased(const real *u, const float *bias, u64 row, u32 stored, u32 c) {
    float x = load(u[row * stored + c]);
    return bias ? x + bias[c] : x;
}

// y = dropout(act(u + bias)), or gated dropout(act(a) * b) where a row of u is [a | b], `width` elements each.
KERNEL(256, activation, const real *u, const float *bias, u32 width, u32 kind, u32 gated, Dropout d,
       real *y) {
    u64 row = blockIdx.x;
    u32 stored = gated ? 2 * width : width;
    RowKey key = row_key(d, row);
    for (u32 c = threadIdx.x; c < width; c += THREADS) {
        float value = activate(kind, biased(u, bias, row, stored, c)).value;
        if (gated)
            value *= biased(u, bias, row, stored, width + c);
        store(y[row * width + c], value * kept(d, key, c));
    }
}
// The gradient of u, whole; that of the bias is the sum of its rows (sums.cu).
KERNEL(256, activation_backward, const real *u, const float *bias, u32 width, u32 kind, u32 gated, Dropout d,
       const real *dy, real *du) {
    u64 row = blockIdx.x;
    u32 stored = gated ? 2 * width : width;
    RowKey key = row_key(d, row);
    for (u32 c = threadIdx.x; c < width; c += THREADS) {
        ValueAndSlope a = activate(kind, biased(u, bias, row, stored, c));
        float dropped = load(dy[row * width + c]) * kept(d, key, c);
        if (gated) {
            float gate = biased(u, bias, row, stored, width + c);
            store(du[row * stored + c], a.slope * gate * dropped);
            store(du[row * stored + width + c], a.value * dropped);
        } else {
            store(du[row * stored + c], a.slope * dropped);
        }
    }
}
