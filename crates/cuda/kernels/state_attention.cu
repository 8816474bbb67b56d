// The part between the products of attention over hidden states: from scores to weights, and from the weights' gradient to slopes.
//
// A question's rows are its queries times heads, `[queries * heads, keys]`; scores u states^T, the context weights states and the gradients
// are matrix products, done a question at a time (or a block of its rows), so that the scores exist for that alone. A block of
// 256 threads a row, grid = rows. `first` is the question's first row among all rows (queries times heads); `positions` begin at the
// question's first key, or null. `delta` = c dc by attention_delta.
// `state_slopes` gives the slopes of the scores times the scale; with a bias the row's sum for each bucket goes to
// `part` `[queries, buckets * heads]` for `fold_rows`. Limits: dynamic shared memory 257 * buckets floats.
#include "functions.h"
#include "random.h"

constexpr u32 THREADS = 256;

struct StateShape {
    Dropout dropout;
    u64 first;
    u32 heads, keys, first_query;
    // Of the relative bias: index of distance 0, number of distances (0: no bias), rows of the table.
    u32 zero, distances, buckets;
    float scale;
    u32 unused;
};
struct StateBias {
    const float *table;
    const u16 *bucket;
    const u32 *positions;
};

__device__ inline u32 state_bucket(const StateShape &s, const StateBias &b, u32 query, u32 j) {
    u64 key = u64(s.zero) + (b.positions ? b.positions[j] : j), at = u64(query) + s.first_query;
    u64 distance = key > at ? key - at : 0;
    return b.bucket[distance < s.distances ? distance : s.distances - 1];
}
__device__ inline float state_score(const StateShape &s, const StateBias &b, u32 row, u32 j, float product) {
    product *= s.scale;
    return s.distances ? product + b.table[state_bucket(s, b, row / s.heads, j) * s.heads + row % s.heads]
                       : product;
}

// weights = dropout(softmax(scale scores + bias)), log_sum = log of the denominator.
KERNEL(256, state_weights, const float *scores, StateBias bias, StateShape s, float *log_sum, real *weights) {
    u64 row = blockIdx.x;
    const float *x = scores + row * s.keys;
    float m = minus_infinity(), sum = 0;
    for (u32 j = threadIdx.x; j < s.keys; j += THREADS)
        m = greater(m, state_score(s, bias, row, j, x[j]));
    m = block_max<THREADS>(m);
    for (u32 j = threadIdx.x; j < s.keys; j += THREADS)
        sum += exponential(state_score(s, bias, row, j, x[j]) - m);
    float total = m + logarithm(block_sum<THREADS>(sum));
    RowKey key = row_key(s.dropout, s.first + row);
    for (u32 j = threadIdx.x; j < s.keys; j += THREADS)
        store(weights[row * s.keys + j],
              exponential(state_score(s, bias, row, j, x[j]) - total) * kept(s.dropout, key, j));
    if (threadIdx.x == 0)
        log_sum[s.first + row] = total;
}

// weights as above; slopes = scale p (f g - delta), g being the products of dc and the states.
KERNEL(256, state_slopes, const float *scores, const float *g, StateBias bias, StateShape s,
       const float *log_sum, const float *delta, real *weights, real *slopes, float *part) {
    DYNAMIC_SHARED(float, sums);
    u64 row = blockIdx.x;
    u32 head = row % s.heads, buckets = s.distances ? s.buckets : 0;
    for (u32 b = 0; b < buckets; b++)
        sums[b * (THREADS + 1) + threadIdx.x] = 0;
    RowKey key = row_key(s.dropout, s.first + row);
    for (u32 j = threadIdx.x; j < s.keys; j += THREADS) {
        u64 at = row * s.keys + j;
        float p = exponential(state_score(s, bias, row, j, scores[at]) - log_sum[s.first + row]);
        float factor = kept(s.dropout, key, j), slope = p * fmaf(factor, g[at], -delta[s.first + row]);
        store(weights[at], p * factor);
        store(slopes[at], s.scale * slope);
        if (buckets)
            sums[state_bucket(s, bias, row / s.heads, j) * (THREADS + 1) + threadIdx.x] += slope;
    }
    __syncthreads();
    for (u32 b = threadIdx.x; b < buckets; b += THREADS) {
        float sum = 0;
        for (u32 t = 0; t < THREADS; t++)
            sum += sums[b * (THREADS + 1) + t];
        part[(row / s.heads * s.buckets + b) * s.heads + head] = sum;
    }
}
