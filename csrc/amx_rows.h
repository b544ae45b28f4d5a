// Tiles of 16 rows times tiles of 16 queries on AMX, as a pipeline.
//
// One tile of rows stays in the tile registers while all tiles of queries pass by. An item is one tile of
// rows times one tile of queries: 16 x 16 sums, one row of the index a row and one query a lane, so that the
// max over queries is one of whole vectors. Four tiles of sums take turns. An item's sums are saved
// kSaveAfter items later, when they are ready, and taken from memory kTakeAfter items later, so that neither
// waits for the products.

#pragma once

#include "amx_tiles.h"

#ifdef HERALD_X86

namespace herald {

constexpr int kTileSums = kTileRows * 16;
// Tile registers: 2 of rows, 2 of queries, 4 of sums.
constexpr int kRowTile = 0, kQueryTile = 2, kSumTile = 4;

// When items are saved and taken, and how the page ahead is fetched.
template <int SaveAfter, int TakeAfter, int Ring, int Locality>
struct PipelinePlan {
    static constexpr int kSaveAfter = SaveAfter;  // 0 .. 3
    static constexpr int kTakeAfter = TakeAfter;
    static constexpr int kRing = Ring;          // tiles of sums in memory, a power of two
    static constexpr int kLocality = Locality;  // of __builtin_prefetch; -1 for no prefetch
    static_assert(SaveAfter < 4 && TakeAfter - SaveAfter < Ring && (Ring & (Ring - 1)) == 0, "sums overlap");
};

// Memory to fetch, a few lines an item.
struct Ahead {
    const uint8_t* at = nullptr;
    const uint8_t* end = nullptr;
    int64_t lines_per_item = 0;
};

inline TileConfig TilesFor(int n) {
    const int bytes = n < kTileBytes ? n : kTileBytes;
    TileConfig config;
    for (int t = 0; t < 8; ++t) {
        const bool rows = t < kQueryTile, sums = t >= kSumTile;
        config.rows[t] = static_cast<uint8_t>(rows || sums ? kTileRows : bytes / 4);
        config.row_bytes[t] = static_cast<uint16_t>(rows ? bytes : kTileBytes);
    }
    return config;
}

// Steps: tiles of 64 dimensions in a row, if they are 1 or 2; 0 for more, which do not stay in registers.
// Sink: Take(sums, q) is handed the items of a tile of rows in order of the query, then Finish(row tile).
template <class Tiles, class Plan, int Steps, class Sink>
struct Pipeline {
    const uint8_t* codes;   // [16 * row_tiles, n] of int8
    const int32_t* packed;  // [query_tiles, n / 4, 16]
    int n, row_tiles, query_tiles;
    int32_t* ring;  // [Plan::kRing, 16, 16]
    Ahead ahead;
    int query = 0;                       // of the item to multiply
    int taken_query = 0, taken_row = 0;  // of the item to take

    HERALD_AVX512_INLINE void Run(Sink& sink) {
        const int items = row_tiles * query_tiles;
        for (int item = 0; item < items + Plan::kTakeAfter; item += 4) {
            Step<0>(item, items, sink);
            Step<1>(item + 1, items, sink);
            Step<2>(item + 2, items, sink);
            Step<3>(item + 3, items, sink);
        }
    }

    template <int S>
    HERALD_AVX512_INLINE void Step(int item, int items, Sink& sink) {
        if (item < items) Multiply<kSumTile + S>();
        const int save = item - Plan::kSaveAfter, take = item - Plan::kTakeAfter;
        if (save >= 0 && save < items) {
            constexpr int kSaved = kSumTile + ((S - Plan::kSaveAfter) & 3);
            Tiles::template Save<kSaved>(ring + (save & (Plan::kRing - 1)) * kTileSums, kTileBytes);
        }
        if (take >= 0 && take < items) {
            sink.Take(ring + (take & (Plan::kRing - 1)) * kTileSums, taken_query);
            if (++taken_query == query_tiles) {
                sink.Finish(taken_row++);
                taken_query = 0;
            }
        }
    }

    template <int Sum>
    HERALD_AVX512_INLINE void Multiply() {
        if constexpr (Plan::kLocality >= 0) {
            for (int64_t i = 0; i < ahead.lines_per_item && ahead.at < ahead.end; ++i, ahead.at += 64) {
                __builtin_prefetch(ahead.at, 0, Plan::kLocality);
            }
        }
        const int32_t* queries = packed + int64_t{query} * n * 4;
        Tiles::template Zero<Sum>();
        if constexpr (Steps > 0) {
            if (query == 0) {
                Tiles::template Load<kRowTile>(codes, n);
                if constexpr (Steps == 2) Tiles::template Load<kRowTile + 1>(codes + kTileBytes, n);
            }
            Tiles::template Load<kQueryTile>(queries, kTileBytes);
            Tiles::template MultiplyAdd<Sum, kRowTile, kQueryTile>();
            if constexpr (Steps == 2) {
                Tiles::template Load<kQueryTile + 1>(queries + kTileSums, kTileBytes);
                Tiles::template MultiplyAdd<Sum, kRowTile + 1, kQueryTile + 1>();
            }
        } else {
            for (int at = 0; at < n; at += 2 * kTileBytes, queries += 2 * kTileSums) {
                Tiles::template Load<kRowTile>(codes + at, n);
                Tiles::template Load<kQueryTile>(queries, kTileBytes);
                Tiles::template MultiplyAdd<Sum, kRowTile, kQueryTile>();
                Tiles::template Load<kRowTile + 1>(codes + at + kTileBytes, n);
                Tiles::template Load<kQueryTile + 1>(queries + kTileSums, kTileBytes);
                Tiles::template MultiplyAdd<Sum, kRowTile + 1, kQueryTile + 1>();
            }
        }
        if (++query == query_tiles) {
            query = 0;
            codes += int64_t{kTileRows} * n;
        }
    }
};

}  // namespace herald

#endif
