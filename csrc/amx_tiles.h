// The tile registers of AMX and their instructions, and the same operations on memory.

#pragma once

#include <cstdint>
#include <cstring>

#include "isa.h"

#ifdef HERALD_X86

namespace herald {

constexpr int kTileRows = 16;
constexpr int kTileBytes = 64;  // of a row

struct TileConfig {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64, "as the instruction reads it");

struct HardwareTiles {
    static void Configure(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config) : "memory"); }
    static void Release() { asm volatile("tilerelease" ::: "memory"); }
    template <int T>
    HERALD_INLINE void Zero() {
        asm volatile("tilezero %%tmm%c0" ::"i"(T));
    }
    template <int T>
    HERALD_INLINE void Load(const void* from, int64_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
    }
    template <int T>
    HERALD_INLINE void Save(void* to, int64_t stride) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
    }
    template <int Sum, int Left, int Right>
    HERALD_INLINE void MultiplyAdd() {
        asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(Left), "i"(Right));
    }
};

// Not inlined: speed does not matter, and a pipeline would hold dozens of copies.
#define HERALD_EMULATED __attribute__((noinline)) static void
struct EmulatedTiles {
    static inline thread_local TileConfig config;
    static inline thread_local int8_t tiles[8][kTileRows][kTileBytes];

    static void Configure(const TileConfig& wanted) {
        config = wanted;
        std::memset(tiles, 0x55, sizeof(tiles));
    }
    static void Release() { config = TileConfig(); }
    template <int T>
    HERALD_EMULATED Zero() {
        std::memset(tiles[T], 0, sizeof(tiles[T]));
    }
    template <int T>
    HERALD_EMULATED Load(const void* from, int64_t stride) {
        std::memset(tiles[T], 0, sizeof(tiles[T]));
        for (int r = 0; r < config.rows[T]; ++r) {
            std::memcpy(tiles[T][r], static_cast<const char*>(from) + r * stride, config.row_bytes[T]);
        }
    }
    template <int T>
    HERALD_EMULATED Save(void* to, int64_t stride) {
        for (int r = 0; r < config.rows[T]; ++r) {
            std::memcpy(static_cast<char*>(to) + r * stride, tiles[T][r], config.row_bytes[T]);
        }
    }
    template <int Sum, int Left, int Right>
    HERALD_EMULATED MultiplyAdd() {
        for (int r = 0; r < config.rows[Sum]; ++r) {
            for (int g = 0; g < config.row_bytes[Left] / 4; ++g) {
                for (int q = 0; q < config.row_bytes[Sum] / 4; ++q) {
                    int32_t sum;
                    std::memcpy(&sum, &tiles[Sum][r][4 * q], 4);
                    for (int i = 0; i < 4; ++i) sum += tiles[Left][r][4 * g + i] * tiles[Right][g][4 * q + i];
                    std::memcpy(&tiles[Sum][r][4 * q], &sum, 4);
                }
            }
        }
    }
};
#undef HERALD_EMULATED

}  // namespace herald

#endif
