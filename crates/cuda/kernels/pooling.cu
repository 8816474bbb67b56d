// Means of spans, rows of unit length, rotary positions; each with its backward.
//
// Layouts: rows of `width` elements. `span_means` and its backward: a block of 256 threads takes 32 columns of a span,
// grid = (spans, ceil(width / 32)), sums in the order of rows.h. Unit rows: a warp a row, four a block of 128 threads.
// `rotate`: a block of 256 threads a row; element i of the first half of a head and element i of the second are turned by the
// angle of the row's position, `cos` and `sin` being `[positions, half]`; `back` turns the other way, which is the backward.
// Limits: spans do not overlap; width at most 32 * 65535; positions are within the tables (the caller checks).
#include "rows.h"

constexpr u32 THREADS = 256;

__device__ inline u32 column_of_span() { return blockIdx.y * COLUMNS + threadIdx.x % COLUMNS; }

// y[s] = mean of the rows of span s; 0 where it is empty.
KERNEL(256, span_means, const real *x, u32 width, const Span *spans, real *y) {
    Span span = spans[blockIdx.x];
    u32 c = column_of_span();
    float sum =
        sum_of_rows(span.start, span.end, c < width, [&](u64 row) { return load(x[row * width + c]); });
    if (is_first_part() && c < width)
        store(y[u64(blockIdx.x) * width + c], sum / float(most(span.end - span.start, 1)));
}
// dx += dy[s] / rows of the span
KERNEL(256, span_means_backward, const real *dy, u32 width, const Span *spans, real *dx) {
    Span span = spans[blockIdx.x];
    u32 c = column_of_span();
    if (c >= width || span.start == span.end)
        return;
    float d = load(dy[u64(blockIdx.x) * width + c]) / float(span.end - span.start);
    for (u64 row = span.start + threadIdx.x / COLUMNS; row < span.end; row += PARTS)
        store(dx[row * width + c], load(dx[row * width + c]) + d);
}

__device__ inline u64 own_row() { return u64(blockIdx.x) * 4 + threadIdx.x / WARP; }
__device__ inline u32 own_lane() { return threadIdx.x % WARP; }

__device__ inline float row_length(const real *x, u32 width) {
    float sum = 0;
    for (u32 c = own_lane(); c < width; c += WARP)
        sum = fmaf(load(x[c]), load(x[c]), sum);
    return sqrtf(warp_sum(sum));
}
// y = x / max(|x|, least)
KERNEL(128, normalize, const real *x, float least, real *y, u64 rows, u32 width) {
    u64 row = own_row();
    if (row >= rows)
        return;
    x += row * width;
    y += row * width;
    float factor = 1.0f / greater(row_length(x, width), least);
    for (u32 c = own_lane(); c < width; c += WARP)
        store(y[c], load(x[c]) * factor);
}
// dx += (dy - x (x dy) / |x|^2) / |x|, or dy / least for a row that is shorter.
KERNEL(128, normalize_backward, const real *x, float least, const real *dy, real *dx, u64 rows, u32 width) {
    u64 row = own_row();
    if (row >= rows)
        return;
    x += row * width;
    dy += row * width;
    dx += row * width;
    float length = row_length(x, width), along = 0;
    for (u32 c = own_lane(); c < width; c += WARP)
        along = fmaf(load(x[c]), load(dy[c]), along);
    along = warp_sum(along) / (length * length);
    if (!(length > least))
        along = 0;
    float factor = 1.0f / greater(length, least);
    for (u32 c = own_lane(); c < width; c += WARP)
        store(dx[c], fmaf(fmaf(-load(x[c]), along, load(dy[c])), factor, load(dx[c])));
}

KERNEL(256, rotate, real *x, u32 stride, u32 columns, const float *cos, const float *sin, u32 half,
       const u32 *positions, u32 back) {
    u64 row = blockIdx.x, angles = u64(positions[row]) * half;
    for (u32 pair = threadIdx.x; pair < columns / 2; pair += THREADS) {
        u32 i = pair % half;
        u64 at = row * stride + pair / half * (2 * half) + i;
        float c = cos[angles + i], s = back ? -sin[angles + i] : sin[angles + i];
        float a = load(x[at]), b = load(x[at + half]);
        store(x[at], fmaf(-b, s, a * c));
        store(x[at + half], fmaf(a, s, b * c));
    }
}
