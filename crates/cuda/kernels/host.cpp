// Runs kernels on the host: fibers, barriers, warps, shared memory, and the one function that the tests call (host.h).
#include "host.h"

#include <algorithm>
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <ucontext.h>

namespace host {

Running running;

namespace {

// An odd number of cache lines: stacks a power of two apart would share the same few lines of the caches.
constexpr std::size_t STACK = (128 << 10) + 9 * 64;
constexpr std::size_t GUARD = 64;
// What every GPU from sm_80 on lets a block ask for.
constexpr std::size_t MOST_SHARED = 99 << 10;
constexpr unsigned LANES = 32;

struct Kernel {
    unsigned threads;
    Call call;
    std::vector<std::size_t> sizes;
};
std::map<std::string, Kernel> &kernels() {
    static std::map<std::string, Kernel> all;
    return all;
}

// A fiber runs one thread after the other, as long as no kernel fails. It is entered once by setcontext; then
// _setjmp and _longjmp change between fibers, which unlike swapcontext need no system call.
struct Fiber {
    ucontext_t context;
    jmp_buf resume;
    bool entered, done;
    Operation waits;
    unsigned mask, argument, width;
    std::uint64_t value, result;
    Place place;
};

// An array of shared memory and the guard behind it.
struct Array {
    std::unique_ptr<unsigned char[]> bytes;
    std::size_t len;
    Place place;
};

struct Machine {
    std::string kernel, error;
    Call call;
    void **arguments;
    bool descending;
    unsigned threads, current;
    jmp_buf scheduler;
    std::vector<Array> arrays;
    std::size_t shared_bytes;

    void fail(const std::string &what);
    std::string describe(unsigned thread) const;
    bool run_block(Index block, std::size_t dynamic);
    void run_warp(unsigned first);
    bool release_warp(unsigned first);
    bool complete(unsigned first, unsigned lane);
    bool check_guards();
};
// One kernel runs at a time.
std::mutex one;
Machine *machine = nullptr;
std::vector<Fiber> fibers;
std::unique_ptr<char[]> stacks;

std::string at(Place p) {
    const char *name = std::strrchr(p.file, '/');
    return std::string(name ? name + 1 : p.file) + ":" + std::to_string(p.line);
}
const char *name_of(Operation o) {
    switch (o) {
    case Operation::Barrier:
        return "__syncthreads";
    case Operation::SyncWarp:
        return "__syncwarp";
    case Operation::Ballot:
        return "__ballot_sync";
    default:
        return "a shuffle";
    }
}
bool same(Place a, Place b) {
    return a.line == b.line && (a.file == b.file || std::strcmp(a.file, b.file) == 0);
}

void Machine::fail(const std::string &what) {
    if (!error.empty())
        return;
    const Index &b = running.block;
    error = "kernel " + kernel + ", block (" + std::to_string(b.x) + ", " + std::to_string(b.y) + ", " +
            std::to_string(b.z) + "): " + what;
}

std::string Machine::describe(unsigned t) const {
    const Fiber &f = fibers[t];
    std::string who = "thread " + std::to_string(t);
    if (f.done)
        return who + " has ended";
    return who + " waits at " + at(f.place) + " (" + name_of(f.waits) + ")";
}

// Back to the scheduler until it resumes the fiber.
__attribute__((noinline)) void suspend() {
    if (_setjmp(fibers[machine->current].resume) == 0)
        _longjmp(machine->scheduler, 1);
}
void enter() {
    for (;;) {
        machine->call(machine->arguments);
        fibers[machine->current].done = true;
        suspend();
    }
}
// Runs the current fiber until it waits or its thread has ended.
__attribute__((noinline)) void resume() {
    if (_setjmp(machine->scheduler) != 0)
        return;
    Fiber &f = fibers[machine->current];
    if (f.entered)
        _longjmp(f.resume, 1);
    f.entered = true;
    setcontext(&f.context);
}
void make(Fiber &f, char *stack) {
    f.entered = false;
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = stack;
    f.context.uc_stack.ss_size = STACK;
    f.context.uc_link = nullptr;
    makecontext(&f.context, enter, 0);
}

// Completes the operation that `lane` waits for, if all lanes of its mask wait for the same one.
bool Machine::complete(unsigned first, unsigned lane) {
    const Fiber &asks = fibers[first + lane];
    unsigned mask = asks.mask;
    if (!(mask >> lane & 1)) {
        fail("thread " + std::to_string(first + lane) + " is not in the mask it names at " + at(asks.place));
        return false;
    }
    for (unsigned l = 0; l < LANES; l++) {
        if (!(mask >> l & 1))
            continue;
        if (first + l >= threads) {
            fail("the mask at " + at(asks.place) + " names lanes beyond the block");
            return false;
        }
        const Fiber &f = fibers[first + l];
        if (f.done || f.waits != asks.waits || f.mask != mask || !same(f.place, asks.place))
            return false;
    }
    unsigned votes = 0;
    for (unsigned l = 0; l < LANES; l++)
        votes |= unsigned((mask >> l & 1) && fibers[first + l].value) << l;
    for (unsigned l = 0; l < LANES; l++) {
        if (!(mask >> l & 1))
            continue;
        Fiber &f = fibers[first + l];
        unsigned from = l, base = l / f.width * f.width;
        switch (f.waits) {
        case Operation::Idx:
            from = base + f.argument % f.width;
            break;
        case Operation::Up:
            from = l - base >= f.argument ? l - f.argument : l;
            break;
        case Operation::Down:
            from = l + f.argument < base + f.width ? l + f.argument : l;
            break;
        case Operation::Xor:
            from = (l ^ f.argument) < base + f.width ? l ^ f.argument : l;
            break;
        default:
            break;
        }
        if (!(mask >> from & 1)) {
            fail("thread " + std::to_string(first + l) + " reads a lane outside of the mask at " +
                 at(f.place));
            return false;
        }
        f.result = f.waits == Operation::Ballot ? votes : fibers[first + from].value;
    }
    for (unsigned l = 0; l < LANES; l++)
        if (mask >> l & 1)
            fibers[first + l].waits = Operation::None;
    return true;
}

bool Machine::release_warp(unsigned first) {
    bool released = false;
    for (unsigned l = 0; l < LANES && first + l < threads && error.empty(); l++) {
        const Fiber &f = fibers[first + l];
        if (!f.done && f.waits != Operation::None && f.waits != Operation::Barrier)
            released |= complete(first, l);
    }
    return released;
}

void Machine::run_warp(unsigned first) {
    unsigned lanes = threads - first < LANES ? threads - first : LANES;
    do {
        for (unsigned k = 0; k < lanes && error.empty(); k++) {
            current = first + (descending ? lanes - 1 - k : k);
            const Fiber &f = fibers[current];
            if (f.done || f.waits != Operation::None)
                continue;
            running.thread = {current, 0, 0};
            resume();
        }
    } while (error.empty() && release_warp(first));
}

bool Machine::check_guards() {
    for (const Array &a : arrays)
        for (std::size_t i = 0; i < GUARD; i++)
            if (a.bytes[a.len + i] != 0xA5) {
                fail("wrote behind the shared memory of " + at(a.place));
                return false;
            }
    return true;
}

bool Machine::run_block(Index block, std::size_t dynamic) {
    running.block = block;
    arrays.clear();
    shared_bytes = 0;
    shared(dynamic, {"the launch", 0});
    for (unsigned t = 0; t < threads; t++) {
        Fiber &f = fibers[t];
        f.done = false;
        f.waits = Operation::None;
    }
    for (;;) {
        // A warp after the other, each as far as it comes alone: a GPU may do so, and then a barrier that is missing shows.
        unsigned warps = (threads + LANES - 1) / LANES;
        for (unsigned w = 0; w < warps && error.empty(); w++)
            run_warp((descending ? warps - 1 - w : w) * LANES);
        if (!error.empty())
            return false;
        unsigned ended = 0;
        for (unsigned t = 0; t < threads; t++)
            ended += fibers[t].done;
        if (ended == threads)
            return check_guards();
        // The barrier: all threads at the same one, or none will ever pass it.
        for (unsigned t = 0; t < threads; t++) {
            const Fiber &f = fibers[t], &zero = fibers[0];
            if (f.done || zero.done || f.waits != Operation::Barrier || !same(f.place, zero.place)) {
                unsigned other = t;
                // Two threads that disagree: this one, or the first that differs from thread 0.
                for (unsigned u = 1; other == 0 && u < threads; u++)
                    if (fibers[u].done != zero.done || !same(fibers[u].place, zero.place))
                        other = u;
                fail("threads can never meet: " + describe(0) + ", " + describe(other));
                return false;
            }
        }
        for (unsigned t = 0; t < threads; t++)
            fibers[t].waits = Operation::None;
    }
}

} // namespace

std::uint64_t wait(Operation o, unsigned mask, std::uint64_t value, unsigned argument, unsigned width,
                   Place place) {
    Fiber &f = fibers[machine->current];
    f.waits = o;
    f.mask = mask;
    f.value = value;
    f.argument = argument;
    f.width = width;
    f.place = place;
    suspend();
    return f.result;
}

void *shared(std::size_t bytes, Place place) {
    Machine &m = *machine;
    for (std::size_t i = 1; i < m.arrays.size(); i++)
        if (same(m.arrays[i].place, place) && m.arrays[i].len == bytes)
            return m.arrays[i].bytes.get();
    m.shared_bytes += bytes;
    if (m.shared_bytes > MOST_SHARED)
        m.fail("asks for more than " + std::to_string(MOST_SHARED) + " bytes of shared memory");
    Array a{std::make_unique<unsigned char[]>(bytes + GUARD), bytes, place};
    std::memset(a.bytes.get(), 0xFF, bytes);
    std::memset(a.bytes.get() + bytes, 0xA5, GUARD);
    m.arrays.push_back(std::move(a));
    return m.arrays.back().bytes.get();
}
void *dynamic_shared() { return machine->arrays[0].bytes.get(); }

void add(const char *name, unsigned threads, Call call, const std::size_t *sizes, unsigned count) {
    if (!kernels().emplace(name, Kernel{threads, call, {sizes, sizes + count}}).second) {
        std::fprintf(stderr, "two kernels are called %s\n", name);
        std::abort();
    }
}

} // namespace host

// The sizes of a kernel's arguments, of which there may be `room`, and their number; -1: there is no such kernel.
extern "C" int host_sizes(const char *name, std::uint64_t *sizes, unsigned room) {
    auto found = host::kernels().find(name);
    if (found == host::kernels().end() || found->second.sizes.size() > room)
        return -1;
    std::copy(found->second.sizes.begin(), found->second.sizes.end(), sizes);
    return int(found->second.sizes.size());
}

// Runs a kernel as cuLaunchKernel would, with the sizes of the arguments beside them. Gives null, or what went wrong; the text
// lives until the next launch of this thread.
extern "C" const char *host_launch(const char *name, const unsigned grid[3], unsigned threads,
                                   std::uint64_t dynamic, void **arguments, const std::uint64_t *sizes,
                                   unsigned count, int descending) {
    using namespace host;
    static thread_local std::string error;
    std::lock_guard<std::mutex> alone(one);
    auto found = kernels().find(name);
    if (found == kernels().end())
        return (error = std::string("there is no kernel ") + name).c_str();
    const Kernel &k = found->second;
    bool fits = k.sizes.size() == count;
    for (unsigned i = 0; fits && i < count; i++)
        fits = k.sizes[i] == sizes[i];
    if (!fits)
        return (error = std::string("kernel ") + name + ": the arguments are not those it is declared with")
            .c_str();
    if (threads != k.threads)
        return (error = std::string("kernel ") + name + ": is launched with " + std::to_string(threads) +
                        " threads a block, is declared with " + std::to_string(k.threads))
            .c_str();
    if (grid[0] > 0x7fffffffu || grid[1] > 65535 || grid[2] > 65535)
        return (error = std::string("kernel ") + name + ": the grid is beyond CUDA's limits").c_str();
    Machine m{};
    m.kernel = name;
    m.call = k.call;
    m.arguments = arguments;
    m.descending = descending != 0;
    m.threads = threads;
    if (fibers.size() < threads) {
        // What a fiber has stored of itself must not move.
        fibers = std::vector<Fiber>(threads);
        stacks.reset(new char[STACK * threads]);
        for (unsigned t = 0; t < threads; t++)
            make(fibers[t], stacks.get() + STACK * t);
    }
    machine = &m;
    running.threads = {threads, 1, 1};
    running.blocks = {grid[0], grid[1], grid[2]};
    std::uint64_t blocks = std::uint64_t(grid[0]) * grid[1] * grid[2];
    for (std::uint64_t b = 0; b < blocks; b++) {
        std::uint64_t i = descending ? blocks - 1 - b : b;
        Index block = {unsigned(i % grid[0]), unsigned(i / grid[0] % grid[1]),
                       unsigned(i / grid[0] / grid[1])};
        if (!m.run_block(block, dynamic))
            break;
    }
    machine = nullptr;
    // Threads of a kernel that failed are left where they are.
    if (!m.error.empty())
        fibers.clear();
    error = m.error;
    return error.empty() ? nullptr : error.c_str();
}

// The names of the kernels, one a line.
extern "C" const char *host_kernels() {
    static thread_local std::string names;
    names.clear();
    for (const auto &k : host::kernels())
        names += k.first + "\n";
    return names.c_str();
}
