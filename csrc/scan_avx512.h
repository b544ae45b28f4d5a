// What the two kernels with 512-bit vectors share.

#pragma once

#include "scan_generic.h"

#ifdef HERALD_X86

#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
// GCC's own header leaves the operand that a full mask never reads undefined.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace herald {

// The larger of each lane, as integers or as floats (of a NaN and a number in `a`, the number in `b`).
struct IntegerMaximum {
    static HERALD_AVX512_INLINE __m512i Of(__m512i a, __m512i b) { return _mm512_max_epi32(a, b); }
};
struct FloatMaximum {
    static HERALD_AVX512_INLINE __m512i Of(__m512i a, __m512i b) {
        return _mm512_castps_si512(_mm512_max_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b)));
    }
};

// Lane r of the result = the largest lane of v[r]. Overwrites v.
template <class Maximum>
HERALD_AVX512_INLINE __m512i LargestOfEach(__m512i (&v)[16]) {
    // Each level halves the vectors and, of every row, the lanes that are left.
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        v[i] = Maximum::Of(_mm512_shuffle_i32x4(v[i], v[i + 8], 0x44),
                           _mm512_shuffle_i32x4(v[i], v[i + 8], 0xEE));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        v[i] = Maximum::Of(_mm512_shuffle_i32x4(v[i], v[i + 4], 0x88),
                           _mm512_shuffle_i32x4(v[i], v[i + 4], 0xDD));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
        v[i] = Maximum::Of(_mm512_unpacklo_epi32(v[i], v[i + 2]), _mm512_unpackhi_epi32(v[i], v[i + 2]));
    }
    const __m512i mixed = Maximum::Of(_mm512_unpacklo_epi64(v[0], v[1]), _mm512_unpackhi_epi64(v[0], v[1]));
    // 128-bit lane l, element e now hold row {0, 8, 4, 12}[l] + {0, 2, 1, 3}[e].
    const __m512i order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
    return _mm512_permutexvar_epi32(order, mixed);
}

HERALD_AVX512_INLINE __m512i OrderKeys(__m512 scores) {
    const __m512i bits = _mm512_castps_si512(_mm512_add_ps(scores, _mm512_setzero_ps()));
    const __m512i keys = _mm512_xor_si512(bits, _mm512_srli_epi32(_mm512_srai_epi32(bits, 31), 1));
    const __mmask16 unordered = _mm512_cmp_ps_mask(scores, scores, _CMP_UNORD_Q);
    return _mm512_mask_mov_epi32(keys, unordered, _mm512_set1_epi32(kLowestKey));
}

HERALD_AVX512_INLINE void StoreKeys(__m512 scores, int count, int32_t* keys) {
    const __mmask16 mask = static_cast<__mmask16>(count >= 16 ? 0xFFFF : (1 << count) - 1);
    _mm512_mask_storeu_epi32(keys, mask, OrderKeys(scores));
}

// keys[0, count) of up to 16 rows, whose sums or scores are spread over the lanes of v. Overwrites v.
HERALD_AVX512_INLINE void StoreSumKeys(__m512i (&v)[16], float unit, int count, int32_t* keys) {
    const __m512 sums = _mm512_cvtepi32_ps(LargestOfEach<IntegerMaximum>(v));
    StoreKeys(_mm512_mul_ps(sums, _mm512_set1_ps(unit)), count, keys);
}
HERALD_AVX512_INLINE void StoreScoreKeys(__m512i (&v)[16], int count, int32_t* keys) {
    StoreKeys(_mm512_castsi512_ps(LargestOfEach<FloatMaximum>(v)), count, keys);
}

// PageStarts, less `excess` if it is given.
HERALD_AVX512_INLINE void PageStarts512(const float* shifts, float unit, const int32_t* excess, int width,
                                        int32_t* starts) {
    const __m512 inverse = _mm512_set1_ps(1.0f / unit);
    const __m512 low = _mm512_set1_ps(-kFarthestStart), high = _mm512_set1_ps(kFarthestStart);
    for (int q = 0; q < width; q += kLanes) {
        const __m512 start = _mm512_mul_ps(_mm512_load_ps(shifts + q), inverse);
        const __m512 within = _mm512_min_ps(_mm512_max_ps(start, low), high);  // of a NaN, low
        __m512i rounded = _mm512_cvtps_epi32(within);
        if (excess != nullptr) rounded = _mm512_sub_epi32(rounded, _mm512_load_si512(excess + q));
        _mm512_store_si512(starts + q, rounded);
    }
}

// One row's codes of 4 bits, or of 1 bit in 16 bytes, plus `bias`; else UnpackRows.
HERALD_AVX512 static inline void UnpackRows512(const uint8_t* codes, int count, int bits, int n, int bias,
                                               uint8_t* out) {
    const int width = n * bits / 8;
    if (bits == 4 && width % 64 == 0) {
        const __m512i low_half = _mm512_set1_epi8(15), shift = _mm512_set1_epi8(static_cast<char>(bias - 8));
        for (int r = 0; r < count; ++r) {
            uint8_t* to = out + int64_t{r} * n;
            for (int i = 0; i < width; i += 64) {
                const __m512i both = _mm512_loadu_si512(codes + int64_t{r} * width + i);
                const __m512i low = _mm512_and_si512(both, low_half);
                const __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), low_half);
                _mm512_storeu_si512(to + i, _mm512_add_epi8(low, shift));
                _mm512_storeu_si512(to + width + i, _mm512_add_epi8(high, shift));
            }
        }
        return;
    }
    if (bits == 1 && width == 16) {
        // Byte i of 128-bit lane l: bit l (then bit l + 4) of byte i.
        const __m512i bit =
            _mm512_setr_epi64(0x0101010101010101, 0x0101010101010101, 0x0202020202020202, 0x0202020202020202,
                              0x0404040404040404, 0x0404040404040404, 0x0808080808080808, 0x0808080808080808);
        const __m512i later = _mm512_slli_epi16(bit, 4);
        const __m512i one = _mm512_set1_epi8(static_cast<char>(1 + bias));
        const __m512i minus = _mm512_set1_epi8(static_cast<char>(bias - 1));
        for (int r = 0; r < count; ++r) {
            const __m128i row = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + int64_t{r} * 16));
            const __m512i copies = _mm512_broadcast_i32x4(row);
            _mm512_storeu_si512(out + int64_t{r} * 128,
                                _mm512_mask_blend_epi8(_mm512_test_epi8_mask(copies, bit), minus, one));
            _mm512_storeu_si512(out + int64_t{r} * 128 + 64,
                                _mm512_mask_blend_epi8(_mm512_test_epi8_mask(copies, later), minus, one));
        }
        return;
    }
    UnpackRows(codes, count, bits, n, bias, out);
}

HERALD_AVX512 void TopK512(const int32_t* keys, int64_t count, int64_t k, int32_t first, Buffer& scratch,
                           int32_t* out);
HERALD_AVX512 void Prepare512(float* rows, int head_dim, const float* signs, float scale, Queries& queries);

}  // namespace herald

#endif
