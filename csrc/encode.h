// Key codes of rows of the pool, as herald/kvstore/key_codes.py builds them, bit by bit.

#pragma once

#include <cstdint>
#include <string>

namespace herald {

// The pool, and the index to write to (shapes as in herald/kvstore/key_index.py).
struct EncodeTarget {
    const uint8_t* rows;  // [layers, pages, heads, page_size, 2 * head_dim] of the pool's dtype, K first
    int kind;             // ValueKind
    uint8_t* codes;
    float* row_scales;  // not used with 8 bits
    int8_t* mean_codes;
    float* page_scales;
    const float* signs;
    int64_t pages, heads, page_size;
    int head_dim, n, bits;
};

// Positions first .. last of a request with pages `page_ids`, in layers layer_begin .. layer_end, all heads.
// A page's mean, and with 8 bits its scale, come from the rows encoded together with its first one. isa as
// for scans.
void EncodeSpan(const EncodeTarget& target, const int32_t* page_ids, int64_t first, int64_t last,
                int64_t layer_begin, int64_t layer_end, int threads, const std::string& isa);

}  // namespace herald
