// XTR's scores of late interaction (Lee et al., 2023): of each query row only the `retrieved` greatest products with all rows of its
// documents count; a document gets the sum of the greatest that count, divided by the number of query rows that have one.
//
// The products of a query's rows with the rows of each of its documents are matrix products: those of pair p begin at
// `starts[p]`, `[query rows, document rows]`, f32. `xtr_rows`: a block of 256 threads a query row, grid = (queries, rows of the longest); it finds
// the least product that counts bit by bit (32 counts of the row), then goes over the pairs in order. `own` and `own_starts`: the pairs of each query in
// order, and where they begin. `xtr_scores` and `xtr_slopes`: a thread a pair, grid = ceil(pairs / 256); the backward is that
// of max_sim.cu with the slopes that `xtr_slopes` gives. Of equal products the earlier pair's counts first, then the earlier row.
// Limits: below 65535 rows a query; no floors.
#include "max_sim.h"

constexpr u32 THREADS = 256;

// Numbers in the order of their values; -0 and 0 are equal, since + 0 makes both 0.
__device__ inline u32 ordered(float x) {
    u32 bits = __float_as_uint(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ inline u32 block_count(u32 n) {
    SHARED(u32, parts, THREADS / WARP);
    for (u32 d = WARP / 2; d > 0; d /= 2)
        n += __shfl_xor_sync(ALL_LANES, n, d);
    if (threadIdx.x % WARP == 0)
        parts[threadIdx.x / WARP] = n;
    __syncthreads();
    u32 total = 0;
    for (u32 w = 0; w < THREADS / WARP; w++)
        total += parts[w];
    __syncthreads(); // before the next call writes
    return total;
}

// The greatest of a block, the first of equals; `at` NO_ROW: none.
struct Product {
    u32 key, at;
};
__device__ inline bool better(Product a, Product b) {
    return a.at != NO_ROW && (b.at == NO_ROW || a.key > b.key || (a.key == b.key && a.at < b.at));
}
__device__ inline Product block_best(Product own) {
    SHARED(Product, all, THREADS / WARP);
    for (u32 d = WARP / 2; d > 0; d /= 2) {
        Product other = {__shfl_xor_sync(ALL_LANES, own.key, d), __shfl_xor_sync(ALL_LANES, own.at, d)};
        if (better(other, own))
            own = other;
    }
    if (threadIdx.x % WARP == 0)
        all[threadIdx.x / WARP] = own;
    __syncthreads();
    Product best = all[0];
    for (u32 w = 1; w < THREADS / WARP; w++)
        if (better(all[w], best))
            best = all[w];
    __syncthreads(); // before the next call writes
    return best;
}

// values[place] = the product that counts, best[place] its row; 0 and NO_ROW where none does.
KERNEL(256, xtr_rows, const float *products, const u64 *starts, const Span *query_spans,
       const Span *document_spans, const Pair *pairs, const u64 *places, const u32 *own,
       const u32 *own_starts, u32 retrieved, float *values, u32 *best) {
    Span query = query_spans[blockIdx.x];
    u32 i = blockIdx.y, from = own_starts[blockIdx.x], to = own_starts[blockIdx.x + 1];
    if (i >= query.end - query.start)
        return;
    // How many products of this row are at least `key`.
    auto at_least = [&](u32 key) {
        u32 n = 0;
        for (u32 k = from; k < to; k++) {
            Span document = document_spans[pairs[own[k]].document];
            u32 rows = document.end - document.start;
            const float *row = products + starts[own[k]] + u64(i) * rows;
            for (u32 j = threadIdx.x; j < rows; j += THREADS)
                n += ordered(row[j]) >= key;
        }
        return block_count(n);
    };
    // The least that counts, and how many equal to it do: 0 and all, where there are not more products than may count.
    u32 bar = 0, equal = 0xffffffffu;
    if (at_least(0) > retrieved) {
        for (u32 bit = 0x80000000u; bit > 0; bit /= 2)
            if (at_least(bar | bit) >= retrieved)
                bar |= bit;
        equal = retrieved - (bar == 0xffffffffu ? 0 : at_least(bar + 1));
    }
    for (u32 k = from; k < to; k++) {
        Span document = document_spans[pairs[own[k]].document];
        u32 rows = document.end - document.start, equals = 0;
        const float *row = products + starts[own[k]] + u64(i) * rows;
        Product first = {0, NO_ROW};
        for (u32 j = threadIdx.x; j < rows; j += THREADS) {
            Product next = {ordered(row[j]), j};
            equals += next.key == bar;
            if (better(next, first))
                first = next;
        }
        first = block_best(first);
        equals = block_count(equals);
        bool counts = first.at != NO_ROW && (first.key > bar || (first.key == bar && equal > 0));
        if (threadIdx.x == 0) {
            best[places[own[k]] + i] = counts ? first.at : NO_ROW;
            values[places[own[k]] + i] = counts ? row[first.at] : 0.0f;
        }
        equal = equal > equals ? equal - equals : 0;
    }
}

// How many rows of a pair's query have a product that counts; 1 for none.
__device__ inline double divisor(const u32 *best, u32 rows) {
    u32 n = 0;
    for (u32 i = 0; i < rows; i++)
        n += best[i] != NO_ROW;
    return n > 0 ? double(n) : 1.0;
}
KERNEL(256, xtr_scores, const float *values, const u32 *best, const Span *query_spans, const Pair *pairs,
       const u64 *places, u32 count, float *scores) {
    u32 pair = blockIdx.x * THREADS + threadIdx.x;
    if (pair >= count)
        return;
    Span query = query_spans[pairs[pair].query];
    double sum = 0;
    for (u32 i = 0; i < query.end - query.start; i++)
        sum += values[places[pair] + i];
    scores[pair] = float(sum / divisor(best + places[pair], query.end - query.start));
}
KERNEL(256, xtr_slopes, const float *slopes, const u32 *best, const Span *query_spans, const Pair *pairs,
       const u64 *places, u32 count, float *divided) {
    u32 pair = blockIdx.x * THREADS + threadIdx.x;
    if (pair >= count)
        return;
    Span query = query_spans[pairs[pair].query];
    divided[pair] = float(slopes[pair] / divisor(best + places[pair], query.end - query.start));
}
