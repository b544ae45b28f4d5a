// Rotate and quantise one row, as herald/kvstore/key_codes.py does, bit by bit. Included by the file of each
// instruction set; W is the number of floats in its vectors.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "isa.h"

namespace herald {

enum ValueKind { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

// Below this a row is all zero for our purposes, and 127 / max would overflow.
constexpr float kSmallestMaximum = 1e-30f;
// Added to a float below 2 ** 22, rounds it to an integer, which the low bits of the sum then hold.
constexpr float kRounder = 12582912.0f;
constexpr int32_t kRounderBits = 0x4B400000;

template <int W>
struct Vector {
    typedef float Floats __attribute__((vector_size(4 * W)));
    typedef int32_t Integers __attribute__((vector_size(4 * W)));
    typedef int8_t Bytes __attribute__((vector_size(W)));
};

template <typename V>
HERALD_INLINE void Load(V& value, const void* from) {
    std::memcpy(&value, from, sizeof(V));
}

template <typename V>
HERALD_INLINE void Store(void* to, const V& value) {
    std::memcpy(to, &value, sizeof(V));
}

HERALD_INLINE float FromBits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

HERALD_INLINE float HalfToFloat(uint16_t half) {
    // 2 ** 112 moves the exponent's bias from 15 to 127, for subnormal numbers too.
    const float scaled = FromBits((half & 0x7FFFu) << 13) * 5.192296858534828e33f;
    uint32_t bits;
    std::memcpy(&bits, &scaled, 4);
    const uint32_t special = (half & 0x7C00u) == 0x7C00u ? 0x7F800000u : 0u;
    return FromBits(bits | special | ((half & 0x8000u) << 16));
}

// out[0, count) = values of a row of any kind, exactly.
HERALD_INLINE void LoadValues(const void* row, int kind, int64_t count, float* out) {
    if (kind == kFloat32) {
        std::memcpy(out, row, count * 4);
        return;
    }
    const uint16_t* halves = static_cast<const uint16_t*>(row);
    if (kind == kBfloat16) {
        for (int64_t i = 0; i < count; ++i) out[i] = FromBits(uint32_t{halves[i]} << 16);
    } else {
        for (int64_t i = 0; i < count; ++i) out[i] = HalfToFloat(halves[i]);
    }
}

// Lanes S apart become their sum (the lower one) and their difference.
template <int W, int S, int... I>
HERALD_INLINE void Butterfly(typename Vector<W>::Floats& v, std::integer_sequence<int, I...>) {
    const typename Vector<W>::Floats signs = {((I & S) != 0 ? -1.0f : 1.0f)...};
    v = v * signs + __builtin_shufflevector(v, v, (I ^ S)...);
}

template <int W, int S>
HERALD_INLINE void ButterfliesWithin(typename Vector<W>::Floats& v) {
    if constexpr (S > 0) {
        Butterfly<W, S>(v, std::make_integer_sequence<int, W>{});
        ButterfliesWithin<W, S / 2>(v);
    }
}

// Walsh-Hadamard transform of x[0, n) in place, without its 1/sqrt(n). n is a power of two, at least 16.
template <int W>
HERALD_INLINE void WalshHadamard(float* x, int n) {
    typename Vector<W>::Floats a, b;
    for (int step = n / 2; step >= W; step /= 2) {
        for (int start = 0; start < n; start += 2 * step) {
            for (int i = start; i < start + step; i += W) {
                Load(a, x + i);
                Load(b, x + i + step);
                Store(x + i, a + b);
                Store(x + i + step, a - b);
            }
        }
    }
    for (int i = 0; i < n; i += W) {
        Load(a, x + i);
        ButterfliesWithin<W, W / 2>(a);
        Store(x + i, a);
    }
}

// max |x|. Compares bit patterns, so that a NaN is the largest.
template <int W>
HERALD_INLINE float LargestMagnitude(const float* x, int64_t n) {
    typename Vector<W>::Integers largest = {}, bits;
    for (int64_t i = 0; i < n; i += W) {
        Load(bits, x + i);
        bits &= 0x7FFFFFFF;
        largest = bits > largest ? bits : largest;
    }
    int32_t best = 0;
    for (int lane = 0; lane < W; ++lane) best = largest[lane] > best ? largest[lane] : best;
    return FromBits(static_cast<uint32_t>(best));
}

// sum |x|: lane j of 8 adds x[j], x[j + 8], ... in order; then lanes 0 .. 7 are added in order.
HERALD_INLINE float SumOfMagnitudes(const float* x, int n) {
    float lanes[8] = {};
    for (int i = 0; i < n; i += 8) {
        for (int j = 0; j < 8; ++j) lanes[j] += std::fabs(x[i + j]);
    }
    float total = 0;
    for (int j = 0; j < 8; ++j) total += lanes[j];
    return total;
}

// out = rint(x[0, W) * inverse), ties to even; products are at most 127.
template <int W>
HERALD_INLINE void Round(const float* x, float inverse, typename Vector<W>::Integers& out) {
    typename Vector<W>::Floats v;
    Load(v, x);
    v = v * inverse + kRounder;
    std::memcpy(&out, &v, sizeof(out));
    out -= kRounderBits;
}

template <int W>
HERALD_INLINE void StoreBytes(uint8_t* to, const typename Vector<W>::Integers& values) {
    Store(to, __builtin_convertvector(values, typename Vector<W>::Bytes));
}

// codes = rint(x * inverse) as int8, saturated at -127 and 127; NaN becomes 127.
template <int W>
HERALD_INLINE void QuantiseSaturated(const float* x, int64_t n, float inverse, uint8_t* codes) {
    typename Vector<W>::Floats v, top = {}, bottom = {};
    top += 127.0f;
    bottom -= 127.0f;
    for (int64_t i = 0; i < n; i += W) {
        typename Vector<W>::Integers values;
        Load(v, x + i);
        v = v * inverse;
        v = v < top ? v : top;
        v = v > bottom ? v : bottom;
        v += kRounder;
        std::memcpy(&values, &v, sizeof(values));
        StoreBytes<W>(codes + i, values - kRounderBits);
    }
}

// 4-bit or 1-bit codes of an unnormalised rotated row x[0, n); returns its scale.
template <int W>
HERALD_INLINE float QuantiseRow(const float* x, int n, int bits, float norm, uint8_t* codes) {
    if (bits == 1) {
        const int width = n / 8;
        std::memset(codes, 0, width);
        for (int j = 0; j < 8; ++j) {
            for (int i = 0; i < width; ++i) {
                codes[i] = static_cast<uint8_t>(codes[i] | ((x[j * width + i] >= 0.0f ? 1 : 0) << j));
            }
        }
        return (SumOfMagnitudes(x, n) / static_cast<float>(n)) * norm;
    }
    const float top = 7.0f, largest = LargestMagnitude<W>(x, n);
    float inverse = 0, scale = 0;
    if (largest >= kSmallestMaximum) {
        inverse = top / largest;
        scale = (largest * norm) / top;
    }
    const int half = n / 2;
    if (half < W) {
        for (int i = 0; i < half; ++i) {
            const int low = static_cast<int>(std::nearbyint(x[i] * inverse)) + 8;
            const int high = static_cast<int>(std::nearbyint(x[i + half] * inverse)) + 8;
            codes[i] = static_cast<uint8_t>(low | (high << 4));
        }
        return scale;
    }
    for (int i = 0; i < half; i += W) {
        typename Vector<W>::Integers low, high;
        Round<W>(x + i, inverse, low);
        Round<W>(x + i + half, inverse, high);
        StoreBytes<W>(codes + i, (low + 8) | ((high + 8) << 4));
    }
    return scale;
}

// x[0, n) = the unnormalised rotation of x[0, head_dim).
template <int W>
HERALD_INLINE void Rotate(float* x, const float* signs, int head_dim, int n) {
    for (int d = 0; d < head_dim; ++d) x[d] *= signs[d];
    for (int d = head_dim; d < n; ++d) x[d] = 0;
    WalshHadamard<W>(x, n);
}

HERALD_INLINE float RotationNorm(int n) {
    return static_cast<float>(1.0 / std::sqrt(static_cast<double>(n)));
}

}  // namespace herald
