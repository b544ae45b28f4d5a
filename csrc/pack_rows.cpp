// The buffer is read by the copy engine next, not by this CPU, so it is written with streaming stores,
// which save reading every line of it first; the rows are prefetched a fixed distance ahead, since no
// hardware prefetcher can guess where the next id points.

#include "pack_rows.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "isa.h"
#include "threads.h"

namespace herald {
namespace {

// Enough lines under way to cover the latency of DRAM, few enough to stay in the first-level cache.
constexpr int64_t kPrefetchBytes = 4096;
constexpr int64_t kLineBytes = 64;

// Part of a gather: dst[i] = src[ids[i]] for i in [begin, end), rows of row_bytes bytes.
struct Gather {
    uint8_t* dst;
    const uint8_t* src;
    const int64_t* ids;
    int64_t row_bytes;

    const uint8_t* From(int64_t i) const { return src + ids[i] * row_bytes; }
    uint8_t* To(int64_t i) const { return dst + i * row_bytes; }
    bool Aligned(int64_t bytes) const {
        return reinterpret_cast<uintptr_t>(dst) % bytes == 0 && row_bytes % bytes == 0;
    }
    void PrefetchAhead(int64_t i, int64_t end) const {
        const int64_t ahead = i + std::max<int64_t>(1, kPrefetchBytes / row_bytes);
        if (ahead >= end) return;
        const uint8_t* row = From(ahead);
        for (int64_t at = 0; at < row_bytes; at += kLineBytes) __builtin_prefetch(row + at, 0, 0);
    }
};

using GatherFunction = void (*)(const Gather&, int64_t begin, int64_t end);

void GatherScalar(const Gather& g, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
        g.PrefetchAhead(i, end);
        std::memcpy(g.To(i), g.From(i), g.row_bytes);
    }
}

#ifdef HERALD_X86
__attribute__((target("avx2"))) void GatherAvx2(const Gather& g, int64_t begin, int64_t end) {
    const int64_t body = g.row_bytes / 32 * 32;
    const bool stream = g.Aligned(32);
    for (int64_t i = begin; i < end; ++i) {
        g.PrefetchAhead(i, end);
        const uint8_t* from = g.From(i);
        uint8_t* to = g.To(i);
        for (int64_t at = 0; at < body; at += 32) {
            const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at));
            if (stream) {
                _mm256_stream_si256(reinterpret_cast<__m256i*>(to + at), v);
            } else {
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + at), v);
            }
        }
        std::memcpy(to + body, from + body, g.row_bytes - body);
    }
    _mm_sfence();
}

__attribute__((target("avx512f"))) void GatherAvx512(const Gather& g, int64_t begin, int64_t end) {
    const int64_t body = g.row_bytes / 64 * 64;
    const bool stream = g.Aligned(64);
    for (int64_t i = begin; i < end; ++i) {
        g.PrefetchAhead(i, end);
        const uint8_t* from = g.From(i);
        uint8_t* to = g.To(i);
        for (int64_t at = 0; at < body; at += 64) {
            const __m512i v = _mm512_loadu_si512(from + at);
            if (stream) {
                _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), v);
            } else {
                _mm512_storeu_si512(to + at, v);
            }
        }
        std::memcpy(to + body, from + body, g.row_bytes - body);
    }
    _mm_sfence();
}
#endif

struct Isa {
    const char* name;
    bool supported;
    GatherFunction gather;
};

// Best first. The last one always works.
std::vector<Isa> AllIsas() {
    std::vector<Isa> isas;
#ifdef HERALD_X86
    isas.push_back({"avx512", __builtin_cpu_supports("avx512f") != 0, GatherAvx512});
    isas.push_back({"avx2", __builtin_cpu_supports("avx2") != 0, GatherAvx2});
#endif
    isas.push_back({"scalar", true, GatherScalar});
    return isas;
}

Isa FindIsa(const std::string& name) {
    for (const Isa& isa : AllIsas()) {
        if (name == isa.name && !isa.supported) {
            throw std::invalid_argument("isa='" + name + "' is not supported by this CPU; use 'auto'");
        }
        if (isa.supported && (name == "auto" || name == isa.name)) return isa;
    }
    throw std::invalid_argument("isa='" + name + "' is unknown here; use 'auto' or 'scalar'");
}

}  // namespace

void PackRows(uint8_t* dst, const uint8_t* src, const int64_t* ids, int64_t count, int64_t num_rows,
              int64_t row_bytes, int threads, const std::string& isa_name) {
    const Isa isa = FindIsa(isa_name);
    const Gather gather{dst, src, ids, row_bytes};
    for (int64_t i = 0; i < count; ++i) {
        if (ids[i] < 0 || ids[i] >= num_rows) {
            throw std::out_of_range("row_ids[" + std::to_string(i) + "] = " + std::to_string(ids[i]) +
                                    " is outside src, which has " + std::to_string(num_rows) + " rows");
        }
    }
    const int parts = static_cast<int>(std::min<int64_t>(threads, std::max<int64_t>(count, 1)));
    if (parts == 1) {
        isa.gather(gather, 0, count);
        return;
    }
    PackingPool().Run(
        parts, [&](int part) { isa.gather(gather, count * part / parts, count * (part + 1) / parts); });
}

std::string PackingIsa() {
    return FindIsa("auto").name;
}

}  // namespace herald
