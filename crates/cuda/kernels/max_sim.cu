// MaxSim of late interaction: for pairs of a query and a document the sum over the query's rows of the greatest inner product with a
// row of the document, and the gradient of either side.
//
// Layouts: query rows and document rows `[_, width]`; `pairs` two places each; `places` where a pair's best rows begin in `best`, a row for
// each row of its query. Forward: a block of 128 threads a pair, grid = pairs; tiles of 32 query rows by 32 document rows, their
// product over chunks of 64 columns in shared memory (17 KiB), nothing larger is kept. Sums of scores are in the order of rows.
// Backward: a block of 128 threads a row of the side that it is for, grid = (texts, rows of the longest), `own` the pairs of each
// text in order, `starts` where they begin; what reaches a row is added in the order of pairs and rows, without atomics.
// Limits: below 65535 rows a text; any width.
#include "max_sim.h"

constexpr u32 THREADS = 128;
constexpr u32 TILE = 32;
constexpr u32 CHUNK = 64;

// Rows [first, first + TILE) and columns [c0, c0 + CHUNK) of a text into shared memory, zeros beyond.
__device__ inline void load_chunk(const real *x, u32 width, Span text, u32 first, u32 c0,
                                  float (&tile)[TILE * (CHUNK + 1)]) {
    for (u32 i = threadIdx.x; i < TILE * CHUNK; i += THREADS) {
        u32 r = i / CHUNK, c = c0 + i % CHUNK;
        u64 row = u64(text.start) + first + r;
        tile[r * (CHUNK + 1) + i % CHUNK] = row < text.end && c < width ? load(x[row * width + c]) : 0.0f;
    }
}

// `floors`: null, or of each document whether no query row gets less than 0 from it. `empty`: what a row gets from no row.
KERNEL(128, max_sim, const real *queries, const real *documents, u32 width, const Span *query_spans,
       const Span *document_spans, const Pair *pairs, const u64 *places, const u32 *floors, float empty,
       float *scores, u32 *best) {
    SHARED(float, q, TILE *(CHUNK + 1));
    SHARED(float, d, TILE *(CHUNK + 1));
    SHARED(float, of_rows, TILE);
    Pair pair = pairs[blockIdx.x];
    Span query = query_spans[pair.query], document = document_spans[pair.document];
    u32 query_rows = query.end - query.start, document_rows = document.end - document.start;
    bool has_floor = floors && floors[pair.document];
    float score = 0;
    // This thread: rows `row` and `row + 16` of a tile of queries, rows lane, lane + 8, ... of a tile of documents.
    u32 row = threadIdx.x / 8, lane = threadIdx.x % 8;
    for (u32 i0 = 0; i0 < query_rows; i0 += TILE) {
        float value[2] = {minus_infinity(), minus_infinity()};
        u32 at[2] = {NO_ROW, NO_ROW};
        for (u32 j0 = 0; j0 < document_rows; j0 += TILE) {
            float products[2][4] = {};
            for (u32 c0 = 0; c0 < width; c0 += CHUNK) {
                __syncthreads(); // the chunk before was read
                load_chunk(queries, width, query, i0, c0, q);
                load_chunk(documents, width, document, j0, c0, d);
                __syncthreads();
                u32 columns = least(CHUNK, width - c0);
                for (u32 c = 0; c < columns; c++)
                    for (u32 r = 0; r < 2; r++)
                        for (u32 j = 0; j < 4; j++)
                            products[r][j] = fmaf(q[(row + 16 * r) * (CHUNK + 1) + c],
                                                  d[(lane + 8 * j) * (CHUNK + 1) + c], products[r][j]);
            }
            for (u32 r = 0; r < 2; r++)
                for (u32 j = 0; j < 4; j++) {
                    u32 place = j0 + lane + 8 * j;
                    if (place < document_rows && products[r][j] > value[r]) {
                        value[r] = products[r][j];
                        at[r] = place;
                    }
                }
        }
        for (u32 r = 0; r < 2; r++) {
            // Of the eight threads of a row: the greatest, of equals the first row.
            for (u32 step = 4; step > 0; step /= 2) {
                float other = __shfl_xor_sync(ALL_LANES, value[r], step);
                u32 place = __shfl_xor_sync(ALL_LANES, at[r], step);
                if (other > value[r] || (other == value[r] && place < at[r])) {
                    value[r] = other;
                    at[r] = place;
                }
            }
            if (at[r] == NO_ROW || (has_floor && value[r] < 0.0f)) {
                value[r] = has_floor ? 0.0f : empty;
                at[r] = NO_ROW;
            }
            u32 i = i0 + row + 16 * r;
            if (lane == 0 && i < query_rows) {
                best[places[blockIdx.x] + i] = at[r];
                of_rows[row + 16 * r] = value[r];
            }
        }
        __syncthreads();
        if (threadIdx.x == 0)
            for (u32 r = 0; r < least(TILE, query_rows - i0); r++)
                score += of_rows[r];
        __syncthreads();
    }
    if (threadIdx.x == 0)
        scores[blockIdx.x] = score;
}

// dqueries += slope * the best document row, pair by pair.
KERNEL(128, max_sim_queries, const real *documents, u32 width, const Span *query_spans,
       const Span *document_spans, const Pair *pairs, const u64 *places, const u32 *own, const u32 *starts,
       const u32 *best, const float *slopes, real *d) {
    Span query = query_spans[blockIdx.x];
    u32 i = blockIdx.y;
    if (i >= query.end - query.start)
        return;
    for (u32 c = threadIdx.x; c < width; c += THREADS) {
        u64 target = (u64(query.start) + i) * width + c;
        float sum = load(d[target]);
        for (u32 k = starts[blockIdx.x]; k < starts[blockIdx.x + 1]; k++) {
            u32 row = best[places[own[k]] + i];
            if (row != NO_ROW)
                sum = fmaf(
                    slopes[own[k]],
                    load(documents[(u64(document_spans[pairs[own[k]].document].start) + row) * width + c]),
                    sum);
        }
        store(d[target], sum);
    }
}
// ddocuments += slope * every query row whose best the row is, pair by pair, row by row.
KERNEL(128, max_sim_documents, const real *queries, u32 width, const Span *query_spans,
       const Span *document_spans, const Pair *pairs, const u64 *places, const u32 *own, const u32 *starts,
       const u32 *best, const float *slopes, real *d) {
    Span document = document_spans[blockIdx.x];
    u32 j = blockIdx.y;
    if (j >= document.end - document.start)
        return;
    for (u32 c0 = 0; c0 < width; c0 += THREADS) {
        u32 c = c0 + threadIdx.x;
        u64 target = (u64(document.start) + j) * width + c;
        float sum = c < width ? load(d[target]) : 0.0f;
        for (u32 k = starts[blockIdx.x]; k < starts[blockIdx.x + 1]; k++) {
            u32 pair = own[k];
            Span query = query_spans[pairs[pair].query];
            u32 rows = query.end - query.start;
            float slope = slopes[pair];
            // A warp looks at 32 best rows at a time, and takes those that are this row in their order.
            for (u32 i0 = 0; i0 < rows; i0 += WARP) {
                u32 i = i0 + threadIdx.x % WARP;
                u32 hits = __ballot_sync(ALL_LANES, i < rows && best[places[pair] + i] == j);
                for (; hits; hits &= hits - 1)
                    if (c < width)
                        sum =
                            fmaf(slope,
                                 load(queries[(u64(query.start) + i0 + (__ffs(hits) - 1)) * width + c]), sum);
            }
        }
        if (c < width)
            store(d[target], sum);
    }
}
