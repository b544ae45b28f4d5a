// Instruction sets: what a function is compiled for, and what this CPU has.
//
// No file is compiled with -march. A function names its set by one of the macros below and is called only
// where the CPU has it, so one binary serves every x86-64 CPU. HERALD_INLINE functions name none: they take
// the set of the function they are inlined into. Products and sums are never fused unless the code says fma
// (-ffp-contract=off), so every set gives the same bits.

#pragma once

#include <string>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#define HERALD_X86 1
#define HERALD_AVX2 __attribute__((target("avx2,fma")))
#define HERALD_AVX512_SETS "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma"
#define HERALD_AVX512 __attribute__((target(HERALD_AVX512_SETS)))
#define HERALD_AVX512_INLINE inline __attribute__((target(HERALD_AVX512_SETS), always_inline))
#endif

#define HERALD_INLINE static inline __attribute__((always_inline))

namespace herald {

// Linux hands out the tile registers on request, once for all threads of a process. Empty if they may be
// used, else the reason why not.
std::string AmxUnavailable();

// Names as in Isa::name of scan.h; those of this CPU only.
std::vector<std::string> CpuFeatures();

}  // namespace herald
