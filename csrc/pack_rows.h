// Rows of host memory gathered into a dense buffer by several threads.

#pragma once

#include <cstdint>
#include <string>

namespace herald {

// dst[i] = src[ids[i]] for i in [0, count), rows of row_bytes bytes, on `threads` threads.
// isa: "auto", "avx512", "avx2" or "scalar"; std::invalid_argument where this CPU lacks it.
// std::out_of_range for an id outside [0, num_rows).
void PackRows(uint8_t* dst, const uint8_t* src, const int64_t* ids, int64_t count, int64_t num_rows,
              int64_t row_bytes, int threads, const std::string& isa);

// The set that PackRows takes for "auto".
std::string PackingIsa();

}  // namespace herald
