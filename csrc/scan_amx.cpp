// AMX: tiles of rows read as they lie in the index, times tiles of queries packed once a task. See
// amx_rows.h.

#include "amx_rows.h"
#include "scan_avx512.h"

#ifdef HERALD_X86

namespace herald {
namespace {

// Sums are saved two items after their multiplication and taken three later; the page ahead goes to the
// second-level cache.
using Plan = PipelinePlan<2, 5, 4, 2>;

// Of 16 rows the largest starts[q] + dot, in 16 lanes each.
struct LargestSums {
    const int32_t* starts;
    float unit;
    int count;
    int32_t* keys;
    __m512i best[kTileRows];

    HERALD_AVX512_INLINE void Clear() {
#pragma GCC unroll 16
        for (int r = 0; r < kTileRows; ++r) best[r] = _mm512_set1_epi32(INT32_MIN);
    }
    HERALD_AVX512_INLINE void Take(const int32_t* sums, int query) {
        const __m512i start = _mm512_load_si512(starts + query * kLanes);
#pragma GCC unroll 16
        for (int r = 0; r < kTileRows; ++r) {
            const __m512i sum = _mm512_add_epi32(start, _mm512_load_si512(sums + r * kLanes));
            best[r] = _mm512_max_epi32(best[r], sum);
        }
    }
    HERALD_AVX512_INLINE void Finish(int row_tile) {
        StoreSumKeys(best, unit, count - row_tile * kTileRows, keys + row_tile * kTileRows);
        Clear();
    }
};

// Of 16 rows the largest fma(dot, factors[row], shifts[q]), in 16 lanes each.
struct LargestScores {
    const float* factors;
    const float* shifts;
    int count;
    int32_t* keys;
    __m512i best[kTileRows];

    HERALD_AVX512_INLINE void Clear() {
#pragma GCC unroll 16
        for (int r = 0; r < kTileRows; ++r) best[r] = _mm512_castps_si512(_mm512_set1_ps(-INFINITY));
    }
    HERALD_AVX512_INLINE void Take(const int32_t* sums, int query) {
        const __m512 shift = _mm512_load_ps(shifts + query * kLanes);
#pragma GCC unroll 16
        for (int r = 0; r < kTileRows; ++r) {
            const __m512 dot = _mm512_cvtepi32_ps(_mm512_load_si512(sums + r * kLanes));
            const __m512 score = _mm512_fmadd_ps(dot, _mm512_set1_ps(factors[r]), shift);
            best[r] = FloatMaximum::Of(_mm512_castps_si512(score), best[r]);
        }
    }
    HERALD_AVX512_INLINE void Finish(int row_tile) {
        StoreScoreKeys(best, count - row_tile * kTileRows, keys + row_tile * kTileRows);
        factors += kTileRows;
        Clear();
    }
};

// Writes the dots to out [., width].
struct StoreSums {
    int32_t* out;
    int64_t width;

    HERALD_AVX512_INLINE void Take(const int32_t* sums, int query) {
        for (int r = 0; r < kTileRows; ++r) {
            _mm512_store_si512(out + r * width + query * kLanes, _mm512_load_si512(sums + r * kLanes));
        }
    }
    HERALD_AVX512_INLINE void Finish(int) { out += kTileRows * width; }
};

template <class Tiles, int Steps, class Sink>
HERALD_AVX512 void RunPipeline(const Queries& queries, const uint8_t* codes, int count, const Ahead& ahead,
                               Workspace& work, Sink sink) {
    Pipeline<Tiles, Plan, Steps, Sink> pipeline;
    pipeline.codes = codes;
    pipeline.packed = static_cast<const int32_t*>(queries.packed);
    pipeline.n = queries.n;
    pipeline.row_tiles = (count + kTileRows - 1) / kTileRows;
    pipeline.query_tiles = queries.width / kLanes;
    pipeline.ring = work.sums.Get<int32_t>(Plan::kRing * kTileSums);
    pipeline.ahead = ahead;
    pipeline.Run(sink);
}

template <class Tiles, class Sink>
HERALD_AVX512 void MultiplyRows(const Queries& queries, const uint8_t* codes, int count, const Ahead& ahead,
                                Workspace& work, const Sink& sink) {
    if (queries.n <= kTileBytes) {
        RunPipeline<Tiles, 1>(queries, codes, count, ahead, work, sink);
    } else if (queries.n == 2 * kTileBytes) {
        RunPipeline<Tiles, 2>(queries, codes, count, ahead, work, sink);
    } else {
        RunPipeline<Tiles, 0>(queries, codes, count, ahead, work, sink);
    }
}

template <class Tiles>
HERALD_AVX512 void Dots(const Queries& queries, const int8_t* rows, int count, Workspace& work,
                        int32_t* out) {
    const StoreSums sink = {out, queries.width};
    MultiplyRows<Tiles>(queries, reinterpret_cast<const uint8_t*>(rows), count, Ahead(), work, sink);
}

template <class Tiles>
HERALD_AVX512 void Shifts(const Queries& queries, const PageMean* means, int pages, Workspace& work,
                          float* shifts) {
    PageShifts<Dots<Tiles>>(queries, means, pages, work, shifts);
}

// The codes of all rows as int8, with whole tiles of readable memory.
HERALD_AVX512 inline const uint8_t* SignedRows(const PageRows& rows, int n, Workspace& work) {
    if (rows.bits == 8 && rows.count % kTileRows == 0) return rows.codes;
    uint8_t* codes = work.rows.Get<uint8_t>(int64_t{rows.count + kRowPadding} * n);
    UnpackRows512(rows.codes, rows.count, rows.bits, n, 0, codes);
    return codes;
}

inline Ahead NextPage(const PageRows& rows, int n, int width) {
    if (rows.next_codes == nullptr) return {};
    const int64_t bytes = rows.next_count * n * rows.bits / 8, lines = (bytes + 63) / 64;
    const int64_t items = int64_t{rows.count + kTileRows - 1} / kTileRows * (width / kLanes);
    return {rows.next_codes, rows.next_codes + bytes, (lines + items - 1) / items};
}

template <class Tiles>
HERALD_AVX512 void Scores(const Queries& queries, const PageRows& rows, Workspace& work, int32_t* keys) {
    const int width = queries.width, count = rows.count;
    const uint8_t* codes = SignedRows(rows, queries.n, work);
    const Ahead ahead = NextPage(rows, queries.n, width);
    if (rows.bits == 8) {
        int32_t* starts = work.starts.Get<int32_t>(width);
        PageStarts512(rows.shifts, rows.unit, nullptr, width, starts);
        LargestSums sink;
        sink.starts = starts;
        sink.unit = rows.unit;
        sink.count = count;
        sink.keys = keys;
        sink.Clear();
        MultiplyRows<Tiles>(queries, codes, count, ahead, work, sink);
        return;
    }
    float* factors = work.factors.Get<float>(count + kRowPadding);
    for (int r = 0; r < count; ++r) factors[r] = queries.reach * rows.row_scales[r];
    if (rows.next_codes != nullptr) {
        for (int64_t r = 0; r < rows.next_count; r += 16) __builtin_prefetch(rows.next_row_scales + r, 0, 2);
    }
    LargestScores sink;
    sink.factors = factors;
    sink.shifts = rows.shifts;
    sink.count = count;
    sink.keys = keys;
    sink.Clear();
    MultiplyRows<Tiles>(queries, codes, count, ahead, work, sink);
}

template <class Tiles>
void Begin(int n) {
    Tiles::Configure(TilesFor(n));
}

template <class Tiles>
ScanKernels Kernels() {
    return {Begin<Tiles>, Tiles::Release, Prepare512, Shifts<Tiles>, Scores<Tiles>, TopK512};
}

}  // namespace

ScanKernels AmxKernels() {
    return Kernels<HardwareTiles>();
}

ScanKernels EmulatedAmxKernels() {
    return Kernels<EmulatedTiles>();
}

}  // namespace herald

#endif
