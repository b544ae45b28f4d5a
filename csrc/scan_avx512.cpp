// AVX-512 VNNI: 4 dimensions of 16 queries an instruction. Its operands are one unsigned and one signed, so
// keys are read as code + 128, and the sums start at minus what that adds.

#include "scan_avx512.h"

#ifdef HERALD_X86

namespace herald {
namespace {

constexpr int kRows = 4;
constexpr int kVectors = 4;  // of 16 queries; 4 x 4 sums, 4 query vectors and 4 copies fit 32 registers

// The largest sum of each row, in 16 lanes.
struct LargestSums {
    __m512i best[kRows];

    HERALD_AVX512_INLINE void Clear(int) {
        for (int r = 0; r < kRows; ++r) best[r] = _mm512_set1_epi32(INT32_MIN);
    }
    HERALD_AVX512_INLINE void Take(int r, int, __m512i sums) { best[r] = _mm512_max_epi32(best[r], sums); }
    HERALD_AVX512_INLINE __m512i Best(int r) const { return best[r]; }
};

// The largest fma(sum, factors[row], shifts[q]) of each row, in 16 lanes.
struct LargestScores {
    const float* factors;
    const float* shifts;
    __m512 factor[kRows];
    __m512 best[kRows];

    HERALD_AVX512_INLINE void Clear(int row) {
        for (int r = 0; r < kRows; ++r) {
            factor[r] = _mm512_set1_ps(factors[row + r]);
            best[r] = _mm512_set1_ps(-INFINITY);
        }
    }
    HERALD_AVX512_INLINE void Take(int r, int q, __m512i sums) {
        const __m512 score = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums), factor[r], _mm512_load_ps(shifts + q));
        best[r] = _mm512_max_ps(score, best[r]);  // of a NaN and a number, the number
    }
    HERALD_AVX512_INLINE __m512i Best(int r) const { return _mm512_castps_si512(best[r]); }
};

// Writes the sums to out [., width].
struct StoreSums {
    int32_t* out;
    int64_t width;

    HERALD_AVX512_INLINE void Clear(int) {}
    HERALD_AVX512_INLINE void Take(int r, int q, __m512i sums) {
        _mm512_store_si512(out + r * width + q, sums);
    }
};

// kRows rows times queries q .. q + 16 * V; sums begin at `starts`.
template <int V, class Sink>
HERALD_AVX512_INLINE void MultiplyTile(const Queries& queries, const uint8_t* codes, const int32_t* starts,
                                       int q, Sink& sink) {
    const int n = queries.n;
    const int64_t column = int64_t{n} / 4 * kLanes;
    const int32_t* packed = static_cast<const int32_t*>(queries.packed) + q / kLanes * column;
    __m512i sums[kRows][V];
    for (int v = 0; v < V; ++v) {
        const __m512i start = _mm512_load_si512(starts + q + v * kLanes);
        for (int r = 0; r < kRows; ++r) sums[r][v] = start;
    }
    for (int d = 0; d < n; d += 4, packed += kLanes) {
        __m512i lanes[V];
        for (int v = 0; v < V; ++v) lanes[v] = _mm512_load_si512(packed + v * column);
        for (int r = 0; r < kRows; ++r) {
            int32_t four;
            std::memcpy(&four, codes + int64_t{r} * n + d, 4);
            const __m512i copies = _mm512_set1_epi32(four);
            for (int v = 0; v < V; ++v) sums[r][v] = _mm512_dpbusd_epi32(sums[r][v], copies, lanes[v]);
        }
    }
    for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < V; ++v) sink.Take(r, q + v * kLanes, sums[r][v]);
    }
}

template <class Sink>
HERALD_AVX512_INLINE void MultiplyRows(const Queries& queries, const uint8_t* codes, const int32_t* starts,
                                       int row, Sink& sink) {
    sink.Clear(row);
    codes += int64_t{row} * queries.n;
    int q = 0;
    for (; q + kVectors * kLanes <= queries.width; q += kVectors * kLanes) {
        MultiplyTile<kVectors>(queries, codes, starts, q, sink);
    }
    switch ((queries.width - q) / kLanes) {
        case 3:
            MultiplyTile<3>(queries, codes, starts, q, sink);
            break;
        case 2:
            MultiplyTile<2>(queries, codes, starts, q, sink);
            break;
        case 1:
            MultiplyTile<1>(queries, codes, starts, q, sink);
            break;
    }
}

HERALD_AVX512_INLINE void NegateExcess(const Queries& queries, int32_t* starts) {
    for (int q = 0; q < queries.width; ++q) starts[q] = -queries.excess[q];
}

HERALD_AVX512 void Dots(const Queries& queries, const int8_t* rows, int count, Workspace& work,
                        int32_t* out) {
    uint8_t* codes = work.mean_rows.Get<uint8_t>(int64_t{count} * queries.n);
    UnpackRows512(reinterpret_cast<const uint8_t*>(rows), count, 8, queries.n, 128, codes);
    int32_t* starts = work.starts.Get<int32_t>(queries.width);
    NegateExcess(queries, starts);
    StoreSums sink = {out, queries.width};
    for (int r = 0; r < count; r += kRows, sink.out += kRows * sink.width) {
        MultiplyRows(queries, codes, starts, r, sink);
    }
}

HERALD_AVX512 void Shifts(const Queries& queries, const PageMean* means, int pages, Workspace& work,
                          float* shifts) {
    PageShifts<Dots>(queries, means, pages, work, shifts);
}

// best[r] of rows [first, first + 16), as far as there are any.
template <class Sink>
HERALD_AVX512_INLINE void MultiplySixteen(const Queries& queries, const uint8_t* codes, const int32_t* starts,
                                          int first, int count, Sink& sink, __m512i (&best)[16]) {
    for (int i = 0; i < 16; i += kRows) {
        if (first + i < count) MultiplyRows(queries, codes, starts, first + i, sink);
        for (int r = 0; r < kRows; ++r) best[i + r] = sink.Best(r);
    }
}

HERALD_AVX512 void Scores(const Queries& queries, const PageRows& rows, Workspace& work, int32_t* keys) {
    const int n = queries.n, width = queries.width, count = rows.count;
    uint8_t* codes = work.rows.Get<uint8_t>(int64_t{count + kRowPadding} * n);
    UnpackRows512(rows.codes, count, rows.bits, n, 128, codes);
    int32_t* starts = work.starts.Get<int32_t>(width);
    float* factors = work.factors.Get<float>(count + kRowPadding);
    if (rows.bits == 8) {
        PageStarts512(rows.shifts, rows.unit, queries.excess, width, starts);
    } else {
        NegateExcess(queries, starts);
        for (int r = 0; r < count; ++r) factors[r] = queries.reach * rows.row_scales[r];
    }
    LargestSums sums;
    LargestScores scores;
    scores.factors = factors;
    scores.shifts = rows.shifts;
    const int64_t row_bytes = n * rows.bits / 8;
    for (int r = 0; r < count; r += 16) {
        PrefetchNext(rows, row_bytes, r, r + 16 < count ? r + 16 : rows.next_count);
        __m512i best[16];
        if (rows.bits == 8) {
            MultiplySixteen(queries, codes, starts, r, count, sums, best);
            StoreSumKeys(best, rows.unit, count - r, keys + r);
        } else {
            MultiplySixteen(queries, codes, starts, r, count, scores, best);
            StoreScoreKeys(best, count - r, keys + r);
        }
    }
}

}  // namespace

HERALD_AVX512 void Prepare512(float* rows, int head_dim, const float* signs, float scale, Queries& queries) {
    QuantiseQueries<16>(rows, head_dim, signs, scale, queries);
    PackInFours(queries);
}

HERALD_AVX512 void TopK512(const int32_t* keys, int64_t count, int64_t k, int32_t first, Buffer& scratch,
                           int32_t* out) {
    int32_t* candidates = scratch.Get<int32_t>(count + kLanes);
    int32_t low, high, threshold;
    int64_t above = 0, held = 0, ties;
    Bracket(keys, count, k, low, high);
    const __m512i lowest = _mm512_set1_epi32(low), highest = _mm512_set1_epi32(high);
    for (int64_t i = 0; i < count; i += kLanes) {
        const __mmask16 mask = static_cast<__mmask16>(count - i >= 16 ? 0xFFFF : (1 << (count - i)) - 1);
        const __m512i v = _mm512_maskz_loadu_epi32(mask, keys + i);
        const __mmask16 higher = _mm512_mask_cmpgt_epi32_mask(mask, v, highest);
        const __mmask16 within =
            static_cast<__mmask16>(_mm512_mask_cmpge_epi32_mask(mask, v, lowest) & ~higher);
        above += __builtin_popcount(higher);
        _mm512_storeu_si512(candidates + held, _mm512_maskz_compress_epi32(within, v));
        held += __builtin_popcount(within);
    }
    if (above >= k || above + held < k) {  // the sample was unlucky
        std::copy(keys, keys + count, candidates);
        above = 0;
        held = count;
    }
    Threshold(candidates, held, k - above, threshold, ties);
    const __m512i least = _mm512_set1_epi32(threshold);
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int64_t i = 0, taken = 0; taken < k; i += kLanes) {
        const __mmask16 mask = static_cast<__mmask16>(count - i >= 16 ? 0xFFFF : (1 << (count - i)) - 1);
        const __m512i v = _mm512_maskz_loadu_epi32(mask, keys + i);
        unsigned equal = _mm512_mask_cmpeq_epi32_mask(mask, v, least);
        unsigned taking = _mm512_mask_cmpgt_epi32_mask(mask, v, least);
        for (; equal != 0 && ties > 0; equal &= equal - 1, --ties) taking |= equal & -equal;
        const int taken_here = __builtin_popcount(taking);
        const __m512i position = _mm512_add_epi32(lane, _mm512_set1_epi32(first + static_cast<int32_t>(i)));
        const __mmask16 room = static_cast<__mmask16>((1u << taken_here) - 1);
        _mm512_mask_storeu_epi32(out + taken, room,
                                 _mm512_maskz_compress_epi32(static_cast<__mmask16>(taking), position));
        taken += taken_here;
    }
}

ScanKernels VnniKernels() {
    return {nullptr, nullptr, Prepare512, Shifts, Scores, TopK512};
}

}  // namespace herald

#endif
