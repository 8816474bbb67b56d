// Cross-entropy over a block of logits, label smoothing, the greatest of a row, the k greatest.
//
// Layouts: logits `[rows, classes]` in f32, as the product leaves them; the gradient in the storage type, in place where that is f32.
// A block of 256 threads a row, grid = rows; thread t takes the classes t, t + 256, ..., sums meet in a fixed tree.
// A caller cuts a batch into fixed blocks of rows (ops/cross_entropy.rs), so that logits are never held whole.
// Limits: labels below `classes`. `top_k` reads the row k times: it is meant for the few of beam search.
#include "functions.h"

constexpr u32 THREADS = 256;

// losses[row] = log sum exp - logit of the label.
KERNEL(256, cross_entropy, const float *logits, const u32 *labels, u32 classes, float *losses,
       float *log_sum) {
    u64 row = blockIdx.x;
    const float *x = logits + row * classes;
    float m = minus_infinity(), sum = 0;
    for (u32 c = threadIdx.x; c < classes; c += THREADS)
        m = greater(m, x[c]);
    m = block_max<THREADS>(m);
    for (u32 c = threadIdx.x; c < classes; c += THREADS)
        sum += exponential(x[c] - m);
    sum = block_sum<THREADS>(sum);
    if (threadIdx.x == 0) {
        float total = m + logarithm(sum);
        log_sum[row] = total;
        losses[row] = total - x[labels[row]];
    }
}
// gradient = factor * (softmax(logits) - onehot(label))
KERNEL(256, cross_entropy_backward, const float *logits, const u32 *labels, const float *log_sum, u32 classes,
       float factor, real *gradient) {
    u64 row = blockIdx.x;
    u32 label = labels[row];
    float total = log_sum[row];
    for (u32 c = threadIdx.x; c < classes; c += THREADS) {
        float p = factor * exponential(logits[row * classes + c] - total);
        store(gradient[row * classes + c], c == label ? p - factor : p);
    }
}
// losses[row] += smoothing * (logit of the label - mean of the row)
KERNEL(256, smooth_losses, const float *logits, const u32 *labels, u32 classes, float smoothing,
       float *losses) {
    u64 row = blockIdx.x;
    const float *x = logits + row * classes;
    float sum = 0;
    for (u32 c = threadIdx.x; c < classes; c += THREADS)
        sum += x[c];
    sum = block_sum<THREADS>(sum);
    if (threadIdx.x == 0)
        losses[row] += smoothing * (x[labels[row]] - sum / float(classes));
}
// gradient -= amount / classes everywhere, += amount at the label
KERNEL(256, smooth_gradient, real *gradient, const u32 *labels, u32 classes, float amount) {
    u64 row = blockIdx.x;
    float spread = amount / float(classes);
    for (u32 c = threadIdx.x; c < classes; c += THREADS) {
        float g = load(gradient[row * classes + c]) - spread;
        store(gradient[row * classes + c], c == labels[row] ? g + amount : g);
    }
}

// A place in a row and its value; the order of `top_k`: greater first, of equals the earlier, what is not a number last.
struct Candidate {
    float value;
    u32 at;
};
__device__ inline bool before(Candidate a, Candidate b) {
    bool a_nan = a.value != a.value, b_nan = b.value != b.value;
    if (a_nan != b_nan)
        return b_nan;
    return !a_nan && a.value != b.value ? a.value > b.value : a.at < b.at;
}
constexpr u32 NOWHERE = 0xffffffffu;

// The first of the block's candidates; `at` NOWHERE: none.
__device__ inline Candidate first_of_block(Candidate own) {
    SHARED(Candidate, all, THREADS / WARP);
    for (u32 d = WARP / 2; d > 0; d /= 2) {
        Candidate other = {__shfl_xor_sync(ALL_LANES, own.value, d), __shfl_xor_sync(ALL_LANES, own.at, d)};
        if (other.at != NOWHERE && (own.at == NOWHERE || before(other, own)))
            own = other;
    }
    if (threadIdx.x % WARP == 0)
        all[threadIdx.x / WARP] = own;
    __syncthreads();
    Candidate first = all[0];
    for (u32 w = 1; w < THREADS / WARP; w++)
        if (all[w].at != NOWHERE && (first.at == NOWHERE || before(all[w], first)))
            first = all[w];
    __syncthreads();
    return first;
}

// The place of the greatest element of every row, the first of equals; what is not a number is passed over.
KERNEL(256, argmax, const float *x, u32 width, u32 *places) {
    u64 row = blockIdx.x;
    Candidate own = {0.0f, NOWHERE};
    for (u32 c = threadIdx.x; c < width; c += THREADS) {
        Candidate next = {x[row * width + c], c};
        if (own.at == NOWHERE || before(next, own))
            own = next;
    }
    own = first_of_block(own);
    if (threadIdx.x == 0)
        places[row] = own.at;
}
// The k first of every row in order, `[rows, k]`; k at most `width`.
KERNEL(256, top_k, const float *x, u32 width, u32 k, u32 *places, float *values) {
    u64 row = blockIdx.x;
    Candidate last = {0.0f, NOWHERE};
    for (u32 n = 0; n < k; n++) {
        Candidate own = {0.0f, NOWHERE};
        for (u32 c = threadIdx.x; c < width; c += THREADS) {
            Candidate next = {x[row * width + c], c};
            bool open = last.at == NOWHERE || before(last, next);
            if (open && (own.at == NOWHERE || before(next, own)))
                own = next;
        }
        last = first_of_block(own);
        if (threadIdx.x == 0) {
            places[row * k + n] = last.at;
            values[row * k + n] = last.value;
        }
    }
}
