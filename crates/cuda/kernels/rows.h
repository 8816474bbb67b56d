// Sums over the rows of a matrix, column by column, in a fixed order: what gradients of norms and biases, means of spans and
// statistics of Adafactor are made of.
//
// A block of 256 threads takes 32 columns: thread (lane, part) adds rows part, part + 8, ... of column `lane`, so a warp reads 32
// neighbours; then the 8 parts are added in order. A matrix of many rows is cut into blocks of PARTIAL_ROWS rows, whose
// sums are added the same way by `fold_rows` (sums.cu). Both cuts depend on nothing but the sizes.
#pragma once
#include "common.h"

constexpr u32 COLUMNS = 32;
constexpr u32 PARTS = 8;
// Rows of a partial sum; the host sizes its scratch by it.
constexpr u64 PARTIAL_ROWS = 128;

// The column of this thread, and the block's first row.
__device__ inline u32 own_column() { return blockIdx.x * COLUMNS + threadIdx.x % COLUMNS; }
__device__ inline u64 first_row() { return u64(blockIdx.y) * PARTIAL_ROWS; }
__device__ inline u64 end_row(u64 rows) {
    return first_row() + PARTIAL_ROWS < rows ? first_row() + PARTIAL_ROWS : rows;
}

// Sum of f(row) over [from, to) for the column of this thread, where `in` is whether there is such a column. All 256 threads call
// it; the result is that of the threads of part 0.
template <class F> __device__ inline float sum_of_rows(u64 from, u64 to, bool in, F f) {
    SHARED(float, sums, PARTS *COLUMNS);
    float sum = 0;
    if (in)
        for (u64 row = from + threadIdx.x / COLUMNS; row < to; row += PARTS)
            sum += f(row);
    sums[threadIdx.x] = sum;
    __syncthreads();
    float total = 0;
    for (u32 p = 0; p < PARTS; p++)
        total += sums[p * COLUMNS + threadIdx.x % COLUMNS];
    __syncthreads(); // before the next call writes
    return total;
}
__device__ inline bool is_first_part() { return threadIdx.x < COLUMNS; }
