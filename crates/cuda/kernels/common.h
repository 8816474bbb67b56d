// What every kernel file begins with: how kernels and shared memory are declared, the storage type, reductions.
//
// The same sources are compiled twice: by NVRTC for a GPU, and by a C++ compiler with TERCIO_HOST for the tests (host.h). So
// nothing here includes a CUDA header, and a kernel is declared by KERNEL, its shared memory by SHARED or DYNAMIC_SHARED.
// `real` is how activations are stored: f32, or with TERCIO_BF16 bf16. All arithmetic is f32. Parameters, their gradients,
// moments, statistics and losses are f32 in both.
// Contract: no atomics on floats; every sum has an order that depends on sizes alone. Multiply-adds are written `fmaf` where
// they are meant, and the compiler is told not to make others (--fmad=false), so that the bits are those of the source.
#pragma once

#ifdef TERCIO_HOST
#include "host.h"
#else
#define KERNEL(threads, name, ...) extern "C" __global__ void __launch_bounds__(threads) name(__VA_ARGS__)
#define SHARED(type, name, count) __shared__ type name[count]
#define DYNAMIC_SHARED(type, name)                                                                           \
    extern __shared__ __align__(16) unsigned char dynamic_shared_memory[];                                   \
    type *name = reinterpret_cast<type *>(dynamic_shared_memory)
#define UNROLL _Pragma("unroll")
#endif

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// The bits of the nearest bf16, ties to even; a NaN stays one.
__device__ inline u16 rounded(float value) {
    u32 bits = __float_as_uint(value);
    bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return u16((nan ? bits | 0x400000u : bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

#ifdef TERCIO_BF16
struct real {
    u16 bits;
};
__device__ inline float load(real x) { return __uint_as_float(u32(x.bits) << 16); }
__device__ inline void store(real &target, float value) { target.bits = rounded(value); }
#else
typedef float real;
__device__ inline float load(float x) { return x; }
__device__ inline void store(float &target, float value) { target = value; }
#endif

constexpr u32 WARP = 32;
constexpr u32 ALL_LANES = 0xffffffffu;
__device__ inline float minus_infinity() { return __uint_as_float(0xff800000u); }

// Rows [start, end) of a packed tensor: one sequence.
struct Span {
    u32 start, end;
};

__device__ inline u32 least(u32 a, u32 b) { return a < b ? a : b; }
__device__ inline u32 most(u32 a, u32 b) { return a > b ? a : b; }
// As in the CPU's kernels: a NaN in `b` is passed over.
__device__ inline float greater(float a, float b) { return b > a ? b : a; }

// Sum over a warp, pairwise in a fixed tree; every lane gets the same bits.
__device__ inline float warp_sum(float v) {
    for (u32 d = WARP / 2; d > 0; d /= 2)
        v += __shfl_xor_sync(ALL_LANES, v, d);
    return v;
}
__device__ inline float warp_max(float v) {
    for (u32 d = WARP / 2; d > 0; d /= 2)
        v = greater(v, __shfl_xor_sync(ALL_LANES, v, d));
    return v;
}

// Sum over a block of THREADS threads: warps by their trees, then the warps in order. All threads call it, all get it.
template <u32 THREADS> __device__ inline float block_sum(float v) {
    SHARED(float, parts, THREADS / WARP);
    v = warp_sum(v);
    if (threadIdx.x % WARP == 0)
        parts[threadIdx.x / WARP] = v;
    __syncthreads();
    float sum = 0;
    for (u32 w = 0; w < THREADS / WARP; w++)
        sum += parts[w];
    __syncthreads(); // before the next call writes
    return sum;
}
template <u32 THREADS> __device__ inline float block_max(float v) {
    SHARED(float, parts, THREADS / WARP);
    v = warp_max(v);
    if (threadIdx.x % WARP == 0)
        parts[threadIdx.x / WARP] = v;
    __syncthreads();
    float greatest = parts[0];
    for (u32 w = 1; w < THREADS / WARP; w++)
        greatest = greater(greatest, parts[w]);
    __syncthreads();
    return greatest;
}
