// Gathers rows by index: dst[dst_rows[i]] = src[src_rows[i]].
//
// Meant for a source in page-locked host memory, read across PCIe by a few SMs while the rest of the
// device computes. What limits it is the latency of a host read (microseconds), so each thread keeps
// IN_FLIGHT loads outstanding before it stores the first one. The rows are cut into pieces of PIECE
// bytes, the widest access that their size and addresses allow; 32 neighbouring pieces go to the 32
// lanes of a warp, and a warp takes IN_FLIGHT such groups at a time. A 512-byte row is exactly one
// group, a shorter row shares its group with the next rows, a longer one spans several.
//
// The grid is persistent: any number of blocks covers any number of rows, so that the number of SMs
// taken is the caller's choice. Neighbouring warps work on neighbouring rows; sorted ids therefore
// read host memory in rising order, which is what PCIe likes best.
//
// Compiled at run time (NVRTC) for one row size, so that no division by a run-time value remains.
// Needs no header. To check it by hand:
//   nvcc -arch=sm_90 -cubin -DROW_BYTES=512 -DPIECE=16 -DIN_FLIGHT=8 -DTHREADS=512 csrc/gather.cu

#ifndef ROW_BYTES
#define ROW_BYTES 512  // bytes of a row, a multiple of PIECE
#endif
#ifndef PIECE
#define PIECE 16  // bytes of one access: 16, 8, 4, 2 or 1
#endif
#ifndef IN_FLIGHT
#define IN_FLIGHT 8  // loads a thread has outstanding
#endif
#ifndef THREADS
#define THREADS 512  // threads of a block, a multiple of 32
#endif

static_assert(ROW_BYTES % PIECE == 0, "a row is a whole number of pieces");
static_assert(THREADS % 32 == 0, "a block is a whole number of warps");

// Host rows are read once and belong in no cache; `nc` is allowed because nothing writes a row of the
// pool while it is being moved.
#if PIECE == 16
typedef uint4 Piece;
__device__ __forceinline__ Piece load_once(const Piece* at) {
    Piece v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at));
    return v;
}
#else
#if PIECE == 8
typedef unsigned long long Piece;
#elif PIECE == 4
typedef unsigned int Piece;
#elif PIECE == 2
typedef unsigned short Piece;
#elif PIECE == 1
typedef unsigned char Piece;
#else
#error "PIECE must be 16, 8, 4, 2 or 1"
#endif
__device__ __forceinline__ Piece load_once(const Piece* at) {
    return __ldg(at);
}
#endif

// One block an SM, said in the launch bounds: left to itself ptxas aims at full occupancy, takes 32
// registers and so stores each piece before it loads the next but one, which undoes IN_FLIGHT.
//
// src, dst: first byte of row 0 of each side, aligned to PIECE. src_rows, dst_rows: n row ids in
// device memory. dst_rows are distinct. Launch: any number of blocks of THREADS threads.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gather_rows(const Piece* __restrict__ src, Piece* __restrict__ dst,
                const long long* __restrict__ src_rows, const long long* __restrict__ dst_rows,
                const long long n) {
    constexpr int kPieces = ROW_BYTES / PIECE;
    constexpr int kTile = 32 * IN_FLIGHT;
    const long long total = n * kPieces;
    const long long warp = (static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x) / 32;
    const long long stride = static_cast<long long>(gridDim.x) * (THREADS / 32) * kTile;
    const int lane = threadIdx.x % 32;

    for (long long first = warp * kTile; first < total; first += stride) {
        const long long first_row = first / kPieces;
        const unsigned first_offset = static_cast<unsigned>(first % kPieces);
        const Piece* from[IN_FLIGHT];
        Piece* to[IN_FLIGHT];
        Piece value[IN_FLIGHT];

        // No branch here, so that all loads are issued back to back: past the end the last piece is read
        // again, and not stored.
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            const unsigned at = first_offset + i * 32 + lane;
            const bool inside = first + i * 32 + lane < total;
            const long long row = inside ? first_row + at / kPieces : n - 1;
            const unsigned offset = inside ? at % kPieces : kPieces - 1;
            from[i] = src + src_rows[row] * kPieces + offset;
            to[i] = dst + dst_rows[row] * kPieces + offset;
        }
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) value[i] = load_once(from[i]);
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            if (first + i * 32 + lane < total) *to[i] = value[i];
        }
    }
}
