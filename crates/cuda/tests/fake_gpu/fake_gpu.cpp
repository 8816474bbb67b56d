// A GPU that is the host: the functions of libcuda, libcublasLt, libnvrtc and libnccl that Tercio calls, under NVIDIA's names, so that the
// real driver layer and the real binary run without a GPU. Kernels are those of kernels/, run by the shim (kernels/host.cpp).
//
// It is stricter than a GPU where that finds mistakes: what a stream is asked for happens only when somebody waits for it, so who
// does not wait reads what is not there yet; a thread without a context gets none; memory that is not allocated is an illegal address, as
// is what a copy, a clearing or a product reaches beyond an allocation; products want the alignment that was promised; memory that is
// not given back ends the program. The environment says how it is: FAKE_GPU_COUNT, FAKE_GPU_MEMORY (bytes),
// FAKE_GPU_CAPABILITY (90), FAKE_GPU_FAIL (KERNEL:N: launch N of that kernel, from 1, reaches an illegal address),
// FAKE_GPU_LACKS (products or compiler: that library's first function fails).
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

extern "C" int host_sizes(const char *name, std::uint64_t *sizes, unsigned room);
extern "C" const char *host_launch(const char *name, const unsigned grid[3], unsigned threads, std::uint64_t dynamic,
                                   void **arguments, const std::uint64_t *sizes, unsigned count, int descending);

namespace {

using Address = unsigned long long;
enum : int { OK = 0, INVALID = 1, NO_MEMORY = 2, NO_DEVICE = 100, NO_CONTEXT = 201, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL = 700 };

// Never destroyed: the thread that works the stream off outlives main.
std::recursive_mutex &lock = *new std::recursive_mutex;
std::condition_variable_any &changed = *new std::condition_variable_any;
std::map<Address, std::size_t> &memory = *new std::map<Address, std::size_t>;
std::map<std::string, int> &launches = *new std::map<std::string, int>;
std::deque<std::function<int()>> &stream = *new std::deque<std::function<int()>>;
std::size_t taken = 0;
int sticky = OK, users = 0, staged = 0;
thread_local bool current = false;

#define EXPORT extern "C" __attribute__((visibility("default")))
#define WITH_CONTEXT                                                                                                  \
    std::lock_guard<std::recursive_mutex> held(lock);                                                                 \
    if (!current)                                                                                                     \
        return NO_CONTEXT;                                                                                            \
    if (sticky != OK)                                                                                                 \
    return sticky

std::size_t number(const char *name, std::size_t otherwise) {
    const char *text = std::getenv(name);
    return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

// Whether bytes lie within one allocation.
bool within(Address at, std::size_t bytes) {
    std::lock_guard<std::recursive_mutex> held(lock);
    auto next = memory.upper_bound(at);
    if (next == memory.begin())
        return false;
    auto &[start, size] = *std::prev(next);
    return at + bytes <= start + size;
}

// All streams are one queue, which a thread of its own works off when somebody looks or waits.
bool wanted = false, busy = false;

void work() {
    std::unique_lock<std::recursive_mutex> held(lock);
    for (;;) {
        changed.wait(held, [] { return wanted && !stream.empty(); });
        auto next = std::move(stream.front());
        stream.pop_front();
        busy = true;
        held.unlock();
        int end = next();
        held.lock();
        busy = false;
        if (end != OK)
            sticky = end;
        if (sticky != OK)
            stream.clear();
        if (stream.empty())
            wanted = false;
        changed.notify_all();
    }
}
// Begins what is queued; whether all is done.
bool look() {
    static std::thread worker = [] {
        std::thread thread(work);
        thread.detach();
        return std::thread();
    }();
    if (!stream.empty()) {
        wanted = true;
        changed.notify_all();
    }
    return stream.empty() && !busy;
}
// With the lock held once.
int run() {
    changed.wait(lock, [] { return look(); });
    return sticky;
}

int later(std::function<int()> work) {
    stream.push_back(std::move(work));
    return OK;
}

} // namespace

// The driver.

EXPORT int cuInit(unsigned) { return number("FAKE_GPU_COUNT", 1) > 0 ? OK : NO_DEVICE; }
EXPORT int cuDeviceGetCount(int *count) {
    *count = int(number("FAKE_GPU_COUNT", 1));
    return OK;
}
EXPORT int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return OK;
}
EXPORT int cuDeviceGetName(char *name, int room, int device) {
    std::snprintf(name, std::size_t(room), "fake GPU %d", device);
    return OK;
}
EXPORT int cuDeviceGetAttribute(int *value, int attribute, int) {
    int capability = int(number("FAKE_GPU_CAPABILITY", 90));
    switch (attribute) {
    case 75:
        *value = capability / 10;
        return OK;
    case 76:
        *value = capability % 10;
        return OK;
    case 16: // multiprocessors
        *value = 132;
        return OK;
    case 97: // shared memory of a block, if asked for
        *value = 99 << 10;
        return OK;
    }
    return INVALID;
}
EXPORT int cuDeviceTotalMem_v2(std::size_t *bytes, int) {
    *bytes = number("FAKE_GPU_MEMORY", std::size_t(1) << 30);
    return OK;
}
EXPORT int cuDevicePrimaryCtxRetain(void **context, int) {
    std::lock_guard<std::recursive_mutex> held(lock);
    users++;
    *context = &users;
    return OK;
}
EXPORT int cuDevicePrimaryCtxRelease_v2(int) {
    std::lock_guard<std::recursive_mutex> held(lock);
    if (--users == 0 && sticky == OK && (!memory.empty() || staged != 0)) {
        std::fprintf(stderr, "fake GPU: %zu allocations were not given back, %d of the host\n", memory.size(), staged);
        std::abort();
    }
    return OK;
}
EXPORT int cuCtxSetCurrent(void *context) {
    current = context != nullptr;
    return OK;
}
EXPORT int cuStreamCreate(void **out, unsigned) {
    WITH_CONTEXT;
    *out = &stream;
    return OK;
}
EXPORT int cuStreamCreateWithPriority(void **out, unsigned, int) {
    WITH_CONTEXT;
    *out = &stream;
    return OK;
}
EXPORT int cuCtxGetStreamPriorityRange(int *least, int *most) {
    *least = 0;
    *most = -5;
    return OK;
}
EXPORT int cuStreamDestroy_v2(void *) { return OK; }
EXPORT int cuStreamSynchronize(void *) {
    WITH_CONTEXT;
    return run();
}
EXPORT int cuStreamQuery(void *) {
    WITH_CONTEXT;
    return look() ? sticky : int(NOT_READY);
}
EXPORT int cuStreamWaitEvent(void *, void *, unsigned) { return OK; }
EXPORT int cuDeviceGetUuid_v2(void *uuid, int device) {
    std::memset(uuid, 0, 16);
    std::memcpy(uuid, &device, sizeof device);
    return OK;
}
EXPORT int cuEventCreate(void **event, unsigned) {
    *event = new bool(false);
    return OK;
}
EXPORT int cuEventDestroy_v2(void *event) {
    delete static_cast<bool *>(event);
    return OK;
}
EXPORT int cuEventRecord(void *event, void *) {
    *static_cast<bool *>(event) = true;
    return OK;
}
EXPORT int cuEventSynchronize(void *event) {
    WITH_CONTEXT;
    return *static_cast<bool *>(event) ? run() : OK;
}
EXPORT int cuMemHostAlloc(void **out, std::size_t bytes, unsigned) {
    WITH_CONTEXT;
    staged++;
    *out = std::malloc(bytes);
    return OK;
}
EXPORT int cuMemFreeHost(void *at) {
    std::lock_guard<std::recursive_mutex> held(lock);
    staged--;
    std::free(at);
    return OK;
}
EXPORT int cuMemAlloc_v2(Address *at, std::size_t bytes) {
    WITH_CONTEXT;
    if (bytes == 0)
        return INVALID;
    if (taken + bytes > number("FAKE_GPU_MEMORY", std::size_t(1) << 30))
        return NO_MEMORY;
    void *block = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    std::memset(block, 0xff, bytes);
    *at = Address(block);
    memory[*at] = bytes;
    taken += bytes;
    return OK;
}
EXPORT int cuMemFree_v2(Address at) {
    WITH_CONTEXT;
    if (run() != OK)
        return sticky;
    auto found = memory.find(at);
    if (found == memory.end())
        return INVALID;
    taken -= found->second;
    memory.erase(found);
    std::free(reinterpret_cast<void *>(at));
    return OK;
}
EXPORT int cuMemGetInfo_v2(std::size_t *free, std::size_t *total) {
    WITH_CONTEXT;
    *total = number("FAKE_GPU_MEMORY", std::size_t(1) << 30);
    *free = *total - taken;
    return OK;
}
EXPORT int cuMemsetD8Async(Address at, unsigned char value, std::size_t bytes, void *) {
    WITH_CONTEXT;
    return later([=] {
        if (!within(at, bytes))
            return int(ILLEGAL);
        std::memset(reinterpret_cast<void *>(at), value, bytes);
        return int(OK);
    });
}
EXPORT int cuMemcpyHtoDAsync_v2(Address to, const void *from, std::size_t bytes, void *) {
    WITH_CONTEXT;
    return later([=] {
        if (!within(to, bytes))
            return int(ILLEGAL);
        std::memcpy(reinterpret_cast<void *>(to), from, bytes);
        return int(OK);
    });
}
EXPORT int cuMemcpyDtoHAsync_v2(void *to, Address from, std::size_t bytes, void *) {
    WITH_CONTEXT;
    return later([=] {
        if (!within(from, bytes))
            return int(ILLEGAL);
        std::memcpy(to, reinterpret_cast<void *>(from), bytes);
        return int(OK);
    });
}
EXPORT int cuMemcpyDtoDAsync_v2(Address to, Address from, std::size_t bytes, void *) {
    WITH_CONTEXT;
    return later([=] {
        if (!within(to, bytes) || !within(from, bytes))
            return int(ILLEGAL);
        std::memcpy(reinterpret_cast<void *>(to), reinterpret_cast<void *>(from), bytes);
        return int(OK);
    });
}
EXPORT int cuModuleLoadData(void **module, const void *image) {
    WITH_CONTEXT;
    if (std::memcmp(image, "\x7f" "ELF", 4) != 0)
        return INVALID;
    *module = &memory;
    return OK;
}
EXPORT int cuModuleUnload(void *) { return OK; }
EXPORT int cuModuleGetFunction(void **function, void *, const char *name) {
    WITH_CONTEXT;
    static std::map<std::string, std::string> names;
    std::uint64_t sizes[64];
    if (host_sizes(name, sizes, 64) < 0)
        return NOT_FOUND;
    *function = &(names[name] = name);
    return OK;
}
EXPORT int cuFuncGetAttribute(int *value, int, void *) {
    *value = 0;
    return OK;
}
EXPORT int cuFuncSetAttribute(void *, int, int) { return OK; }
EXPORT int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned,
                          unsigned shared, void *, void **arguments, void **) {
    WITH_CONTEXT;
    std::string name = *static_cast<std::string *>(function);
    if (x == 0 || y == 0 || z == 0)
        return INVALID;
    std::vector<std::uint64_t> sizes(64);
    sizes.resize(std::size_t(host_sizes(name.c_str(), sizes.data(), 64)));
    // The arguments may change as soon as the call is back.
    std::vector<std::vector<unsigned char>> values;
    for (std::size_t i = 0; i < sizes.size(); i++) {
        auto *bytes = static_cast<unsigned char *>(arguments[i]);
        values.emplace_back(bytes, bytes + sizes[i]);
    }
    int n = ++launches[name];
    const char *fail = std::getenv("FAKE_GPU_FAIL");
    if (fail && name + ":" + std::to_string(n) == fail)
        return later([] { return int(ILLEGAL); });
    return later([=] {
        std::vector<void *> places;
        for (auto &value : values)
            places.push_back(const_cast<unsigned char *>(value.data()));
        unsigned grid[3] = {x, y, z};
        const char *error = host_launch(name.c_str(), grid, threads, shared, places.data(), sizes.data(),
                                        unsigned(sizes.size()), 0);
        if (error)
            std::fprintf(stderr, "fake GPU: %s\n", error);
        return int(error ? ILLEGAL : OK);
    });
}
EXPORT int cuGetErrorName(int error, const char **text) {
    *text = error == ILLEGAL ? "CUDA_ERROR_ILLEGAL_ADDRESS" : error == NO_DEVICE ? "CUDA_ERROR_NO_DEVICE" : "CUDA_ERROR";
    return OK;
}
EXPORT int cuGetErrorString(int error, const char **text) {
    static thread_local std::string words;
    words = error == ILLEGAL ? "an illegal memory access was encountered" : "error " + std::to_string(error);
    *text = words.c_str();
    return OK;
}

// Products: matrices are column by column.

namespace {
struct Layout {
    int type;
    std::uint64_t rows, columns;
    std::int64_t stride;
    int batch = 1;
    std::int64_t step = 0;

    float element(Address at, int b, std::uint64_t i, std::uint64_t j) const {
        std::int64_t place = b * step + std::int64_t(i) + std::int64_t(j) * stride;
        if (type == 0)
            return reinterpret_cast<const float *>(at)[place];
        std::uint32_t bits = std::uint32_t(reinterpret_cast<const std::uint16_t *>(at)[place]) << 16;
        float value;
        std::memcpy(&value, &bits, 4);
        return value;
    }
    std::size_t bytes() const {
        auto last = (batch - 1) * step + std::int64_t(columns - 1) * stride + std::int64_t(rows);
        return std::size_t(last) * (type == 0 ? 4 : 2);
    }
};
struct Operation {
    int compute, turned[2] = {0, 0};
};
struct Preference {
    std::uint64_t workspace = 0;
    std::uint32_t aligned[4] = {256, 256, 256, 256};
};
// cublasLtMatmulHeuristicResult_t
struct Heuristic {
    std::uint64_t algorithm[8];
    std::size_t workspace;
    int state;
    float waves;
    int reserved[4];
};
} // namespace

EXPORT int cublasLtCreate(void **handle) {
    const char *lacks = std::getenv("FAKE_GPU_LACKS");
    *handle = new int(0);
    return lacks && std::strcmp(lacks, "products") == 0 ? 1 : OK;
}
EXPORT std::size_t cublasLtGetVersion() { return 130000; }
EXPORT int cublasLtDestroy(void *handle) {
    delete static_cast<int *>(handle);
    return OK;
}
EXPORT int cublasLtMatmulDescCreate(void **out, int compute, int) {
    *out = new Operation{compute};
    return OK;
}
EXPORT int cublasLtMatmulDescSetAttribute(void *operation, int attribute, const void *value, std::size_t bytes) {
    if ((attribute != 3 && attribute != 4) || bytes != 4)
        return INVALID;
    std::memcpy(&static_cast<Operation *>(operation)->turned[attribute - 3], value, 4);
    return OK;
}
EXPORT int cublasLtMatmulDescDestroy(void *operation) {
    delete static_cast<Operation *>(operation);
    return OK;
}
EXPORT int cublasLtMatrixLayoutCreate(void **out, int type, std::uint64_t rows, std::uint64_t columns, std::int64_t stride) {
    if ((type != 0 && type != 14) || stride < std::int64_t(rows))
        return INVALID;
    *out = new Layout{type, rows, columns, stride};
    return OK;
}
EXPORT int cublasLtMatrixLayoutSetAttribute(void *layout, int attribute, const void *value, std::size_t bytes) {
    auto *l = static_cast<Layout *>(layout);
    if (attribute == 5 && bytes == 4)
        std::memcpy(&l->batch, value, 4);
    else if (attribute == 6 && bytes == 8)
        std::memcpy(&l->step, value, 8);
    else
        return INVALID;
    return OK;
}
EXPORT int cublasLtMatrixLayoutDestroy(void *layout) {
    delete static_cast<Layout *>(layout);
    return OK;
}
EXPORT int cublasLtMatmulPreferenceCreate(void **out) {
    *out = new Preference{};
    return OK;
}
EXPORT int cublasLtMatmulPreferenceSetAttribute(void *preference, int attribute, const void *value, std::size_t bytes) {
    auto *p = static_cast<Preference *>(preference);
    if (attribute == 1 && bytes == 8)
        std::memcpy(&p->workspace, value, 8);
    else if (attribute >= 5 && attribute <= 8 && bytes == 4)
        std::memcpy(&p->aligned[attribute - 5], value, 4);
    else
        return INVALID;
    return OK;
}
EXPORT int cublasLtMatmulPreferenceDestroy(void *preference) {
    delete static_cast<Preference *>(preference);
    return OK;
}
EXPORT int cublasLtMatmulAlgoGetHeuristic(void *, void *, void *, void *, void *, void *, void *preference, int,
                                          Heuristic *found, int *count) {
    auto *p = static_cast<Preference *>(preference);
    *found = {};
    for (int i = 0; i < 4; i++)
        found->algorithm[i] = p->aligned[i];
    found->algorithm[4] = p->workspace;
    *count = 1;
    return OK;
}
EXPORT int cublasLtMatmul(void *, void *operation, const float *alpha, Address a, void *la, Address b, void *lb,
                          const float *beta, Address c, void *lc, Address d, void *, const std::uint64_t *algorithm,
                          Address workspace, std::size_t room, void *) {
    WITH_CONTEXT;
    Operation o = *static_cast<Operation *>(operation);
    Layout left = *static_cast<Layout *>(la), right = *static_cast<Layout *>(lb), to = *static_cast<Layout *>(lc);
    std::uint64_t m = o.turned[0] ? left.columns : left.rows, k = o.turned[0] ? left.rows : left.columns;
    std::uint64_t n = o.turned[1] ? right.rows : right.columns, depth = o.turned[1] ? right.columns : right.rows;
    if (m != to.rows || n != to.columns || k != depth || left.type != right.type || to.type != 0 || c != d)
        return 7; // CUBLAS_STATUS_INVALID_VALUE
    if (left.batch != to.batch || right.batch != to.batch || room < algorithm[4])
        return 7;
    Address places[] = {a, b, c, d};
    for (int i = 0; i < 4; i++)
        if (places[i] % algorithm[i] != 0)
            return 15; // CUBLAS_STATUS_NOT_SUPPORTED
    float factor = *alpha, kept = *beta;
    return later([=] {
        if (!within(a, left.bytes()) || !within(b, right.bytes()) || !within(c, to.bytes()) || !within(workspace, room))
            return int(ILLEGAL);
        for (int i = 0; i < to.batch; i++)
            for (std::uint64_t column = 0; column < n; column++)
                for (std::uint64_t row = 0; row < m; row++) {
                    double sum = 0;
                    for (std::uint64_t e = 0; e < k; e++) {
                        float x = o.turned[0] ? left.element(a, i, e, row) : left.element(a, i, row, e);
                        float y = o.turned[1] ? right.element(b, i, column, e) : right.element(b, i, e, column);
                        sum += double(x) * double(y);
                    }
                    std::int64_t place = i * to.step + std::int64_t(row) + std::int64_t(column) * to.stride;
                    float &target = reinterpret_cast<float *>(c)[place];
                    target = kept == 0 ? factor * float(sum) : kept * target + factor * float(sum);
                }
        return int(OK);
    });
}

// The compiler: its machine code is a name.

EXPORT int nvrtcCreateProgram(void **program, const char *, const char *name, int headers, const char *const *,
                              const char *const *) {
    const char *lacks = std::getenv("FAKE_GPU_LACKS");
    *program = new std::string(name);
    return (lacks && std::strcmp(lacks, "compiler") == 0) || headers == 0 ? 1 : OK;
}
EXPORT int nvrtcCompileProgram(void *, int, const char *const *) { return OK; }
EXPORT int nvrtcDestroyProgram(void **program) {
    delete static_cast<std::string *>(*program);
    return OK;
}
EXPORT int nvrtcGetCUBINSize(void *program, std::size_t *size) {
    *size = 4 + static_cast<std::string *>(program)->size();
    return OK;
}
EXPORT int nvrtcGetCUBIN(void *program, char *code) {
    std::memcpy(code, "\x7f" "ELF", 4);
    auto &name = *static_cast<std::string *>(program);
    std::memcpy(code + 4, name.data(), name.size());
    return OK;
}

// NCCL: ranks meet in a file of shared memory; whoever waits for a rank that is gone waits until it is told to stop.

namespace {
constexpr std::size_t MOST = 4 << 20; // floats of a sum
struct Meeting {
    std::atomic<unsigned> arrived, left, round;
    float values[]; // MOST for each rank
};
struct Communicator {
    Meeting *meeting;
    unsigned ranks, rank, rounds = 0;
    std::atomic<bool> stopped{false};

    // Until all have come this far.
    bool meet(std::atomic<unsigned> &count) {
        unsigned all = ++rounds * ranks;
        count.fetch_add(1);
        while (count.load() < all)
            if (stopped.load())
                return false;
            else
                std::this_thread::yield();
        return true;
    }
};
struct Id {
    char bytes[128];
};
} // namespace

EXPORT int ncclGetUniqueId(Id *id) {
    std::memset(id, 0, sizeof *id);
    std::snprintf(id->bytes, sizeof id->bytes, "/tmp/fake-nccl-%d-%u", int(getpid()), unsigned(time(nullptr)));
    return OK;
}
EXPORT int ncclCommInitRank(void **out, int ranks, Id id, int rank) {
    std::size_t bytes = sizeof(Meeting) + std::size_t(ranks) * MOST * sizeof(float);
    int file = open(id.bytes, O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, off_t(bytes)) != 0)
        return 2;
    void *shared = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    auto *c = new Communicator{static_cast<Meeting *>(shared), unsigned(ranks), unsigned(rank)};
    if (!c->meet(c->meeting->arrived))
        return 2;
    c->rounds = 0;
    unlink(id.bytes);
    *out = c;
    return OK;
}
EXPORT int ncclAllReduce(const void *from, void *to, std::size_t count, int type, int operation, void *communicator, void *) {
    WITH_CONTEXT;
    if (type != 7 || operation != 0 || from != to || count > MOST)
        return 4; // ncclInvalidArgument
    auto *c = static_cast<Communicator *>(communicator);
    return later([=] {
        if (!within(Address(to), count * sizeof(float)))
            return int(ILLEGAL);
        float *all = c->meeting->values;
        std::memcpy(all + c->rank * MOST, to, count * sizeof(float));
        if (!c->meet(c->meeting->left))
            return int(OK);
        // From the last to the first: another order than Tercio's own.
        for (std::size_t i = 0; i < count; i++) {
            float sum = 0;
            for (unsigned r = c->ranks; r-- > 0;)
                sum += all[r * MOST + i];
            static_cast<float *>(to)[i] = sum;
        }
        return c->meet(c->meeting->left), int(OK);
    });
}
EXPORT int ncclCommAbort(void *communicator) {
    static_cast<Communicator *>(communicator)->stopped = true;
    return OK;
}
EXPORT int ncclCommDestroy(void *) { return OK; }
EXPORT int ncclCommGetAsyncError(void *, int *error) {
    *error = OK;
    return OK;
}
EXPORT const char *ncclGetErrorString(int) { return "fake NCCL's error"; }
