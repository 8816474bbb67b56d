// What the kernels of attention share: the shape as the host passes it, who sees whom, tiles in shared memory, scores.
//
// Heads lie side by side: query row r of head h begins at q[r * query_stride + h * dim], its key at kv[r * key_stride + h * dim], its
// value `heads * dim` behind the key. So one tensor of rows [query, key, value] and a tensor of queries beside one of rows [key,
// value] are the same to a kernel. A block takes a tile of 32 rows of one head of one sequence against tiles of 32 rows;
// thread (row = t / 8, lane = t % 8) of its 128 has rows `row` and `row + 16` and, of the other side, rows lane, lane + 8, ...
#pragma once
#include "functions.h"
#include "random.h"

constexpr u32 THREADS = 128;
constexpr u32 TILE = 32;
constexpr u32 LANES = 8;
// Rows of this thread in a tile, and of the other side.
constexpr u32 OWN = 2;
constexpr u32 OTHER = TILE / LANES;
constexpr u32 WEIGHT_STRIDE = TILE + 1;
constexpr u32 ANY = 0xffffffffu;

struct Shape {
    Dropout dropout;
    u32 heads, dim, query_stride, key_stride;
    // Position of the first query row; greatest distance that is seen, or ANY; whether later keys are seen.
    u32 first_query, window, causal;
    // Of the relative bias: index of distance 0, number of distances (0: no bias), rows of the table.
    u32 zero, distances, buckets;
    float scale;
};

// The relative bias: the table `[buckets, heads]`, the bucket of every distance, positions of the key rows or null.
struct Bias {
    const float *table;
    const u16 *bucket;
    const u32 *positions;
};

// A tile of rows: its sequence, and its first row within it.
struct Tile {
    u32 sequence, first;
};

// The keys of 0..keys that query row i of a sequence attends to.
struct Visible {
    u32 from, to;
};
__device__ inline Visible visible(const Shape &s, u32 i, u32 keys) {
    u64 position = u64(i) + s.first_query, none = keys;
    u64 from = s.window != ANY && position > s.window ? position - s.window : 0;
    u64 to = s.causal ? position + 1 : s.window != ANY ? position + s.window + 1 : none;
    return {u32(from < none ? from : none), u32(to < none ? to : none)};
}
// The keys that any row of [first, first + n) attends to; n at least 1.
__device__ inline Visible band(const Shape &s, u32 first, u32 n, u32 keys) {
    return {visible(s, first, keys).from, visible(s, first + n - 1, keys).to};
}

// Row of the bias table for query row i and key row j of a sequence whose keys begin at row `start`.
__device__ inline u32 bucket_of(const Shape &s, const Bias &b, u32 i, u32 j, u32 start) {
    u64 key = u64(s.zero) + (b.positions ? b.positions[start + j] : j), query = u64(i) + s.first_query;
    u64 distance = key > query ? key - query : 0;
    return b.bucket[distance < s.distances ? distance : s.distances - 1];
}

// `n` rows of `dim` columns, `stride` apart, into rows of `dim + 1`; zeros beyond. Whole blocks call it, barriers around it.
__device__ inline void load_tile(const real *x, u32 stride, u32 n, u32 dim, float *tile) {
    for (u32 i = threadIdx.x; i < TILE * dim; i += THREADS) {
        u32 r = i / dim, c = i % dim;
        tile[r * (dim + 1) + c] = r < n ? load(x[u64(r) * stride + c]) : 0.0f;
    }
}

// Inner products of this thread's rows of one tile with its rows of the other.
__device__ inline void products(const float *own, const float *other, u32 dim, float (&s)[OWN][OTHER]) {
    u32 row = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    UNROLL
    for (u32 r = 0; r < OWN; r++) {
        UNROLL
        for (u32 j = 0; j < OTHER; j++)
            s[r][j] = 0;
    }
    for (u32 c = 0; c < dim; c++) {
        float a[OWN], b[OTHER];
        UNROLL
        for (u32 r = 0; r < OWN; r++)
            a[r] = own[(row + TILE / OWN * r) * (dim + 1) + c];
        UNROLL
        for (u32 j = 0; j < OTHER; j++)
            b[j] = other[(lane + LANES * j) * (dim + 1) + c];
        UNROLL
        for (u32 r = 0; r < OWN; r++) {
            UNROLL
            for (u32 j = 0; j < OTHER; j++)
                s[r][j] = fmaf(a[r], b[j], s[r][j]);
        }
    }
}

// acc[r][k] += sum over t of weights[t of own row r] * rows[t][lane + 8 k]. `across`: weights are stored [other, own].
template <u32 SLOTS>
__device__ inline void accumulate(const float *weights, bool across, const float *rows, u32 dim,
                                  float (&acc)[OWN][SLOTS]) {
    u32 row = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    for (u32 t = 0; t < TILE; t++) {
        float w[OWN];
        UNROLL
        for (u32 r = 0; r < OWN; r++) {
            u32 own = row + TILE / OWN * r;
            w[r] = across ? weights[t * WEIGHT_STRIDE + own] : weights[own * WEIGHT_STRIDE + t];
        }
        UNROLL
        for (u32 k = 0; k < SLOTS; k++)
            if (lane + LANES * k < dim) {
                float x = rows[t * (dim + 1) + lane + LANES * k];
                UNROLL
                for (u32 r = 0; r < OWN; r++)
                    acc[r][k] = fmaf(w[r], x, acc[r][k]);
            }
    }
}

// Over the eight threads of a row, in a fixed tree.
__device__ inline float row_sum(float v) {
    for (u32 d = LANES / 2; d > 0; d /= 2)
        v += __shfl_xor_sync(ALL_LANES, v, d);
    return v;
}
__device__ inline float row_max(float v) {
    for (u32 d = LANES / 2; d > 0; d /= 2)
        v = greater(v, __shfl_xor_sync(ALL_LANES, v, d));
    return v;
}
