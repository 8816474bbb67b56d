// Packed softmax attention, forward: y = dropout(softmax(scale q k + bias)) v, and the log of every softmax's denominator.
//
// A block of 128 threads takes 32 query rows of one head of one sequence, grid = (tiles of queries, heads); it goes over its keys in
// tiles of 32 with a running greatest score and sum (Milakov and Gimelshein, 2018; Dao et al., 2022), so no weight beyond a tile
// exists. Layouts: attention.h; y `[query rows, heads * dim]`, log_sum `[query rows, heads]`. Keys that no row of the tile sees are
// not read. A row without keys gives 0 and minus infinity. Dropout's column counts from the first key that the row sees.
// Limits: dim at most 32, 64 or 128, which is in the kernel's name. Dynamic shared memory: (2 * 32 * (dim + 1) + 32 * 33) * 4 bytes.
// Products run on the units for f32, not on tensor cores.
#include "attention.h"

template <u32 SLOTS>
__device__ inline void attend(const real *q, const real *kv, const Span *queries, const Span *keys,
                              const Tile *tiles, Bias bias, const Shape &s, real *y, float *log_sum) {
    DYNAMIC_SHARED(float, own);
    float *other = own + TILE * (s.dim + 1), *weights = other + TILE * (s.dim + 1);
    Tile tile = tiles[blockIdx.x];
    u32 head = blockIdx.y, row = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    Span qs = queries[tile.sequence], ks = keys[tile.sequence];
    u32 n = least(TILE, qs.end - qs.start - tile.first), nk = ks.end - ks.start;
    u64 first = u64(qs.start) + tile.first;
    load_tile(q + first * s.query_stride + head * s.dim, s.query_stride, n, s.dim, own);
    const real *key = kv + u64(ks.start) * s.key_stride + head * s.dim, *value = key + s.heads * s.dim;

    float acc[OWN][SLOTS] = {}, greatest[OWN], total[OWN] = {};
    Visible sees[OWN];
    RowKey keyed[OWN];
    UNROLL
    for (u32 r = 0; r < OWN; r++) {
        u32 i = row + TILE / OWN * r;
        greatest[r] = minus_infinity();
        sees[r] = i < n ? visible(s, tile.first + i, nk) : Visible{0, 0};
        keyed[r] = row_key(s.dropout, (first + i) * s.heads + head);
    }
    Visible all = band(s, tile.first, n, nk);
    for (u32 j0 = all.from; j0 < all.to; j0 += TILE) {
        u32 nj = least(TILE, all.to - j0);
        __syncthreads(); // the values before were read
        load_tile(key + u64(j0) * s.key_stride, s.key_stride, nj, s.dim, other);
        __syncthreads();
        float x[OWN][OTHER];
        products(own, other, s.dim, x);
        UNROLL
        for (u32 r = 0; r < OWN; r++) {
            u32 i = row + TILE / OWN * r;
            float tile_greatest = minus_infinity();
            UNROLL
            for (u32 t = 0; t < OTHER; t++) {
                u32 j = j0 + lane + LANES * t;
                if (j < sees[r].from || j >= sees[r].to)
                    continue;
                x[r][t] *= s.scale;
                if (s.distances)
                    x[r][t] += bias.table[bucket_of(s, bias, tile.first + i, j, ks.start) * s.heads + head];
                tile_greatest = greater(tile_greatest, x[r][t]);
            }
            tile_greatest = greater(greatest[r], row_max(tile_greatest));
            // Nothing was seen so far: nothing to shrink.
            float shrink = greatest[r] == minus_infinity() ? 0.0f : exponential(greatest[r] - tile_greatest),
                  sum = 0;
            UNROLL
            for (u32 t = 0; t < OTHER; t++) {
                u32 j = j0 + lane + LANES * t;
                bool seen = j >= sees[r].from && j < sees[r].to;
                float w = seen ? exponential(x[r][t] - tile_greatest) : 0.0f;
                sum += w;
                weights[i * WEIGHT_STRIDE + lane + LANES * t] =
                    w * kept(s.dropout, keyed[r], j - sees[r].from);
            }
            total[r] = fmaf(total[r], shrink, row_sum(sum));
            greatest[r] = tile_greatest;
            UNROLL
            for (u32 k = 0; k < SLOTS; k++)
                acc[r][k] *= shrink;
        }
        __syncthreads(); // the keys were read
        load_tile(value + u64(j0) * s.key_stride, s.key_stride, nj, s.dim, other);
        __syncthreads();
        accumulate(weights, false, other, s.dim, acc);
    }
    UNROLL
    for (u32 r = 0; r < OWN; r++) {
        u32 i = row + TILE / OWN * r;
        if (i >= n)
            continue;
        bool none = sees[r].from >= sees[r].to;
        u64 place = (first + i) * s.heads + head;
        UNROLL
        for (u32 k = 0; k < SLOTS; k++)
            if (lane + LANES * k < s.dim)
                store(y[place * s.dim + lane + LANES * k], none ? 0.0f : acc[r][k] / total[r]);
        if (lane == 0)
            log_sum[place] = none ? minus_infinity() : greatest[r] + logarithm(total[r]);
    }
}

KERNEL(128, attention_32, const real *q, const real *kv, const Span *queries, const Span *keys,
       const Tile *tiles, Bias bias, Shape s, real *y, float *log_sum) {
    attend<4>(q, kv, queries, keys, tiles, bias, s, y, log_sum);
}
KERNEL(128, attention_64, const real *q, const real *kv, const Span *queries, const Span *keys,
       const Tile *tiles, Bias bias, Shape s, real *y, float *log_sum) {
    attend<8>(q, kv, queries, keys, tiles, bias, s, y, log_sum);
}
KERNEL(128, attention_128, const real *q, const real *kv, const Span *queries, const Span *keys,
       const Tile *tiles, Bias bias, Shape s, real *y, float *log_sum) {
    attend<16>(q, kv, queries, keys, tiles, bias, s, y, log_sum);
}
