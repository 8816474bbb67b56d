// What CUDA C++ means to a C++ compiler of the host: the tests run the kernels' own sources on the CPU (host.cpp).
//
// One fiber stands for each thread of a block; a fiber runs until it ends or waits: at __syncthreads, or at an operation of
// its warp. A wait that can never end (threads of a block ended, or wait elsewhere) is an error that names kernel,
// block and thread. Shared memory is filled with ones' bits (NaN) before every block and has guards behind every array.
// Blocks, warps and threads run in ascending or in descending order, each as far as it comes before the next begins, so a missing
// barrier gives other bits in one of the two.
// Not imitated: more than one dimension of a block, textures, atomics, asynchronous copies, streams, speed.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#define __device__
#define __launch_bounds__(threads)

namespace host {

struct Index {
    unsigned x, y, z;
};

enum class Operation { None, Barrier, SyncWarp, Idx, Up, Down, Xor, Ballot };

// Where a fiber waits.
struct Place {
    const char *file;
    unsigned line;
};

// The fiber that runs, as its kernel sees it.
struct Running {
    Index thread, block, threads, blocks;
};
extern Running running;

// Suspends the fiber until the operation is complete; gives what the operation gives this lane.
std::uint64_t wait(Operation operation, unsigned mask, std::uint64_t value, unsigned argument, unsigned width,
                   Place place);
// Shared memory of the running block: an array of the declaration at `place`, or the dynamic one.
void *shared(std::size_t bytes, Place place);
void *dynamic_shared();

using Call = void (*)(void **);
void add(const char *name, unsigned threads, Call call, const std::size_t *sizes, unsigned count);

template <auto F> struct Entry;
template <class... A, void (*F)(A...)> struct Entry<F> {
    static constexpr std::size_t sizes[sizeof...(A)] = {sizeof(A)...};
    static constexpr unsigned count = sizeof...(A);
    static void call(void **arguments) { unpack(arguments, std::index_sequence_for<A...>()); }
    template <std::size_t... I> static void unpack(void **arguments, std::index_sequence<I...>) {
        F(*static_cast<A *>(arguments[I])...);
    }
};
struct Registration {
    template <class E> Registration(const char *name, unsigned threads, E) {
        add(name, threads, E::call, E::sizes, E::count);
    }
};

template <class T> std::uint64_t to_bits(T value) {
    static_assert(sizeof(T) <= 8);
    std::uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    return bits;
}
template <class T> T from_bits(std::uint64_t bits) {
    T value;
    std::memcpy(&value, &bits, sizeof(T));
    return value;
}
template <class T>
T shuffle(Operation o, unsigned mask, T value, unsigned argument, unsigned width, Place place) {
    return from_bits<T>(wait(o, mask, to_bits(value), argument, width, place));
}

} // namespace host

#define KERNEL(threads, name, ...)                                                                           \
    static void name(__VA_ARGS__);                                                                           \
    static const host::Registration name##_registered(#name, threads, host::Entry<&name>());                 \
    static void name(__VA_ARGS__)
#define SHARED(type, name, count)                                                                            \
    type(&name)[count] =                                                                                     \
        *static_cast<type(*)[count]>(host::shared(sizeof(type) * (count), {__FILE__, __LINE__}))
#define DYNAMIC_SHARED(type, name) type *name = static_cast<type *>(host::dynamic_shared())

#define UNROLL

#define threadIdx (host::running.thread)
#define blockIdx (host::running.block)
#define blockDim (host::running.threads)
#define gridDim (host::running.blocks)

#define HERE const char *file = __builtin_FILE(), unsigned line = __builtin_LINE()
inline void __syncthreads(HERE) { host::wait(host::Operation::Barrier, 0, 0, 0, 0, {file, line}); }
inline void __syncwarp(unsigned mask = 0xffffffffu, HERE) {
    host::wait(host::Operation::SyncWarp, mask, 0, 0, 32, {file, line});
}
inline unsigned __ballot_sync(unsigned mask, bool vote, HERE) {
    return unsigned(host::wait(host::Operation::Ballot, mask, vote, 0, 32, {file, line}));
}
template <class T> T __shfl_sync(unsigned mask, T v, unsigned lane, unsigned width = 32, HERE) {
    return host::shuffle(host::Operation::Idx, mask, v, lane, width, {file, line});
}
template <class T> T __shfl_up_sync(unsigned mask, T v, unsigned delta, unsigned width = 32, HERE) {
    return host::shuffle(host::Operation::Up, mask, v, delta, width, {file, line});
}
template <class T> T __shfl_down_sync(unsigned mask, T v, unsigned delta, unsigned width = 32, HERE) {
    return host::shuffle(host::Operation::Down, mask, v, delta, width, {file, line});
}
template <class T> T __shfl_xor_sync(unsigned mask, T v, unsigned lanes, unsigned width = 32, HERE) {
    return host::shuffle(host::Operation::Xor, mask, v, lanes, width, {file, line});
}
#undef HERE

inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline int __ffs(unsigned x) { return x ? std::countr_zero(x) + 1 : 0; }
inline int __popc(unsigned x) { return std::popcount(x); }
