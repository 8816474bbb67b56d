// RMSNorm and LayerNorm, forward and backward, and the end of a sub-layer that reads a norm.
//
// Layouts: rows of `width` elements. The parameters of a LayerNorm lie together: `width` weights, then as many biases where `has_bias`.
// Kernels of rows: a warp a row, four rows a block of 128 threads, grid = ceil(rows / 4); lane l adds the elements l, l + 32, ...
// and the lanes meet in a fixed tree, as in the CPU's kernels. The backward leaves what it found of each row in `stats`; the
// gradient of the parameters is made of them in partial sums of 128 rows, grid = (ceil(width / 32), ceil(rows / 128)), which
// `fold_rows` (sums.cu) adds up. Limits: rows below 128 * 65535; any width, fastest below about 4096.
#include "random.h"
#include "rows.h"

constexpr u32 ROWS = 4;

__device__ inline u64 own_row() { return u64(blockIdx.x) * ROWS + threadIdx.x / WARP; }
__device__ inline u32 own_lane() { return threadIdx.x % WARP; }

// One over the root of the mean of squares of a row.
__device__ inline float inverse_root(const real *x, u32 width, float eps) {
    float sum = 0;
    for (u32 c = own_lane(); c < width; c += WARP)
        sum = fmaf(load(x[c]), load(x[c]), sum);
    return 1.0f / sqrtf(warp_sum(sum) / float(width) + eps);
}

struct Moments {
    float mean, r;
};
// Mean of a row, and one over its deviation.
__device__ inline Moments moments(const real *x, u32 width, float eps) {
    float sum = 0;
    for (u32 c = own_lane(); c < width; c += WARP)
        sum += load(x[c]);
    float mean = warp_sum(sum) / float(width), squares = 0;
    for (u32 c = own_lane(); c < width; c += WARP) {
        float d = load(x[c]) - mean;
        squares = fmaf(d, d, squares);
    }
    return {mean, 1.0f / sqrtf(warp_sum(squares) / float(width) + eps)};
}

// y = x r weight
KERNEL(128, rms_norm, const real *x, const float *weight, float eps, real *y, u64 rows, u32 width) {
    u64 row = own_row();
    if (row >= rows)
        return;
    x += row * width;
    y += row * width;
    float r = inverse_root(x, width, eps);
    for (u32 c = own_lane(); c < width; c += WARP)
        store(y[c], load(x[c]) * r * weight[c]);
}
// With h = x r and t = dy weight: dx += r (t - h mean(t h)); stats[row] = r.
KERNEL(128, rms_norm_backward, const real *x, const float *weight, float eps, const real *dy, real *dx,
       float *stats, u64 rows, u32 width) {
    u64 row = own_row();
    if (row >= rows)
        return;
    x += row * width;
    dy += row * width;
    dx += row * width;
    float r = inverse_root(x, width, eps), sum = 0;
    for (u32 c = own_lane(); c < width; c += WARP)
        sum = fmaf(load(dy[c]) * weight[c], load(x[c]) * r, sum);
    float mean = warp_sum(sum) / float(width);
    for (u32 c = own_lane(); c < width; c += WARP) {
        float h = load(x[c]) * r;
        store(dx[c], fmaf(r, fmaf(-h, mean, load(dy[c]) * weight[c]), load(dx[c])));
    }
    if (own_lane() == 0)
        stats[row] = r;
}
// Partial sums of dy h, `[blocks, width]`.
KERNEL(256, rms_norm_weight, const real *x, const real *dy, const float *stats, u64 rows, u32 width,
       float *part) {
    u32 c = own_column();
    float sum = sum_of_rows(first_row(), end_row(rows), c < width, [&](u64 row) {
        return load(dy[row * width + c]) * (load(x[row * width + c]) * stats[row]);
    });
    if (is_first_part() && c < width)
        part[u64(blockIdx.y) * width + c] = sum;
}

// y = (x - mean) r weight + bias
KERNEL(128, layer_norm, const real *x, const float *norm, u32 has_bias, float eps, real *y, u64 rows,
       u32 width) {
    u64 row = own_row();
    if (row >= rows)
        return;
    x += row * width;
    y += row * width;
    Moments m = moments(x, width, eps);
    for (u32 c = own_lane(); c < width; c += WARP)
        store(y[c], fmaf((load(x[c]) - m.mean) * m.r, norm[c], has_bias ? norm[width + c] : 0.0f));
}
// With h = (x - mean) r and t = dy weight: dx += r (t - mean(t) - h mean(t h)); stats = mean and r of every row.
KERNEL(128, layer_norm_backward, const real *x, const float *norm, float eps, const real *dy, real *dx,
       float *stats, u64 rows, u32 width) {
    u64 row = own_row();
    if (row >= rows)
        return;
    x += row * width;
    dy += row * width;
    dx += row * width;
    Moments m = moments(x, width, eps);
    float sum = 0, along = 0;
    for (u32 c = own_lane(); c < width; c += WARP) {
        float t = load(dy[c]) * norm[c];
        sum += t;
        along = fmaf(t, (load(x[c]) - m.mean) * m.r, along);
    }
    float mean = warp_sum(sum) / float(width);
    along = warp_sum(along) / float(width);
    for (u32 c = own_lane(); c < width; c += WARP) {
        float h = (load(x[c]) - m.mean) * m.r, t = load(dy[c]) * norm[c];
        store(dx[c], fmaf(m.r, fmaf(-h, along, t - mean), load(dx[c])));
    }
    if (own_lane() == 0) {
        stats[2 * row] = m.mean;
        stats[2 * row + 1] = m.r;
    }
}
// Partial sums of dy h, and behind them of dy where `has_bias`: `[blocks, width or 2 width]`.
KERNEL(256, layer_norm_weight, const real *x, const real *dy, const float *stats, u32 has_bias, u64 rows,
       u32 width, float *part) {
    u32 c = own_column(), stored = has_bias ? 2 * width : width;
    float sum = sum_of_rows(first_row(), end_row(rows), c < width, [&](u64 row) {
        float h = (load(x[row * width + c]) - stats[2 * row]) * stats[2 * row + 1];
        return load(dy[row * width + c]) * h;
    });
    if (is_first_part() && c < width)
        part[u64(blockIdx.y) * stored + c] = sum;
    if (!has_bias)
        return;
    sum = sum_of_rows(first_row(), end_row(rows), c < width,
                      [&](u64 row) { return load(dy[row * width + c]); });
    if (is_first_part() && c < width)
        part[u64(blockIdx.y) * stored + width + c] = sum;
}

// x = n + dropout(x + bias), n being `residual`, or with `norm` LayerNorm of its rows. No bias, no norm: null.
KERNEL(128, bias_residual, real *x, const float *bias, const real *residual, const float *norm, u32 has_bias,
       float eps, Dropout d, u64 rows, u32 width) {
    u64 row = own_row();
    if (row >= rows)
        return;
    x += row * width;
    residual += row * width;
    Moments m = norm ? moments(residual, width, eps) : Moments{0.0f, 0.0f};
    RowKey key = row_key(d, row);
    for (u32 c = own_lane(); c < width; c += WARP) {
        float n = load(residual[c]);
        if (norm)
            n = fmaf((n - m.mean) * m.r, norm[c], has_bias ? norm[width + c] : 0.0f);
        float v = bias ? load(x[c]) + bias[c] : load(x[c]);
        store(x[c], fmaf(v, kept(d, key, c), n));
    }
}
