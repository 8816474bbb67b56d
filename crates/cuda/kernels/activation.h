// Nonlinearities of feed-forward layers, value and derivative: the formulas and the bits of the CPU device.
// `kind` as the host numbers them: 0 relu, 1 gelu by tanh, 2 gelu by erf, 3 silu, 4 tanh.
#pragma once
#include "functions.h"

struct ValueAndSlope {
    float value, slope;
};

__device__ inline ValueAndSlope gelu_tanh(float x) {
    const float A = 0.7978846f; // sqrt(2 / pi)
    const float B = 0.044715f;
    float t = hyperbolic_tangent(A * fmaf(B * x * x, x, x));
    float du = A * fmaf(3.0f * B * x, x, 1.0f);
    return {0.5f * x * (1.0f + t), fmaf(0.5f * x * fmaf(-t, t, 1.0f), du, 0.5f * (1.0f + t))};
}
__device__ inline ValueAndSlope gelu_erf(float x) {
    ErfAndGauss e = erf_and_gauss(x * 0.70710678f);
    return {0.5f * x * (1.0f + e.erf), fmaf(x * 0.3989423f, e.gauss, 0.5f * (1.0f + e.erf))};
}
__device__ inline ValueAndSlope silu(float x) {
    float s = 1.0f / (1.0f + exponential(-x));
    return {x * s, s * fmaf(x, 1.0f - s, 1.0f)};
}

__device__ inline ValueAndSlope activate(u32 kind, float x) {
    switch (kind) {
    case 0:
        return x > 0.0f ? ValueAndSlope{x, 1.0f} : ValueAndSlope{0.0f, 0.0f};
    case 1:
        return gelu_tanh(x);
    case 2:
        return gelu_erf(x);
    case 3:
        return silu(x);
    default: {
        float t = hyperbolic_tangent(x);
        return {t, fmaf(-t, t, 1.0f)};
    }
    }
}
