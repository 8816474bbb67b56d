// Sums that go beyond a row: rows of a matrix added up (gradients of biases), partial sums folded, inner products in f64.
//
// `sum_rows` writes one partial sum for each 128 rows, `[ceil(rows / 128), width]`, grid = (ceil(width / 32), ceil(rows / 128));
// `fold_rows` adds the partial sums to the total, grid = ceil(width / 32). `dot_blocks` gives a sum for each 16384 elements, as
// `Device::BLOCK` of the other devices, exact products added in f64; the host (or `fold_dots`) adds the blocks in order.
// Limits: rows below 128 * 65535.
#include "rows.h"

constexpr u32 THREADS = 256;
constexpr u64 DOT_BLOCK = 16384;

KERNEL(256, sum_rows, const real *x, u64 rows, u32 width, float *part) {
    u32 c = own_column();
    float sum =
        sum_of_rows(first_row(), end_row(rows), c < width, [&](u64 row) { return load(x[row * width + c]); });
    if (is_first_part() && c < width)
        part[u64(blockIdx.y) * width + c] = sum;
}
// total += the rows of `part`
KERNEL(256, fold_rows, const float *part, u64 parts, u32 width, float *total) {
    u32 c = own_column();
    float sum = sum_of_rows(0, parts, c < width, [&](u64 row) { return part[row * width + c]; });
    if (is_first_part() && c < width)
        total[c] += sum;
}

// Sum of a block's 256 values in f64: thread 0 adds pairs in a fixed tree, all get it.
__device__ inline double block_sum_f64(double v) {
    SHARED(double, sums, THREADS);
    sums[threadIdx.x] = v;
    __syncthreads();
    for (u32 half = THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half)
            sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    double sum = sums[0];
    __syncthreads();
    return sum;
}

// out[block] = sum of a[i] * b[i] over the block's elements; grid = ceil(n / 16384).
KERNEL(256, dot_blocks, const float *a, const float *b, u64 n, double *out) {
    u64 from = u64(blockIdx.x) * DOT_BLOCK;
    u64 to = from + DOT_BLOCK < n ? from + DOT_BLOCK : n;
    double sum = 0;
    for (u64 i = from + threadIdx.x; i < to; i += THREADS)
        sum += double(a[i]) * double(b[i]);
    sum = block_sum_f64(sum);
    if (threadIdx.x == 0)
        out[blockIdx.x] = sum;
}
// *total = the sum of the blocks, for who needs it on the device; grid = 1.
KERNEL(256, fold_dots, const double *blocks, u64 count, double *total) {
    double sum = 0;
    for (u64 i = threadIdx.x; i < count; i += THREADS)
        sum += blocks[i];
    sum = block_sum_f64(sum);
    if (threadIdx.x == 0)
        *total = sum;
}
