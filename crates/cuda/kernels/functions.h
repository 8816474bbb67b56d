// exp, tanh, erf and log in f32, of multiplications and additions only: the formulas of the CPU device (src/cpu/math.rs), so
// that a GPU, the host that tests the kernels and the CPU device give the same bits. log is Moshier's (Cephes).
// Relative error of exp and log below 3e-7; absolute error of tanh below 2e-7, of erf below 4e-7.
#pragma once
#include "common.h"

// 0 below -87.3, saturates above 88.
__device__ inline float exponential(float x) {
    const float ROUND = 12582912.0f; // 1.5 * 2^23: adding it rounds to an integer
    float c = x > 88.0f ? 88.0f : x;
    c = c < -87.3f ? -87.3f : c;
    float rounded = fmaf(c, 1.44269504f, ROUND);
    float n = rounded - ROUND;
    float r = fmaf(n, -0.6933594f, c);
    r = fmaf(n, 2.1219444e-4f, r);
    float p = fmaf(1.9875691e-4f, r, 1.3981999e-3f);
    p = fmaf(p, r, 8.333452e-3f);
    p = fmaf(p, r, 4.1665796e-2f);
    p = fmaf(p, r, 1.6666665e-1f);
    p = fmaf(p, r, 0.5f);
    float y = fmaf(p, r * r, r + 1.0f);
    // The last bits of `rounded` are n.
    y = __uint_as_float(__float_as_uint(y) + (__float_as_uint(rounded) << 23));
    y = x < -87.3f ? 0.0f : y;
    return x != x ? x : y;
}

__device__ inline float hyperbolic_tangent(float x) {
    float a = fabsf(x);
    float far = 1.0f - 2.0f / (exponential(2.0f * a) + 1.0f);
    float z = x * x;
    float p = fmaf(-5.704988e-3f, z, 2.063909e-2f);
    p = fmaf(p, z, -5.373971e-2f);
    p = fmaf(p, z, 1.3331442e-1f);
    p = fmaf(p, z, -3.333328e-1f);
    float near = fmaf(p * z, a, a);
    return copysignf(a < 0.625f ? near : far, x);
}

// erf(x) and exp(-x^2) (Abramowitz and Stegun 7.1.26).
struct ErfAndGauss {
    float erf, gauss;
};
__device__ inline ErfAndGauss erf_and_gauss(float x) {
    float z = fabsf(x);
    float t = 1.0f / fmaf(0.3275911f, z, 1.0f);
    float e = exponential(-z * z);
    float p = fmaf(1.0614054f, t, -1.453152f);
    p = fmaf(p, t, 1.4214137f);
    p = fmaf(p, t, -0.28449674f);
    p = fmaf(p, t, 0.2548296f);
    return {copysignf(fmaf(-p * t, e, 1.0f), x), e};
}

// Natural logarithm; minus infinity at 0, NaN below. Numbers below 2^-126 count as 0.
__device__ inline float logarithm(float x) {
    if (!(x > 0.0f) || x > 3.4028235e38f)
        return x == 0.0f ? minus_infinity() : x < 0.0f ? __uint_as_float(0x7fc00000u) : x;
    u32 bits = __float_as_uint(x);
    if (bits < 0x800000u)
        return minus_infinity();
    // x = m 2^e with m in [sqrt(1/2), sqrt(2)).
    float e = float(int(bits >> 23) - 126);
    float m = __uint_as_float((bits & 0x7fffffu) | 0x3f000000u);
    if (m < 0.70710677f) {
        e -= 1.0f;
        m += m;
    }
    m -= 1.0f;
    float z = m * m;
    float p = fmaf(7.0376836e-2f, m, -1.151461e-1f);
    p = fmaf(p, m, 1.1676999e-1f);
    p = fmaf(p, m, -1.2420141e-1f);
    p = fmaf(p, m, 1.4249323e-1f);
    p = fmaf(p, m, -1.6668057e-1f);
    p = fmaf(p, m, 2.0000715e-1f);
    p = fmaf(p, m, -2.4999994e-1f);
    p = fmaf(p, m, 3.3333331e-1f);
    float y = p * m * z;
    y = fmaf(e, -2.1219444e-4f, y);
    y = fmaf(-0.5f, z, y);
    return fmaf(e, 0.6933594f, m + y);
}
