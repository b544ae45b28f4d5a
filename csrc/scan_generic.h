// What the kernels of every instruction set share. Included by each of their files.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "rotate.h"
#include "scan.h"

namespace herald {

HERALD_INLINE int32_t OrderKey(float score) {
    if (score != score) return kLowestKey;
    score += 0.0f;
    int32_t bits;
    std::memcpy(&bits, &score, 4);
    return bits ^ static_cast<int32_t>(static_cast<uint32_t>(bits >> 31) >> 1);
}

// Codes of all queries with one scale, that of the queries which can count; the others saturate.
template <int W>
HERALD_INLINE void QuantiseQueries(float* rows, int head_dim, const float* signs, float scale,
                                   Queries& queries) {
    const int n = queries.n, count = queries.count;
    float largest = 0, inverse = 0, query_scale = 0;
    for (int q = 0; q < count; ++q) {
        Rotate<W>(rows + int64_t{q} * n, signs, head_dim, n);
        if (!(queries.lead[q] > -INFINITY)) continue;
        const float of_query = LargestMagnitude<W>(rows + int64_t{q} * n, n);
        largest = of_query < largest ? largest : of_query;
    }
    if (largest >= kSmallestMaximum) {
        inverse = 127.0f / largest;
        query_scale = (largest * RotationNorm(n)) / 127.0f;
    }
    queries.reach = query_scale * scale;
    QuantiseSaturated<W>(rows, int64_t{count} * n, inverse, reinterpret_cast<uint8_t*>(queries.codes));
    std::memset(queries.codes + int64_t{count} * n, 0, int64_t{queries.width - count} * n);
    for (int q = 0; q < queries.width; ++q) {
        int32_t sum = 0;
        for (int d = 0; d < n; ++d) sum += queries.codes[int64_t{q} * n + d];
        queries.excess[q] = 128 * sum;
    }
}

// packed[q / 16][d / 4][q % 16][d % 4] = codes[q][d]: 4 dimensions of 16 queries are one vector of VNNI or
// one row of a tile, 64 dimensions of them a tile.
HERALD_INLINE void PackInFours(Queries& queries) {
    int32_t* packed = static_cast<int32_t*>(queries.packed);
    const int groups = queries.n / 4;
    for (int q = 0; q < queries.width; ++q) {
        const int8_t* codes = queries.codes + int64_t{q} * queries.n;
        int32_t* lane = packed + int64_t{q / kLanes} * groups * kLanes + q % kLanes;
        for (int g = 0; g < groups; ++g) std::memcpy(lane + int64_t{g} * kLanes, codes + 4 * g, 4);
    }
}

// packed[d / 2][q][d % 2] = codes[q][d] as int16.
HERALD_INLINE void PackInPairs(Queries& queries) {
    int16_t* packed = static_cast<int16_t*>(queries.packed);
    const int64_t width = queries.width;
    for (int64_t q = 0; q < width; ++q) {
        const int8_t* codes = queries.codes + q * queries.n;
        for (int64_t d = 0; d < queries.n; ++d) packed[(d / 2 * width + q) * 2 + d % 2] = codes[d];
    }
}

// out[r * width + q] = rows[r] . codes of query q, for rows [count, n] of int8.
using DotFunction = void (*)(const Queries& queries, const int8_t* rows, int count, Workspace& work,
                             int32_t* out);

// ScanKernels::shifts. Means are laid out as rows of high codes, then of low ones.
template <DotFunction Dots>
HERALD_INLINE void PageShifts(const Queries& queries, const PageMean* means, int pages, Workspace& work,
                              float* shifts) {
    const int n = queries.n, width = queries.width;
    int8_t* rows = work.means.Get<int8_t>(2 * kPageGroup * int64_t{n});
    int32_t* dots = work.mean_dots.Get<int32_t>(2 * kPageGroup * int64_t{width});
    for (int page = 0; page < kPageGroup; ++page) {
        int8_t* high = rows + int64_t{page} * n;
        if (page < pages) {
            std::memcpy(high, means[page].codes, n);
            std::memcpy(high + kPageGroup * n, means[page].codes + n, n);
        } else {
            std::memset(high, 0, n);
            std::memset(high + kPageGroup * n, 0, n);
        }
    }
    Dots(queries, rows, 2 * kPageGroup, work, dots);
    for (int page = 0; page < pages; ++page) {
        const int32_t *high = dots + int64_t{page} * width, *low = high + int64_t{kPageGroup} * width;
        float* out = shifts + int64_t{page} * width;
        const float unit = means[page].unit;
        for (int q = 0; q < width; ++q) {
            out[q] = std::fma(static_cast<float>(128 * high[q] + low[q]), unit, queries.lead[q]);
        }
    }
}

// What integer sums start from: shifts in units of the page.
HERALD_INLINE void PageStarts(const float* shifts, float unit, int width, int32_t* starts) {
    const float inverse = 1.0f / unit;
    for (int q = 0; q < width; ++q) {
        float start = shifts[q] * inverse;
        start = start > -kFarthestStart ? start : -kFarthestStart;
        start = start < kFarthestStart ? start : kFarthestStart;
        starts[q] = static_cast<int32_t>(std::rint(start));
    }
}

// out[r, d] = the code of a row's dimension plus `bias`, for the layouts of herald/kvstore/key_codes.py.
template <typename T>
HERALD_INLINE void UnpackRows(const uint8_t* codes, int count, int bits, int n, int bias, T* out) {
    if (bits == 8) {
        for (int64_t i = 0; i < int64_t{count} * n; ++i) {
            out[i] = static_cast<T>(static_cast<int8_t>(codes[i]) + bias);
        }
        return;
    }
    const int width = n * bits / 8;
    for (int r = 0; r < count; ++r) {
        const uint8_t* row = codes + int64_t{r} * width;
        T* to = out + int64_t{r} * n;
        if (bits == 4) {
            for (int i = 0; i < width; ++i) to[i] = static_cast<T>((row[i] & 15) - 8 + bias);
            for (int i = 0; i < width; ++i) to[width + i] = static_cast<T>((row[i] >> 4) - 8 + bias);
            continue;
        }
        for (int j = 0; j < 8; ++j) {
            for (int i = 0; i < width; ++i) {
                to[j * width + i] = static_cast<T>(2 * ((row[i] >> j) & 1) - 1 + bias);
            }
        }
    }
}

// Brings the part of the next page to the second-level cache that corresponds to rows [begin, end) of this
// one.
HERALD_INLINE void PrefetchNext(const PageRows& rows, int64_t row_bytes, int64_t begin, int64_t end) {
    if (rows.next_codes == nullptr) return;
    end = std::min(end, rows.next_count);
    for (int64_t at = begin * row_bytes; at < end * row_bytes; at += 64) {
        __builtin_prefetch(rows.next_codes + at, 0, 2);
    }
    if (rows.bits == 8) return;
    for (int64_t at = begin; at < end; at += 16) __builtin_prefetch(rows.next_row_scales + at, 0, 2);
}

// The k-th largest of keys[0, count), and how many keys equal to it are among the k largest. Reorders `keys`.
HERALD_INLINE void Threshold(int32_t* keys, int64_t count, int64_t k, int32_t& threshold, int64_t& ties) {
    std::nth_element(keys, keys + (k - 1), keys + count, [](int32_t a, int32_t b) { return a > b; });
    threshold = keys[k - 1];
    ties = k - std::count_if(keys, keys + (k - 1), [&](int32_t key) { return key > threshold; });
}

// Two keys that the k-th largest lies between, most likely: from a sample of every stride-th key.
HERALD_INLINE void Bracket(const int32_t* keys, int64_t count, int64_t k, int32_t& low, int32_t& high) {
    constexpr int64_t kSample = 1024;
    low = INT32_MIN;
    high = INT32_MAX;
    if (count < 4 * kSample) return;
    int32_t sample[kSample];
    for (int64_t i = 0; i < kSample; ++i) sample[i] = keys[i * count / kSample];
    const double rank = static_cast<double>(k) * kSample / static_cast<double>(count);
    // Four standard deviations of the number of sampled keys among the k largest.
    const double spread = 4 * std::sqrt(rank * (1 - rank / kSample)) + 2;
    const int64_t above = static_cast<int64_t>(rank - spread), below = static_cast<int64_t>(rank + spread);
    const auto larger = [](int32_t a, int32_t b) { return a > b; };
    int32_t* rest = sample;
    if (above > 0) {
        std::nth_element(sample, sample + above, sample + kSample, larger);
        high = sample[above];
        rest = sample + above + 1;
    }
    if (below < kSample - 1) {
        std::nth_element(rest, sample + below, sample + kSample, larger);
        low = sample[below];
    }
}

// ScanKernels::top_k without vector instructions.
HERALD_INLINE void TopKByThreshold(const int32_t* keys, int64_t count, int64_t k, int32_t first,
                                   Buffer& scratch, int32_t* out) {
    int32_t* candidates = scratch.Get<int32_t>(count + 1);
    int32_t low, high, threshold;
    int64_t above = 0, held = 0, ties;
    Bracket(keys, count, k, low, high);
    for (int64_t i = 0; i < count; ++i) {
        candidates[held] = keys[i];
        above += keys[i] > high;
        held += keys[i] >= low && keys[i] <= high;
    }
    if (above >= k || above + held < k) {  // the sample was unlucky
        std::copy(keys, keys + count, candidates);
        above = 0;
        held = count;
    }
    Threshold(candidates, held, k - above, threshold, ties);
    for (int64_t i = 0, taken = 0; taken < k; ++i) {
        const bool equal = keys[i] == threshold;
        out[taken] = first + static_cast<int32_t>(i);
        taken += keys[i] > threshold || (equal && ties > 0);
        ties -= equal;
    }
}

}  // namespace herald
