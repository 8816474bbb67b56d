// Adam and AdamW over a stretch of the arenas in one pass, and Adafactor over one parameter.
//
// Adam: one thread an element, grid = ceil(n / 256); its constants are computed by the host in f64 (AdamConstants), the arithmetic
// is that of the CPU device, bit for bit.
// Adafactor goes through kernels in this order, all sums of squares staying on the device: `fold_dots` of `dot_blocks` (size of the
// values), factor_rows, factor_columns, fold_factor_columns, mean_factor_rows, factored_squares or vector_squares, fold_dots,
// factored_step or vector_step. f32 only: the arenas are f32 with either storage type.
// Limits: a matrix of at most 65535 * 128 rows.
#include "rows.h"

constexpr u32 THREADS = 256;

struct AdamConstants {
    float decay, beta1, beta2, rest1, rest2, rate, root, eps, gradient_scale;
};

KERNEL(256, adam, float *p, const float *g, float *m, float *v, u64 n, AdamConstants c) {
    u64 i = u64(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= n)
        return;
    float gradient = g[i] * c.gradient_scale;
    float first = fmaf(m[i], c.beta1, c.rest1 * gradient);
    float second = fmaf(v[i], c.beta2, c.rest2 * gradient * gradient);
    float denominator = fmaf(sqrtf(second), c.root, c.eps);
    m[i] = first;
    v[i] = second;
    p[i] = fmaf(-c.rate, first / denominator, p[i] * c.decay);
}

// Adafactor's numbers, computed by the host in f64.
struct FactorConstants {
    double lr, eps, parameter_eps, clip_threshold, beta2, weight_decay;
    float gradient_scale;
    u32 scale_parameter; // whether the rate is scaled by the size of the values
};

// From sums of squares on the device to the factors on the step and on the values.
struct Factors {
    float step, decay;
};
__device__ inline Factors factors(const FactorConstants &c, double values, double steps, u64 n) {
    double rate = c.lr;
    if (c.scale_parameter) {
        double size = sqrt(values / double(n));
        rate *= size > c.parameter_eps ? size : c.parameter_eps;
    }
    double clip = sqrt(steps / double(n)) / c.clip_threshold;
    return {float(rate / (clip > 1.0 ? clip : 1.0)), float(1.0 - rate * c.weight_decay)};
}
__device__ inline float square(float g, float scale) { return (g * scale) * (g * scale); }

// rows[i] = the running mean of (g^2 + eps) of a row; a block a row.
KERNEL(256, factor_rows, const float *g, u32 columns, FactorConstants c, float *rows) {
    u64 row = blockIdx.x;
    float sum = 0;
    for (u32 j = threadIdx.x; j < columns; j += THREADS)
        sum += square(g[row * columns + j], c.gradient_scale);
    sum = block_sum<THREADS>(sum);
    if (threadIdx.x == 0)
        rows[row] = float(c.beta2 * rows[row] + (1.0 - c.beta2) * (double(sum) / columns + c.eps));
}
// Partial sums of g^2 of the columns, `[ceil(rows / 128), columns]`; grid as sum_rows.
KERNEL(256, factor_columns, const float *g, u64 rows, u32 columns, FactorConstants c, float *part) {
    u32 j = own_column();
    float sum = sum_of_rows(first_row(), end_row(rows), j < columns,
                            [&](u64 row) { return square(g[row * columns + j], c.gradient_scale); });
    if (is_first_part() && j < columns)
        part[u64(blockIdx.y) * columns + j] = sum;
}
// of_columns[j] = the running mean of (g^2 + eps) of a column; a thread a column.
KERNEL(256, fold_factor_columns, const float *part, u64 rows, u32 columns, FactorConstants c,
       float *of_columns) {
    u32 j = blockIdx.x * THREADS + threadIdx.x;
    if (j >= columns)
        return;
    double sum = 0;
    for (u64 block = 0; block * PARTIAL_ROWS < rows; block++)
        sum += part[block * columns + j];
    of_columns[j] = float(c.beta2 * of_columns[j] + (1.0 - c.beta2) * (sum / double(rows) + c.eps));
}
// *mean = the mean of the rows' statistics; one block.
KERNEL(256, mean_factor_rows, const float *rows, u64 count, double *mean) {
    SHARED(double, sums, THREADS);
    double sum = 0;
    for (u64 i = threadIdx.x; i < count; i += THREADS)
        sum += rows[i];
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        sum = 0;
        for (u32 t = 0; t < THREADS; t++)
            sum += sums[t];
        *mean = sum / double(count);
    }
}
// What g is divided by, as a factor: of a matrix by row and column, of a vector by element.
__device__ inline float of_row(const float *rows, const double *mean, u64 row) {
    return float(sqrt(*mean / rows[row]));
}
__device__ inline float of_column(const float *columns, u32 j, float scale) {
    return scale / sqrtf(columns[j]);
}

// out[row] = sum of squares of the step of a row, before the rate.
KERNEL(256, factored_squares, const float *g, u32 columns, FactorConstants c, const float *rows,
       const float *of_columns, const double *mean, double *out) {
    u64 row = blockIdx.x;
    float sum = 0;
    for (u32 j = threadIdx.x; j < columns; j += THREADS) {
        float u = g[row * columns + j] * of_column(of_columns, j, c.gradient_scale);
        sum = fmaf(u, u, sum);
    }
    sum = block_sum<THREADS>(sum);
    double r = of_row(rows, mean, row);
    if (threadIdx.x == 0)
        out[row] = double(sum) * r * r;
}
// `values` and `steps`: the sums of squares of the values and of the steps, on the device.
KERNEL(256, factored_step, float *p, const float *g, u64 n, u32 columns, FactorConstants c, const float *rows,
       const float *of_columns, const double *mean, const double *values, const double *steps) {
    Factors f = factors(c, *values, *steps, n);
    u64 row = blockIdx.x;
    float factor = f.step * of_row(rows, mean, row);
    for (u32 j = threadIdx.x; j < columns; j += THREADS) {
        u64 i = row * columns + j;
        p[i] = fmaf(-factor, g[i] * of_column(of_columns, j, c.gradient_scale), p[i] * f.decay);
    }
}
// A vector: v = the running mean of g^2 + eps; out[block] = sum of squares of the step of the block's 256 elements.
KERNEL(256, vector_squares, const float *g, u64 n, FactorConstants c, float *v, double *out) {
    u64 i = u64(blockIdx.x) * THREADS + threadIdx.x;
    float u = 0;
    if (i < n) {
        float gradient = g[i] * c.gradient_scale;
        v[i] = fmaf(v[i], float(c.beta2), float(1.0 - c.beta2) * fmaf(gradient, gradient, float(c.eps)));
        u = gradient / sqrtf(v[i]);
    }
    float sum = block_sum<THREADS>(u * u);
    if (threadIdx.x == 0)
        out[blockIdx.x] = sum;
}
KERNEL(256, vector_step, float *p, const float *g, u64 n, FactorConstants c, const float *v,
       const double *values, const double *steps) {
    u64 i = u64(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= n)
        return;
    Factors f = factors(c, *values, *steps, n);
    p[i] = fmaf(-f.step, g[i] * c.gradient_scale / sqrtf(v[i]), p[i] * f.decay);
}
