// Scores of a page's rows for all queries of a (layer, KV head), and the best rows of a span.
//
// The formula is that of herald/select/scan.py, bit by bit, on every instruction set; its names are used
// here. Scores leave the kernels as "order keys": int32 that compare like the floats, -0 as +0.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "isa.h"

namespace herald {

constexpr int kLanes = 16;
// Pages whose shifts are computed together.
constexpr int kPageGroup = 16;
// How many pages before its turn a page is fetched: no hardware prefetcher crosses from one to the next.
constexpr int kPagesAhead = 2;
// Rows that a kernel may read past the last one, in buffers that are handed to it.
constexpr int kRowPadding = 32;
// Starts lie in [-kFarthestStart, kFarthestStart].
constexpr float kFarthestStart = 1 << 30;
// Order key of NaN, below all others.
constexpr int32_t kLowestKey = INT32_MIN;

// Memory of one thread that starts on a cache line and only grows.
class Buffer {
  public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer();

    template <typename T>
    T* Get(int64_t count) {
        Reserve(count * static_cast<int64_t>(sizeof(T)));
        return static_cast<T*>(data_);
    }

  private:
    void Reserve(int64_t bytes);

    void* data_ = nullptr;
    int64_t size_ = 0;
};

// The queries of one (layer, KV head). `width` is their number, rounded up to whole vectors of 16; the codes
// of the rest are 0 and their lead is -inf.
struct Queries {
    int count = 0;
    int width = 0;
    int n = 0;                  // padded head_dim
    float reach = 0;            // query_scale * scale
    float* lead = nullptr;      // [width], least_lse - lse
    int8_t* codes = nullptr;    // [width, n]
    void* packed = nullptr;     // codes again, laid out by the kernel; at most 2 * width * n bytes
    int32_t* excess = nullptr;  // [width], 128 * the sum of a query's codes
};

struct PageMean {
    const int8_t* codes;  // [2, n]
    float unit;           // reach * mean_scale
};

// Rows of one page in one KV head, and the page to fetch meanwhile.
struct PageRows {
    const uint8_t* codes;     // [count, n * bits / 8]
    const float* row_scales;  // [count], with less than 8 bits
    const float* shifts;      // [width]
    float unit;               // reach * key_scale, with 8 bits
    int count;
    int bits;
    const uint8_t* next_codes;  // or null
    const float* next_row_scales;
    int64_t next_count;  // rows of it
};

// Buffers of one thread.
struct Workspace {
    Buffer rows, rotated, lead, codes, packed, excess, means, mean_rows, mean_dots, shifts, starts, sums,
        factors, keys, candidates;
};

// One instruction set's functions. n is a power of two from 16 to 1024.
struct ScanKernels {
    // Around the work of one task on one thread; may be null.
    void (*begin)(int n);
    void (*end)();
    // Fills reach, codes, packed and excess; rotates `rows` [count, n], of which the first head_dim are
    // given.
    void (*prepare)(float* rows, int head_dim, const float* signs, float scale, Queries& queries);
    // shifts[p * width + q] of up to kPageGroup pages.
    void (*shifts)(const Queries& queries, const PageMean* means, int pages, Workspace& work, float* shifts);
    // Order keys of the rows' scores.
    void (*scores)(const Queries& queries, const PageRows& rows, Workspace& work, int32_t* keys);
    // Positions first + i of the k largest keys, ascending; of equal ones the lower i. 1 <= k <= count.
    void (*top_k)(const int32_t* keys, int64_t count, int64_t k, int32_t first, Buffer& scratch,
                  int32_t* out);
};

struct Isa {
    const char* name;
    std::string unavailable;  // why this CPU cannot run it, or empty
    bool automatic;           // whether "auto" may pick it
    ScanKernels kernels;
};

// Best first; the last one runs everywhere.
const std::vector<Isa>& ScanIsas();

// The set of that name, or the best for "auto". std::invalid_argument where this CPU cannot run it.
const Isa& FindScanIsa(const std::string& name);

ScanKernels ScalarKernels();
#ifdef HERALD_X86
ScanKernels Avx2Kernels();
ScanKernels VnniKernels();
ScanKernels AmxKernels();
// The same code as AmxKernels on tiles in memory, to test it without AMX.
ScanKernels EmulatedAmxKernels();
#endif

}  // namespace herald
