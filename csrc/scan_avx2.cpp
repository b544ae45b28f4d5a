// AVX2: codes widened to int16, two dimensions of 8 queries multiplied and added by one instruction.

#include "scan_generic.h"

#ifdef HERALD_X86

#define HERALD_AVX2_INLINE inline __attribute__((target("avx2,fma"), always_inline))

namespace herald {
namespace {

constexpr int kRows = 2;
constexpr int kVectors = 4;  // of 8 queries; with kRows 8 of the 16 registers hold sums

HERALD_AVX2 void Prepare(float* rows, int head_dim, const float* signs, float scale, Queries& queries) {
    QuantiseQueries<8>(rows, head_dim, signs, scale, queries);
    PackInPairs(queries);
}

HERALD_AVX2_INLINE __m256i LoadIntegers(const void* from) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}

// Keeps the largest starts[q] + dot of each row.
struct LargestSums {
    const int32_t* starts;
    __m256i best[kRows] = {};

    HERALD_AVX2_INLINE void Clear(int) {
        for (int r = 0; r < kRows; ++r) best[r] = _mm256_set1_epi32(INT32_MIN);
    }
    HERALD_AVX2_INLINE void Take(int r, int q, __m256i dots) {
        best[r] = _mm256_max_epi32(best[r], _mm256_add_epi32(dots, LoadIntegers(starts + q)));
    }
};

// Keeps the largest fma(dot, factors[row], shifts[q]) of each row.
struct LargestScores {
    const float* factors;
    const float* shifts;
    __m256 factor[kRows] = {};
    __m256 best[kRows] = {};

    HERALD_AVX2_INLINE void Clear(int row) {
        for (int r = 0; r < kRows; ++r) {
            factor[r] = _mm256_set1_ps(factors[row + r]);
            best[r] = _mm256_set1_ps(-INFINITY);
        }
    }
    HERALD_AVX2_INLINE void Take(int r, int q, __m256i dots) {
        const __m256 score =
            _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots), factor[r], _mm256_loadu_ps(shifts + q));
        best[r] = _mm256_max_ps(score, best[r]);  // of a NaN and a number, the number
    }
};

// Writes the dots to out [., width].
struct StoreDots {
    int32_t* out;
    int64_t width;

    HERALD_AVX2_INLINE void Clear(int) {}
    HERALD_AVX2_INLINE void Take(int r, int q, __m256i dots) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + r * width + q), dots);
    }
};

// kRows rows times queries q .. q + 8 * V.
template <int V, class Sink>
HERALD_AVX2_INLINE void MultiplyTile(const Queries& queries, const int16_t* codes, int q, Sink& sink) {
    const int n = queries.n, width = queries.width;
    const int16_t* packed = static_cast<const int16_t*>(queries.packed) + 2 * q;
    __m256i dots[kRows][V];
    for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < V; ++v) dots[r][v] = _mm256_setzero_si256();
    }
    for (int d = 0; d < n; d += 2, packed += 2 * width) {
        __m256i pairs[kRows];
        for (int r = 0; r < kRows; ++r) {
            int32_t pair;
            std::memcpy(&pair, codes + int64_t{r} * n + d, 4);
            pairs[r] = _mm256_set1_epi32(pair);
        }
        for (int v = 0; v < V; ++v) {
            const __m256i lanes = LoadIntegers(packed + 16 * v);
            for (int r = 0; r < kRows; ++r) {
                dots[r][v] = _mm256_add_epi32(dots[r][v], _mm256_madd_epi16(pairs[r], lanes));
            }
        }
    }
    for (int v = 0; v < V; ++v) {
        for (int r = 0; r < kRows; ++r) sink.Take(r, q + 8 * v, dots[r][v]);
    }
}

template <class Sink>
HERALD_AVX2_INLINE void MultiplyRows(const Queries& queries, const int16_t* codes, int row, Sink& sink) {
    sink.Clear(row);
    codes += int64_t{row} * queries.n;
    int q = 0;
    for (; q + 8 * kVectors <= queries.width; q += 8 * kVectors) {
        MultiplyTile<kVectors>(queries, codes, q, sink);
    }
    if (q < queries.width) MultiplyTile<2>(queries, codes, q, sink);
}

HERALD_AVX2 void Dots(const Queries& queries, const int8_t* rows, int count, Workspace& work, int32_t* out) {
    int16_t* codes = work.mean_rows.Get<int16_t>(int64_t{count} * queries.n);
    for (int64_t i = 0; i < int64_t{count} * queries.n; ++i) codes[i] = rows[i];
    StoreDots sink = {out, queries.width};
    for (int r = 0; r < count; r += kRows, sink.out += kRows * sink.width) {
        MultiplyRows(queries, codes, r, sink);
    }
}

HERALD_AVX2 void Shifts(const Queries& queries, const PageMean* means, int pages, Workspace& work,
                        float* shifts) {
    PageShifts<Dots>(queries, means, pages, work, shifts);
}

template <typename T>
HERALD_AVX2 inline T LargestLane(const void* eight) {
    T lanes[8];
    std::memcpy(lanes, eight, sizeof(lanes));
    return *std::max_element(lanes, lanes + 8);
}

HERALD_AVX2 void Scores(const Queries& queries, const PageRows& rows, Workspace& work, int32_t* keys) {
    const int n = queries.n, width = queries.width, count = rows.count;
    int16_t* codes = work.rows.Get<int16_t>(int64_t{count + kRowPadding} * n);
    UnpackRows(rows.codes, count, rows.bits, n, 0, codes);
    const int64_t row_bytes = n * rows.bits / 8;
    int32_t* starts = work.starts.Get<int32_t>(width);
    float* factors = work.factors.Get<float>(count + kRowPadding);
    LargestSums sums = {starts};
    LargestScores scores = {factors, rows.shifts};
    if (rows.bits == 8) {
        PageStarts(rows.shifts, rows.unit, width, starts);
    } else {
        for (int r = 0; r < count; ++r) factors[r] = queries.reach * rows.row_scales[r];
    }
    for (int r = 0; r < count; r += kRows) {
        PrefetchNext(rows, row_bytes, r, r + kRows < count ? r + kRows : rows.next_count);
        if (rows.bits == 8) {
            MultiplyRows(queries, codes, r, sums);
        } else {
            MultiplyRows(queries, codes, r, scores);
        }
        for (int i = 0; i < kRows && r + i < count; ++i) {
            keys[r + i] =
                OrderKey(rows.bits == 8 ? static_cast<float>(LargestLane<int32_t>(&sums.best[i])) * rows.unit
                                        : LargestLane<float>(&scores.best[i]));
        }
    }
}

HERALD_AVX2 void TopK(const int32_t* keys, int64_t count, int64_t k, int32_t first, Buffer& scratch,
                      int32_t* out) {
    TopKByThreshold(keys, count, k, first, scratch, out);
}

}  // namespace

ScanKernels Avx2Kernels() {
    return {nullptr, nullptr, Prepare, Shifts, Scores, TopK};
}

}  // namespace herald

#endif
