// What the kernels of late interaction share: a pair that is scored, and what stands for no row.
#pragma once
#include "common.h"

constexpr u32 NO_ROW = 0xffffffffu;

struct Pair {
    u32 query, document;
};
