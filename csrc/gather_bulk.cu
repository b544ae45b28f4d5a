// Gathers rows by index with the bulk copy engine of an SM: dst[dst_rows[i]] = src[src_rows[i]].
//
// For sm_90 and newer, rows that are multiples of 16 bytes, both sides 16-byte aligned. gather.cu holds a
// row's bytes in registers while they cross PCIe, and one block cannot have enough of them under way;
// here they land in shared memory, one instruction a row, and leave it the same way. A lane moves whole
// rows and touches no byte of them.
//
// Each warp works alone on a ring of STAGES stages of ROWS rows, row i of a stage being lane i's. A stage
// is filled by bulk loads that report to the stage's barrier, emptied by bulk stores of which every lane
// waits for its own, and filled again one turn later, so that no warp waits for a store it has just issued.
//
// The grid is persistent: any number of blocks covers any number of rows. Neighbouring warps take
// neighbouring rows; sorted ids therefore read host memory in rising order.
//
// Compiled at run time (NVRTC) for one row size. Needs no header. To check it by hand:
//   nvcc -arch=sm_90 -cubin -Xptxas -v -DROW_BYTES=512 -DROWS=32 -DSTAGES=2 -DWARPS=4 csrc/gather_bulk.cu

#ifndef ROW_BYTES
#define ROW_BYTES 512  // bytes of a row, a multiple of 16
#endif
#ifndef ROWS
#define ROWS 32  // rows of a stage, at most one a lane
#endif
#ifndef STAGES
#define STAGES 2  // stages of a warp's ring, at least 2
#endif
#ifndef WARPS
#define WARPS 4  // warps of a block
#endif

static_assert(ROW_BYTES % 16 == 0, "bulk copies are whole multiples of 16 bytes");
static_assert(ROWS >= 1 && ROWS <= 32, "a lane has at most one row of a stage");
static_assert(STAGES >= 2, "a stage is filled while another one is emptied");

typedef unsigned long long Barrier;

// The instructions that C++ has no words for. A test that runs this file on a CPU brings its own.
#ifndef INSTRUCTIONS_GIVEN
__device__ __forceinline__ unsigned shared_address(const void* at) {
    return static_cast<unsigned>(__cvta_generic_to_shared(at));
}

__device__ __forceinline__ void init_barrier(Barrier* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}

// Makes barriers that this thread initialised visible to the copy engine.
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The one arrival of a phase, which then ends when `bytes` bytes have come in.
__device__ __forceinline__ void expect_bytes(Barrier* barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void wait_for_phase(Barrier* barrier, unsigned parity) {
    unsigned done;
    do {
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n"
            "}"
            : "=r"(done)
            : "r"(shared_address(barrier)), "r"(parity)
            : "memory");
    } while (!done);
}

__device__ __forceinline__ void load_row(unsigned char* to, const unsigned char* from, Barrier* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(to)),
        "l"(from), "n"(ROW_BYTES), "r"(shared_address(barrier))
        : "memory");
}

__device__ __forceinline__ void store_row(unsigned char* to, const unsigned char* from) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                 "r"(shared_address(from)), "n"(ROW_BYTES)
                 : "memory");
}

// Ends the group of this lane's stores.
__device__ __forceinline__ void close_group() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until all of this lane's groups but the newest have read their shared memory.
__device__ __forceinline__ void wait_but_newest() {
    asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
}

// Until all that this lane stored has been written.
__device__ __forceinline__ void wait_for_stores() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
#endif

// src, dst: first byte of row 0 of each side. src_rows, dst_rows: n row ids in device memory. dst_rows are
// distinct. Launch: any number of blocks of 32 * WARPS threads, with WARPS * STAGES *
// (ROWS * (ROW_BYTES + 8) + 8) bytes of dynamic shared memory.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    gather_rows_bulk(const unsigned char* __restrict__ src, unsigned char* __restrict__ dst,
                     const long long* __restrict__ src_rows, const long long* __restrict__ dst_rows,
                     const long long n) {
    extern __shared__ __align__(128) unsigned char shared[];
    constexpr int kSlots = WARPS * STAGES * ROWS;
    // Where the row of each slot goes; a lane reads only what it wrote.
    long long* targets = reinterpret_cast<long long*>(shared + kSlots * ROW_BYTES);
    Barrier* barriers = reinterpret_cast<Barrier*>(targets + kSlots);

    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    unsigned char* slots = shared + (warp * STAGES * ROWS + lane) * ROW_BYTES;
    long long* target = targets + warp * STAGES * ROWS + lane;
    Barrier* full = barriers + warp * STAGES;
    if (lane == 0) {
        for (int stage = 0; stage < STAGES; ++stage) init_barrier(full + stage);
        publish_barriers();
    }
    __syncwarp();

    const long long first = static_cast<long long>(blockIdx.x) * WARPS + warp;
    const long long stride = static_cast<long long>(gridDim.x) * WARPS;
    const long long groups = (n + ROWS - 1) / ROWS;
    // Groups of ROWS rows that this warp moves: first, first + stride, ...
    const long long mine = first < groups ? (groups - first - 1) / stride + 1 : 0;
    const auto row_of = [&](long long k) { return (first + k * stride) * ROWS + lane; };
    const auto has_row = [&](long long k) { return k < mine && lane < ROWS && row_of(k) < n; };

    // Ids are read two groups ahead of their use: they come from device memory.
    long long from_now = has_row(0) ? src_rows[row_of(0)] : 0, to_now = has_row(0) ? dst_rows[row_of(0)] : 0;
    long long from_next = has_row(1) ? src_rows[row_of(1)] : 0,
              to_next = has_row(1) ? dst_rows[row_of(1)] : 0;

    // Starts loading group k, the one whose ids are next, into a stage that is empty.
    const auto fill = [&](long long k) {
        const int stage = static_cast<int>(k % STAGES);
        const bool active = has_row(k);
        const long long from = from_now, to = to_now;
        from_now = from_next;
        to_now = to_next;
        if (has_row(k + 2)) {
            from_next = src_rows[row_of(k + 2)];
            to_next = dst_rows[row_of(k + 2)];
        }
        const unsigned rows = __popc(__ballot_sync(0xffffffffu, active));
        if (lane == 0) expect_bytes(full + stage, rows * ROW_BYTES);
        __syncwarp();
        if (active) {
            target[stage * ROWS] = to;
            load_row(slots + stage * (ROWS * ROW_BYTES), src + from * ROW_BYTES, full + stage);
        }
    };

    for (long long k = 0; k < STAGES && k < mine; ++k) fill(k);
    for (long long k = 0; k < mine; ++k) {
        const int stage = static_cast<int>(k % STAGES);
        wait_for_phase(full + stage, static_cast<unsigned>(k / STAGES) & 1u);
        // Lane 0 must not open the next phase while another lane still looks for this one's end.
        __syncwarp();
        if (has_row(k)) {
            store_row(dst + target[stage * ROWS] * ROW_BYTES, slots + stage * (ROWS * ROW_BYTES));
        }
        close_group();
        if (k >= 1 && k - 1 + STAGES < mine) {
            wait_but_newest();
            fill(k - 1 + STAGES);
        }
    }
    wait_for_stores();
}
