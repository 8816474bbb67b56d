// Kernels that are wrong on purpose: the host shim must find each of them
// (tests/cuda_kernels/shim.rs).
#include "common.h"

// Half of the threads never reach the barrier.
KERNEL(64, fault_ended, u32 *out) {
    if (threadIdx.x >= 32)
        return;
    __syncthreads();
    out[threadIdx.x] = 1;
}
// Two barriers, each reached by half of the threads.
KERNEL(64, fault_elsewhere, u32 *out) {
    if (threadIdx.x < 40)
        __syncthreads();
    else
        __syncthreads();
    out[threadIdx.x] = 1;
}
// A lane of the mask has ended.
KERNEL(64, fault_shuffle, u32 *out) {
    if (threadIdx.x == 37)
        return;
    out[threadIdx.x] = __shfl_xor_sync(ALL_LANES, threadIdx.x, 1);
}
// One element behind an array of shared memory.
KERNEL(64, fault_beyond, u32 *out) {
    SHARED(u32, values, 64);
    values[threadIdx.x + 1] = threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = values[threadIdx.x];
}
// Neighbours are read with or without a barrier between.
KERNEL(64, fault_no_barrier, u32 with, u32 *out) {
    SHARED(u32, values, 64);
    values[threadIdx.x] = threadIdx.x;
    if (with)
        __syncthreads();
    out[threadIdx.x] = values[(threadIdx.x + 1) % 64];
}
// A warp writes anew what the other has yet to read: a barrier is missing after the first round.
KERNEL(64, fault_run_ahead, u32 with, u32 *out) {
    SHARED(u32, parts, 2);
    u32 warp = threadIdx.x / WARP, sum = 0;
    for (u32 round = 1; round < 4; round++) {
        if (threadIdx.x % WARP == 0)
            parts[warp] = round;
        __syncthreads();
        sum += parts[1 - warp];
        if (with)
            __syncthreads();
    }
    out[threadIdx.x] = sum;
}
// More shared memory than any GPU has.
KERNEL(64, fault_too_much, u32 *out) {
    SHARED(u32, values, 100000);
    values[threadIdx.x] = 0;
    out[threadIdx.x] = values[threadIdx.x];
}
// Shuffles of all kinds, and a vote.
KERNEL(64, shuffles, u32 *out) {
    u32 t = threadIdx.x;
    out[t] = __shfl_sync(ALL_LANES, t, 5);
    out[64 + t] = __shfl_up_sync(ALL_LANES, t, 3);
    out[128 + t] = __shfl_down_sync(ALL_LANES, t, 3);
    out[192 + t] = __shfl_xor_sync(ALL_LANES, t, 6, 8);
    out[256 + t] = __ballot_sync(ALL_LANES, t % 3 == 0);
    __syncwarp();
}
