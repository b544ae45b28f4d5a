// The layers of a selection that a CUDA device scores while the CPU's threads score the others: codes cross
// the bus piece by piece, or are there already, a captured graph scores them, order keys come back. A thread
// for each layer under way drives all of it through the driver's functions; nothing needs the interpreter.

#pragma once

#include <cstdint>
#include <vector>

#include "select.h"

namespace herald {

// Functions of the CUDA driver, by whoever has loaded it. Each returns 0 or an error.
struct DriverCalls {
    int (*set_context)(void* context);                                          // cuCtxSetCurrent
    int (*copy_in)(uint64_t to, const void* from, size_t bytes, void* stream);  // cuMemcpyHtoDAsync
    int (*copy_out)(void* to, uint64_t from, size_t bytes, void* stream);       // cuMemcpyDtoHAsync
    int (*record)(void* event, void* stream);                                   // cuEventRecord
    int (*wait)(void* stream, void* event, unsigned flags);                     // cuStreamWaitEvent
    int (*synchronize)(void* event);                                            // cuEventSynchronize
    int (*drain)(void* stream);                                                 // cuStreamSynchronize
    int (*launch)(void* graph, void* stream);                                   // cuGraphLaunch
};

// Memory of a layer that is under way. Addresses of the device are numbers.
struct LayerBuffers {
    uint8_t* host_queries;  // page-locked: codes [heads, width, n], lead [heads, width], reach [heads], span
    uint64_t queries;       // the same on the device
    int32_t* host_spans;    // page-locked [most pieces, kSpan]
    uint64_t mean_codes, page_scales, row_scales;  // of all pages of a request
    uint64_t keys;                                 // [heads * rows of a request]
    int32_t* host_keys;                            // page-locked
    void* asked;                                   // event: the queries are there
    void* done;                                    // event: the keys are on the host
    void* graph;                                   // scores a layer that the device holds
};

// Memory of a piece of a layer's codes.
struct PieceBuffers {
    uint64_t codes;  // [piece_pages, heads, page_size, row bytes]
    uint64_t span;   // int32 [kSpan]
    void* copied;    // event: the codes are there
    void* scored;    // event: nobody reads them any more
};

// Layers [first_layer, layers) of the index on the device, as far as pages have been asked for.
struct HeldLayers {
    int64_t first_layer;
    uint64_t codes, row_scales, mean_codes, page_scales;  // [layers, pages, ..] as in the index
    const int64_t* versions;                              // [pages], another number when a page was written
    int64_t* held;                                        // [pages], that of what the device holds
    int32_t* host_table;                                  // page-locked [capacity], pages of the request
    uint64_t table;
};

struct DeviceSetup {
    void* context;
    void* copy_stream;
    void* scan_stream;
    int64_t piece_pages;
    int64_t capacity;        // pages of a request that the buffers hold
    int64_t width;           // query rows of a KV head that they hold
    int64_t register_bytes;  // a copy stays within one of these, counted from an array's first byte
    int64_t pieces_ahead;    // layers under way whose codes cross the bus; of others as many as there are
    HeldLayers held;
    std::vector<LayerBuffers> layers;  // one for each layer that may be under way
    std::vector<PieceBuffers> pieces;  // none where every layer is held: of those nothing crosses the bus
    std::vector<void*> graphs;         // [pieces, layers]: scores a piece with a layer's buffers
};

// A span as `score_codes` reads it: first page, pages, rows of a head's keys, first page of a held layer.
constexpr int64_t kSpan = 4;

// Takes whole layers from the back of `claims`, as long as `leave` more are left to others, and writes their
// best rows into selection.out.
// Returns the layers taken, all of them finished. Throws std::runtime_error with the driver's error; nothing
// is under way then, if the device still answers.
int64_t RunDeviceShare(const DriverCalls& calls, const DeviceSetup& setup, const Selection& selection,
                       const ScanKernels& kernels, Claims& claims, int64_t leave);

}  // namespace herald
