#include "encode.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "rotate.h"
#include "scan.h"
#include "threads.h"

namespace herald {
namespace {

constexpr float kMeanTop = 127 * 128;
constexpr float kMargin = 1.25f;
constexpr float kLeastRatio = 4;

// Rows of one page in one KV head.
struct PagePart {
    const uint8_t* rows;  // of the page's first row
    uint8_t* codes;
    float* row_scales;
    int8_t* mean_codes;  // [2, n]
    float* page_scales;  // of keys, of the mean
    int64_t start;
    int64_t count;
};

// Codes of the mean of x [count, n]; returns its scale.
template <int W>
HERALD_INLINE float FixMean(const float* x, int64_t count, int n, float norm, int8_t* codes) {
    alignas(64) float mean[1024];
    std::fill(mean, mean + n, 0.0f);
    for (int64_t r = 0; r < count; ++r) {
        for (int d = 0; d < n; ++d) mean[d] += x[r * n + d];
    }
    for (int d = 0; d < n; ++d) mean[d] /= static_cast<float>(count);
    const float largest = LargestMagnitude<W>(mean, n);
    float inverse = 0, scale = 0;
    if (largest >= kSmallestMaximum) {
        inverse = kMeanTop / largest;
        scale = (largest * norm) / kMeanTop;
    }
    for (int d = 0; d < n; ++d) {
        float value = mean[d] * inverse;
        value = value < kMeanTop ? value : kMeanTop;
        value = value > -kMeanTop ? value : -kMeanTop;
        value += kRounder;
        int32_t whole;
        std::memcpy(&whole, &value, 4);
        whole -= kRounderBits;
        const int32_t high = (whole + 64) >> 7;
        codes[d] = static_cast<int8_t>(high);
        codes[n + d] = static_cast<int8_t>(whole - 128 * high);
    }
    return scale;
}

// The scale of a page's 8-bit codes from its first rows, rotated and centred.
template <int W>
HERALD_INLINE float KeyScale(const float* x, int64_t count, int n, float norm, float mean_scale,
                             const float* mean) {
    float largest = 0, spread = 1;
    if (count == 1) {
        largest = LargestMagnitude<W>(mean, n);
    } else {
        largest = LargestMagnitude<W>(x, count * n);
        spread = std::sqrt(static_cast<float>(count + 1) / static_cast<float>(count - 1));
    }
    const float scale = (((largest * kMargin) * spread) * norm) / 127.0f;
    const float least = mean_scale * kLeastRatio;
    const float chosen = scale > least ? scale : least;
    return chosen >= kSmallestMaximum ? chosen : 1.0f;
}

template <int W>
HERALD_INLINE void EncodePart(const EncodeTarget& target, const PagePart& part, float* x) {
    const int64_t head_dim = target.head_dim, count = part.count;
    const int n = target.n, code_bytes = n * target.bits / 8;
    const int64_t row_bytes = 2 * head_dim * (target.kind == kFloat32 ? 4 : 2);
    const float norm = RotationNorm(n);
    for (int64_t r = 0; r < count; ++r) {
        LoadValues(part.rows + (part.start + r) * row_bytes, target.kind, head_dim, x + r * n);
        Rotate<W>(x + r * n, target.signs, target.head_dim, n);
    }
    if (part.start == 0) part.page_scales[1] = FixMean<W>(x, count, n, norm, part.mean_codes);
    alignas(64) float mean[1024];
    const float step = part.page_scales[1] / norm;
    for (int d = 0; d < n; ++d) {
        const int32_t whole = part.mean_codes[d] * 128 + part.mean_codes[n + d];
        mean[d] = static_cast<float>(whole) * step;
    }
    for (int64_t r = 0; r < count; ++r) {
        for (int d = 0; d < n; ++d) x[r * n + d] -= mean[d];
    }
    uint8_t* codes = part.codes + part.start * code_bytes;
    if (target.bits == 8) {
        if (part.start == 0) {
            part.page_scales[0] = KeyScale<W>(x, count, n, norm, part.page_scales[1], mean);
        }
        QuantiseSaturated<W>(x, count * n, norm / part.page_scales[0], codes);
        return;
    }
    for (int64_t r = 0; r < count; ++r) {
        part.row_scales[part.start + r] =
            QuantiseRow<W>(x + r * n, n, target.bits, norm, codes + r * code_bytes);
    }
}

using EncodeFunction = void (*)(const EncodeTarget&, const PagePart&, float*);

void EncodeScalar(const EncodeTarget& target, const PagePart& part, float* x) {
    EncodePart<4>(target, part, x);
}

#ifdef HERALD_X86
HERALD_AVX2 void EncodeAvx2(const EncodeTarget& target, const PagePart& part, float* x) {
    EncodePart<8>(target, part, x);
}

HERALD_AVX512 void EncodeAvx512(const EncodeTarget& target, const PagePart& part, float* x) {
    EncodePart<16>(target, part, x);
}
#endif

EncodeFunction Function(const std::string& isa) {
    const std::string name = FindScanIsa(isa).name;
#ifdef HERALD_X86
    if (name == "avx2") return EncodeAvx2;
    if (name != "scalar") return EncodeAvx512;
#endif
    return EncodeScalar;
}

}  // namespace

void EncodeSpan(const EncodeTarget& target, const int32_t* page_ids, int64_t first, int64_t last,
                int64_t layer_begin, int64_t layer_end, int threads, const std::string& isa) {
    const EncodeFunction encode = Function(isa);
    const int64_t size = target.page_size, code_bytes = int64_t{target.n} * target.bits / 8;
    const int64_t row_bytes = 2 * int64_t{target.head_dim} * (target.kind == kFloat32 ? 4 : 2);
    const int64_t begin = first / size, blocks = (last + size - 1) / size - begin;
    const int64_t tasks = (layer_end - layer_begin) * blocks * target.heads;
    SelectionPool().ForEach(threads, tasks, [&](int64_t task) {
        static thread_local Buffer buffer;
        const int64_t head = task % target.heads, block = begin + task / target.heads % blocks;
        const int64_t layer = layer_begin + task / target.heads / blocks;
        const int64_t at = (layer * target.pages + page_ids[block]) * target.heads + head;
        PagePart part;
        part.rows = target.rows + at * size * row_bytes;
        part.codes = target.codes + at * size * code_bytes;
        part.row_scales = target.row_scales + at * size;
        part.mean_codes = target.mean_codes + at * 2 * target.n;
        part.page_scales = target.page_scales + at * 2;
        part.start = std::max<int64_t>(0, first - block * size);
        part.count = std::min(size, last - block * size) - part.start;
        encode(target, part, buffer.Get<float>(part.count * target.n));
    });
}

}  // namespace herald
