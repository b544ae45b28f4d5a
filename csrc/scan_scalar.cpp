// The portable kernels: plain loops, for every CPU.

#include "scan_generic.h"

namespace herald {
namespace {

void Prepare(float* rows, int head_dim, const float* signs, float scale, Queries& queries) {
    QuantiseQueries<4>(rows, head_dim, signs, scale, queries);
    PackInPairs(queries);
}

// dots[i] = a row of n codes . query q + i, for kLanes queries.
template <typename T>
void RowDots(const Queries& queries, const T* row, int q, int32_t* dots) {
    const int16_t* packed = static_cast<const int16_t*>(queries.packed);
    std::fill(dots, dots + kLanes, 0);
    for (int d = 0; d < queries.n; d += 2) {
        const int16_t* pairs = packed + (int64_t{d} / 2 * queries.width + q) * 2;
        for (int i = 0; i < kLanes; ++i) dots[i] += row[d] * pairs[2 * i] + row[d + 1] * pairs[2 * i + 1];
    }
}

void Dots(const Queries& queries, const int8_t* rows, int count, Workspace&, int32_t* out) {
    for (int r = 0; r < count; ++r) {
        for (int q = 0; q < queries.width; q += kLanes) {
            RowDots(queries, rows + int64_t{r} * queries.n, q, out + int64_t{r} * queries.width + q);
        }
    }
}

void Shifts(const Queries& queries, const PageMean* means, int pages, Workspace& work, float* shifts) {
    PageShifts<Dots>(queries, means, pages, work, shifts);
}

void Scores(const Queries& queries, const PageRows& rows, Workspace& work, int32_t* keys) {
    const int n = queries.n, width = queries.width;
    int16_t* codes = work.rows.Get<int16_t>(int64_t{rows.count} * n);
    UnpackRows(rows.codes, rows.count, rows.bits, n, 0, codes);
    PrefetchNext(rows, n * rows.bits / 8, 0, rows.next_count);
    int32_t* starts = work.starts.Get<int32_t>(width);
    if (rows.bits == 8) PageStarts(rows.shifts, rows.unit, width, starts);
    for (int r = 0; r < rows.count; ++r) {
        int32_t largest = INT32_MIN;
        float best = -INFINITY;
        for (int q = 0; q < width; q += kLanes) {
            int32_t dots[kLanes];
            RowDots(queries, codes + int64_t{r} * n, q, dots);
            if (rows.bits == 8) {
                for (int i = 0; i < kLanes; ++i) largest = std::max(largest, starts[q + i] + dots[i]);
                continue;
            }
            const float factor = queries.reach * rows.row_scales[r];
            for (int i = 0; i < kLanes; ++i) {
                const float score = std::fma(static_cast<float>(dots[i]), factor, rows.shifts[q + i]);
                best = score > best ? score : best;
            }
        }
        keys[r] = OrderKey(rows.bits == 8 ? static_cast<float>(largest) * rows.unit : best);
    }
}

void TopK(const int32_t* keys, int64_t count, int64_t k, int32_t first, Buffer& scratch, int32_t* out) {
    TopKByThreshold(keys, count, k, first, scratch, out);
}

}  // namespace

ScanKernels ScalarKernels() {
    return {nullptr, nullptr, Prepare, Shifts, Scores, TopK};
}

}  // namespace herald
