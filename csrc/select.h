// The best rows of every (layer, KV head) for the queries of a block.

#pragma once

#include <atomic>
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

// The (layer, head) tasks of a selection, which the threads take from the front and somebody else from the
// back, whoever is faster the more of them.
class Claims {
  public:
    explicit Claims(int64_t count) : range_(count) {}

    // The first task that is left, now the caller's; -1 for none.
    int64_t Front();
    // The first of the last `count` tasks that are left, all now the caller's; -1 unless `leave` more are
    // left to others.
    int64_t Back(int64_t count, int64_t leave);

  private:
    // Tasks [begin, end) are left: begin in the upper 32 bits, end in the lower.
    std::atomic<int64_t> range_;
};

// Every (layer, head), or those that `claims` gives if it is not null, on `threads` threads. All pages and
// shapes are known to be valid.
void Select(const Selection& selection, const ScanKernels& kernels, int threads, Claims* claims);

// What the scan of one layer makes of its queries, for a scan that runs elsewhere.
struct LayerQueries {
    int8_t* codes;  // [heads, width, n]
    float* lead;    // [heads, width]
    float* reach;   // [heads]
};
int64_t QueryWidth(const Selection& selection);
void PrepareLayer(const Selection& selection, const ScanKernels& kernels, int64_t layer,
                  const LayerQueries& out);

// The best rows of one layer from order keys that were computed elsewhere.
// keys [heads, stride], of which those of position `first` stand at `begin`; out [heads, k].
void TopKOfLayer(const ScanKernels& kernels, const int32_t* keys, int64_t heads, int64_t stride,
                 int64_t begin, int64_t count, int64_t k, int64_t first, int32_t* out);

}  // namespace herald
