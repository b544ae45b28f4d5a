// The best rows of every (layer, KV head) for the queries of a block.

#pragma once

#include <cstdint>

#include "scan.h"

namespace herald {

// The key index of herald/kvstore/key_index.py.
struct KeyIndexView {
    const uint8_t* codes;      // [layers, pages, heads, page_size, n * bits / 8]
    const float* row_scales;   // [layers, pages, heads, page_size], with 8 bits nothing
    const int8_t* mean_codes;  // [layers, pages, heads, 2, n]
    const float* page_scales;  // [layers, pages, heads, 2]: of the codes, of the mean
    const float* signs;        // [n]
    int64_t layers, pages, heads, page_size;
    int head_dim, n, bits;
};

struct Selection {
    KeyIndexView index;
    const int32_t* page_ids;  // of the request, in order of position
    int64_t first, last, k;   // 1 <= k <= last - first
    const void* queries;      // [layers, positions, query_heads, head_dim]
    int kind;                 // ValueKind of them
    const float* lse;         // [layers, positions, query_heads]
    int64_t positions, query_heads;
    float scale;
    int32_t* out;  // [layers, heads, k]
};

// Every (layer, head) on `threads` threads. All pages and shapes are known to be valid.
void Select(const Selection& selection, const ScanKernels& kernels, int threads);

}  // namespace herald
