// The draws of dropout: the counter generator of src/random.rs, bit for bit. A draw depends on nothing but its key, row and
// column, so forward, backward, recomputation and any other device drop the same elements.
#pragma once
#include "common.h"

// SplitMix64's finaliser (Steele, Lea and Flood, 2014).
__device__ inline u64 mix(u64 x) {
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// One site of one shard of one update, as the host passes it: an element is dropped when its 32 random bits are below
// `threshold`, others are multiplied by `scale`. `on` 0: no dropout.
struct Dropout {
    u64 key;
    u32 threshold;
    float scale;
    u32 on;
    u32 unused;
};

// The two words that key a row.
struct RowKey {
    u32 low, high;
};
__device__ inline RowKey row_key(const Dropout &d, u64 row) {
    if (!d.on)
        return {0, 0};
    u64 k = mix(d.key ^ mix(row));
    return {u32(k), u32(k >> 32)};
}

// What an element is multiplied by: 0, `scale`, or 1 without dropout.
__device__ inline float kept(const Dropout &d, RowKey key, u32 column) {
    if (!d.on)
        return 1.0f;
    u32 x = column ^ key.low;
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = ((x ^ (x >> 15)) + key.high) * 0x846ca68bu;
    x ^= x >> 16;
    return x < d.threshold ? 0.0f : d.scale;
}
