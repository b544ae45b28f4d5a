#include "scan.h"

#include <cstdlib>
#include <new>
#include <stdexcept>

namespace herald {
namespace {

#ifdef HERALD_X86
std::string Lacks(bool has, const char* what) {
    return has ? "" : std::string("the CPU has no ") + what;
}

std::string Avx2Unavailable() {
    return Lacks(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"), "AVX2 with FMA");
}

std::string VnniUnavailable() {
    const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                     __builtin_cpu_supports("avx512vnni");
    return Lacks(has && Avx2Unavailable().empty(), "AVX-512 VNNI");
}

std::string AmxInt8Unavailable() {
    const std::string vectors = VnniUnavailable();
    return vectors.empty() ? AmxUnavailable() : vectors;
}
#endif

std::vector<Isa> AllIsas() {
    std::vector<Isa> isas;
#ifdef HERALD_X86
    isas.push_back({"amx", AmxInt8Unavailable(), true, AmxKernels()});
    isas.push_back({"vnni", VnniUnavailable(), true, VnniKernels()});
    isas.push_back({"avx2", Avx2Unavailable(), true, Avx2Kernels()});
    isas.push_back({"amx_emulated", VnniUnavailable(), false, EmulatedAmxKernels()});
#endif
    isas.push_back({"scalar", "", true, ScalarKernels()});
    return isas;
}

constexpr int64_t kLine = 64;

}  // namespace

Buffer::~Buffer() {
    std::free(data_);
}

void Buffer::Reserve(int64_t bytes) {
    if (bytes <= size_) return;
    std::free(data_);
    size_ = 0;
    const int64_t rounded = (bytes + kLine - 1) / kLine * kLine;
    data_ = std::aligned_alloc(kLine, static_cast<size_t>(rounded));
    if (data_ == nullptr) throw std::bad_alloc();
    size_ = rounded;
}

const std::vector<Isa>& ScanIsas() {
    static const std::vector<Isa> isas = AllIsas();
    return isas;
}

const Isa& FindScanIsa(const std::string& name) {
    std::string known = "'auto'";
    for (const Isa& isa : ScanIsas()) {
        if (name == isa.name && !isa.unavailable.empty()) {
            throw std::invalid_argument("isa='" + name + "' cannot run: " + isa.unavailable + "; use 'auto'");
        }
        if (isa.unavailable.empty() && (name == isa.name || (name == "auto" && isa.automatic))) return isa;
        known += std::string(", '") + isa.name + "'";
    }
    throw std::invalid_argument("isa='" + name + "' is unknown; use one of " + known);
}

}  // namespace herald
