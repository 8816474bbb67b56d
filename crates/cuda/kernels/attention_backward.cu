// Backward of packed attention: gradients of queries, of keys and values, and of the table of the relative bias.
//
// Weights are computed again from the stored log-sums; of the outputs only `delta[row, head]` = y dy is needed (Dao et al., 2022).
// Order of launches: attention_delta; attention_queries (a block of 128 threads a tile of 32 query rows and a head, grid = (tiles of
// queries, heads)); attention_keys (the same over tiles of keys). No two blocks write a row, so no atomics; sums go over the tiles in
// order. With a bias, attention_queries leaves the tile's sum for each bucket in `part` `[tiles, buckets * heads]`, which
// `fold_rows` (sums.cu) adds to the table's gradient. Gradients lie as their tensors do: dq as q, dkv as kv.
// Limits: as attention.cu. Dynamic shared memory, in floats: queries 4 * 32 * (dim + 1) + 32 * 33 + 129 * buckets;
// keys 4 * 32 * (dim + 1) + 2 * 32 * 33; beyond 48 KiB it must be asked for. With heads of 128 a table has at most 60 buckets.
#include "attention.h"

// Sum of a b over rows of `dim`, a warp a row; grid = ceil(rows / 4).
KERNEL(128, attention_delta, const real *y, const real *dy, u64 rows, u32 dim, float *delta) {
    u64 row = u64(blockIdx.x) * (THREADS / WARP) + threadIdx.x / WARP;
    if (row >= rows)
        return;
    float sum = 0;
    for (u32 c = threadIdx.x % WARP; c < dim; c += WARP)
        sum = fmaf(load(y[row * dim + c]), load(dy[row * dim + c]), sum);
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0)
        delta[row] = sum;
}

// What both kernels know of a query row.
struct QueryRow {
    Visible sees;
    RowKey key;
    float log_sum, delta;
};
__device__ inline QueryRow query_row(const Shape &s, const float *log_sum, const float *delta, u64 row, u32 i,
                                     u32 nk, u32 head, bool in) {
    u64 place = row * s.heads + head;
    if (!in)
        return {{0, 0}, {0, 0}, 0.0f, 0.0f};
    return {visible(s, i, nk), row_key(s.dropout, place), log_sum[place], delta[place]};
}

// From products x = q k and g = v dy of query row i and key row j: the weight after dropout, and the slope of the score.
struct Slope {
    float weight, slope;
    u32 bucket;
};
__device__ inline Slope slope_of(const Shape &s, const Bias &bias, const QueryRow &q, u32 i, u32 j, u32 start,
                                 u32 head, float x, float g) {
    if (j < q.sees.from || j >= q.sees.to)
        return {0.0f, 0.0f, 0};
    u32 bucket = 0;
    x *= s.scale;
    if (s.distances) {
        bucket = bucket_of(s, bias, i, j, start);
        x += bias.table[bucket * s.heads + head];
    }
    float p = exponential(x - q.log_sum), factor = kept(s.dropout, q.key, j - q.sees.from);
    return {p * factor, p * fmaf(factor, g, -q.delta), bucket};
}

template <u32 SLOTS>
__device__ inline void queries_backward(const real *q, const real *kv, const Span *queries, const Span *keys,
                                        const Tile *tiles, const Bias &bias, const Shape &s, const real *dy,
                                        const float *log_sum, const float *delta, real *dq, float *part) {
    DYNAMIC_SHARED(float, own);
    u32 area = TILE * (s.dim + 1);
    float *dout = own + area, *key_tile = dout + area, *value_tile = key_tile + area,
          *slopes = value_tile + area;
    float *sums = slopes + TILE * WEIGHT_STRIDE; // of every bucket, one a thread
    Tile tile = tiles[blockIdx.x];
    u32 head = blockIdx.y, row = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    Span qs = queries[tile.sequence], ks = keys[tile.sequence];
    u32 n = least(TILE, qs.end - qs.start - tile.first), nk = ks.end - ks.start, inner = s.heads * s.dim;
    u64 first = u64(qs.start) + tile.first;
    load_tile(q + first * s.query_stride + head * s.dim, s.query_stride, n, s.dim, own);
    load_tile(dy + first * inner + head * s.dim, inner, n, s.dim, dout);
    const real *key = kv + u64(ks.start) * s.key_stride + head * s.dim, *value = key + inner;
    u32 buckets = s.distances ? s.buckets : 0;
    for (u32 b = 0; b < buckets; b++)
        sums[b * (THREADS + 1) + threadIdx.x] = 0;

    float acc[OWN][SLOTS] = {};
    QueryRow known[OWN];
    UNROLL
    for (u32 r = 0; r < OWN; r++) {
        u32 i = row + TILE / OWN * r;
        known[r] = query_row(s, log_sum, delta, first + i, tile.first + i, nk, head, i < n);
    }
    Visible all = band(s, tile.first, n, nk);
    for (u32 j0 = all.from; j0 < all.to; j0 += TILE) {
        u32 nj = least(TILE, all.to - j0);
        __syncthreads(); // the keys and slopes before were read
        load_tile(key + u64(j0) * s.key_stride, s.key_stride, nj, s.dim, key_tile);
        load_tile(value + u64(j0) * s.key_stride, s.key_stride, nj, s.dim, value_tile);
        __syncthreads();
        float x[OWN][OTHER], g[OWN][OTHER];
        products(own, key_tile, s.dim, x);
        products(dout, value_tile, s.dim, g);
        UNROLL
        for (u32 r = 0; r < OWN; r++) {
            UNROLL
            for (u32 t = 0; t < OTHER; t++) {
                u32 i = row + TILE / OWN * r, j = j0 + lane + LANES * t;
                Slope d = slope_of(s, bias, known[r], tile.first + i, j, ks.start, head, x[r][t], g[r][t]);
                slopes[i * WEIGHT_STRIDE + lane + LANES * t] = d.slope;
                if (buckets)
                    sums[d.bucket * (THREADS + 1) + threadIdx.x] += d.slope;
            }
        }
        __syncthreads();
        accumulate(slopes, false, key_tile, s.dim, acc);
    }
    UNROLL
    for (u32 r = 0; r < OWN; r++) {
        u32 i = row + TILE / OWN * r;
        UNROLL
        for (u32 k = 0; k < SLOTS; k++)
            if (i < n && lane + LANES * k < s.dim)
                store(dq[(first + i) * s.query_stride + head * s.dim + lane + LANES * k],
                      s.scale * acc[r][k]);
    }
    __syncthreads();
    for (u32 b = threadIdx.x; b < buckets; b += THREADS) {
        float sum = 0;
        for (u32 t = 0; t < THREADS; t++)
            sum += sums[b * (THREADS + 1) + t];
        part[(u64(blockIdx.x) * s.buckets + b) * s.heads + head] = sum;
    }
}

template <u32 SLOTS>
__device__ inline void keys_backward(const real *q, const real *kv, const Span *queries, const Span *keys,
                                     const Tile *tiles, const Bias &bias, const Shape &s, const real *dy,
                                     const float *log_sum, const float *delta, real *dkv) {
    DYNAMIC_SHARED(float, key_tile);
    u32 area = TILE * (s.dim + 1);
    float *value_tile = key_tile + area, *query_tile = value_tile + area, *dout = query_tile + area;
    float *weights = dout + area, *slopes = weights + TILE * WEIGHT_STRIDE;
    Tile tile = tiles[blockIdx.x];
    u32 head = blockIdx.y, row = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    Span qs = queries[tile.sequence], ks = keys[tile.sequence];
    u32 nk = ks.end - ks.start, n = least(TILE, nk - tile.first), nq = qs.end - qs.start,
        inner = s.heads * s.dim;
    const real *key = kv + (u64(ks.start) + tile.first) * s.key_stride + head * s.dim;
    load_tile(key, s.key_stride, n, s.dim, key_tile);
    load_tile(key + inner, s.key_stride, n, s.dim, value_tile);

    float dkey[OWN][SLOTS] = {}, dvalue[OWN][SLOTS] = {};
    for (u32 i0 = 0; i0 < nq; i0 += TILE) {
        u32 ni = least(TILE, nq - i0);
        Visible all = band(s, i0, ni, nk);
        if (all.to <= tile.first || all.from >= tile.first + n)
            continue; // none of these queries sees one of these keys
        u64 first = u64(qs.start) + i0;
        __syncthreads(); // the queries, weights and slopes before were read
        load_tile(q + first * s.query_stride + head * s.dim, s.query_stride, ni, s.dim, query_tile);
        load_tile(dy + first * inner + head * s.dim, inner, ni, s.dim, dout);
        __syncthreads();
        float x[OWN][OTHER], g[OWN][OTHER];
        products(query_tile, key_tile, s.dim, x);
        products(dout, value_tile, s.dim, g);
        UNROLL
        for (u32 r = 0; r < OWN; r++) {
            u32 i = row + TILE / OWN * r;
            QueryRow known = query_row(s, log_sum, delta, first + i, i0 + i, nk, head, i < ni);
            UNROLL
            for (u32 t = 0; t < OTHER; t++) {
                u32 at = lane + LANES * t;
                Slope d = slope_of(s, bias, known, i0 + i, tile.first + at, ks.start, head, x[r][t], g[r][t]);
                weights[i * WEIGHT_STRIDE + at] = d.weight;
                slopes[i * WEIGHT_STRIDE + at] = d.slope;
            }
        }
        __syncthreads();
        accumulate(weights, true, dout, s.dim, dvalue);
        accumulate(slopes, true, query_tile, s.dim, dkey);
    }
    UNROLL
    for (u32 r = 0; r < OWN; r++) {
        u32 i = row + TILE / OWN * r;
        UNROLL
        for (u32 k = 0; k < SLOTS; k++)
            if (i < n && lane + LANES * k < s.dim) {
                real *target =
                    dkv + (u64(ks.start) + tile.first + i) * s.key_stride + head * s.dim + lane + LANES * k;
                store(target[0], s.scale * dkey[r][k]);
                store(target[inner], dvalue[r][k]);
            }
    }
}

KERNEL(128, attention_queries_32, const real *q, const real *kv, const Span *queries, const Span *keys,
       const Tile *tiles, Bias bias, Shape s, const real *dy, const float *log_sum, const float *delta,
       real *dq, float *part) {
    queries_backward<4>(q, kv, queries, keys, tiles, bias, s, dy, log_sum, delta, dq, part);
}
KERNEL(128, attention_keys_32, const real *q, const real *kv, const Span *queries, const Span *keys,
       const Tile *tiles, Bias bias, Shape s, const real *dy, const float *log_sum, const float *delta,
       real *dkv) {
    keys_backward<4>(q, kv, queries, keys, tiles, bias, s, dy, log_sum, delta, dkv);
}
KERNEL(128, attention_queries_64, const real *q, const real *kv, const Span *queries, const Span *keys,
       const Tile *tiles, Bias bias, Shape s, const real *dy, const float *log_sum, const float *delta,
       real *dq, float *part) {
    queries_backward<8>(q, kv, queries, keys, tiles, bias, s, dy, log_sum, delta, dq, part);
}
KERNEL(128, attention_keys_64, const real *q, const real *kv, const Span *queries, const Span *keys,
       const Tile *tiles, Bias bias, Shape s, const real *dy, const float *log_sum, const float *delta,
       real *dkv) {
    keys_backward<8>(q, kv, queries, keys, tiles, bias, s, dy, log_sum, delta, dkv);
}
KERNEL(128, attention_queries_128, const real *q, const real *kv, const Span *queries, const Span *keys,
       const Tile *tiles, Bias bias, Shape s, const real *dy, const float *log_sum, const float *delta,
       real *dq, float *part) {
    queries_backward<16>(q, kv, queries, keys, tiles, bias, s, dy, log_sum, delta, dq, part);
}
KERNEL(128, attention_keys_128, const real *q, const real *kv, const Span *queries, const Span *keys,
       const Tile *tiles, Bias bias, Shape s, const real *dy, const float *log_sum, const float *delta,
       real *dkv) {
    keys_backward<16>(q, kv, queries, keys, tiles, bias, s, dy, log_sum, delta, dkv);
}
