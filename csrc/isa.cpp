#include "isa.h"

#if defined(HERALD_X86) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace herald {
namespace {

#if defined(HERALD_X86) && defined(__linux__)
constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
constexpr long kTileData = 18;               // XFEATURE_XTILEDATA

bool CpuHasAmxInt8() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    const unsigned tile = 1u << 24, int8 = 1u << 25;
    return (d & tile) != 0 && (d & int8) != 0;
}

std::string AskForAmx() {
    if (!CpuHasAmxInt8()) return "the CPU has no AMX";
    if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) {
        return "the kernel does not grant the tile registers";
    }
    return "";
}
#else
std::string AskForAmx() {
    return "built for another system than Linux on x86-64";
}
#endif

}  // namespace

std::string AmxUnavailable() {
    static const std::string reason = AskForAmx();
    return reason;
}

std::vector<std::string> CpuFeatures() {
    std::vector<std::string> names;
#ifdef HERALD_X86
    if (__builtin_cpu_supports("avx2")) names.emplace_back("avx2");
    if (__builtin_cpu_supports("fma")) names.emplace_back("fma");
    if (__builtin_cpu_supports("avx512f")) names.emplace_back("avx512f");
    if (__builtin_cpu_supports("avx512bw")) names.emplace_back("avx512bw");
    if (__builtin_cpu_supports("avx512vl")) names.emplace_back("avx512vl");
    if (__builtin_cpu_supports("avx512dq")) names.emplace_back("avx512dq");
    if (__builtin_cpu_supports("avx512vnni")) names.emplace_back("avx512_vnni");
    if (AmxUnavailable().empty()) names.emplace_back("amx_int8");
#endif
    return names;
}

}  // namespace herald
