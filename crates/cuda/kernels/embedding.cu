// Rows of an embedding table: gather, gather that adds, and the gradient, which adds rows of one id in their order.
//
// Layouts: table `[_, width]` in f32 (it is a parameter), rows `[count, width]`. Gathers: a block of 256 threads a row, grid = count.
// `scatter_add` wants the places sorted by id, of equal ids the earlier first: `order` holds the places, `starts` where
// each distinct id begins in it and, last, the count; a block a distinct id, grid = (distinct ids, ceil(width / 256)). So no two
// blocks write a row and no atomics are needed; the sum is table + first row + second row + ..., as on the CPU.
// Limits: width below 256 * 65535. A very frequent id is one long chain of additions.
#include "common.h"

constexpr u32 THREADS = 256;

KERNEL(256, gather, const float *table, const u32 *ids, u32 width, real *rows) {
    u64 i = blockIdx.x, id = ids[i];
    for (u32 c = threadIdx.x; c < width; c += THREADS)
        store(rows[i * width + c], table[id * width + c]);
}
// rows += table[ids]
KERNEL(256, gather_add, const float *table, const u32 *ids, u32 width, real *rows) {
    u64 i = blockIdx.x, id = ids[i];
    for (u32 c = threadIdx.x; c < width; c += THREADS)
        store(rows[i * width + c], load(rows[i * width + c]) + table[id * width + c]);
}
// table[ids[i]] += rows[i]
KERNEL(256, scatter_add, const real *rows, const u32 *ids, const u32 *order, const u32 *starts, u32 width,
       float *table) {
    u32 from = starts[blockIdx.x], to = starts[blockIdx.x + 1];
    u32 c = blockIdx.y * THREADS + threadIdx.x;
    if (c >= width)
        return;
    float *target = table + u64(ids[order[from]]) * width + c;
    float sum = *target;
    for (u32 k = from; k < to; k++)
        sum += load(rows[u64(order[k]) * width + c]);
    *target = sum;
}
