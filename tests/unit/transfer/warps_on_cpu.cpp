// Runs gather_bulk.cu (SOURCE) on a CPU: one thread a lane, one block after the other.
//
// Copies are as unhelpful as the hardware may be: what is being loaded is garbage from the moment the
// load is issued until somebody has waited for it, and what is being stored is read from shared memory only
// when somebody waits for that. Reads the list of rows from stdin: pool rows, arena rows, blocks, n, then n
// pairs of ids; says which row is wrong, and fails.

#include <algorithm>
#include <barrier>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __global__
#define __shared__
#define __align__(bytes)
#define __launch_bounds__(...)
#define INSTRUCTIONS_GIVEN

struct Index {
    unsigned x;
};
thread_local Index threadIdx;
Index blockIdx, gridDim;
alignas(128) unsigned char shared[1 << 20];

struct Warp {
    std::barrier<> together{32};
    bool votes[32];
};
std::vector<std::unique_ptr<Warp>> warps;

void __syncwarp() {
    warps[threadIdx.x / 32]->together.arrive_and_wait();
}
unsigned __ballot_sync(unsigned, bool vote) {
    Warp& warp = *warps[threadIdx.x / 32];
    warp.votes[threadIdx.x % 32] = vote;
    warp.together.arrive_and_wait();
    unsigned bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= static_cast<unsigned>(warp.votes[lane]) << lane;
    warp.together.arrive_and_wait();
    return bits;
}
int __popc(unsigned bits) {
    return __builtin_popcount(bits);
}

using Copy = std::function<void()>;
// Copies of this lane that nobody has waited for, by group, oldest first; the last one is open.
thread_local std::deque<std::vector<Copy>> groups(1);

void close_group() {
    groups.emplace_back();
}
void run_all_but_newest(size_t kept) {
    while (groups.size() - 1 > kept) {
        for (const Copy& copy : groups.front()) copy();
        groups.pop_front();
    }
}

typedef unsigned long long Barrier;
struct State {
    bool arrived = false;
    long long bytes = 0;
    unsigned phase = 0;
    std::vector<Copy> loads;
};
std::mutex mutex;
std::condition_variable changed;
std::map<Barrier*, State> states;

void init_barrier(Barrier* barrier) {
    std::lock_guard<std::mutex> lock(mutex);
    states[barrier] = State();
}
void publish_barriers() {}
void expect_bytes(Barrier* barrier, unsigned bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    State& state = states.at(barrier);
    if (state.arrived) {
        std::puts("a phase was opened twice");
        std::exit(1);
    }
    state.arrived = true;
    state.bytes += bytes;
    changed.notify_all();
}
void wait_for_phase(Barrier* barrier, unsigned parity) {
    std::unique_lock<std::mutex> lock(mutex);
    State& state = states.at(barrier);
    while (state.phase == parity) {
        std::vector<Copy> loads;
        loads.swap(state.loads);
        for (const Copy& load : loads) load();
        if (state.arrived && state.bytes == 0) {
            state.arrived = false;
            state.phase ^= 1;
            changed.notify_all();
        } else if (changed.wait_for(lock, std::chrono::seconds(20)) == std::cv_status::timeout) {
            std::puts("waited for rows that nobody loads");
            std::exit(1);
        }
    }
}
void load_row(unsigned char* to, const unsigned char* from, Barrier* barrier) {
    std::lock_guard<std::mutex> lock(mutex);
    std::memset(to, 0xee, ROW_BYTES);
    states.at(barrier).loads.push_back([=] {
        std::memcpy(to, from, ROW_BYTES);
        states.at(barrier).bytes -= ROW_BYTES;
    });
    changed.notify_all();
}
void store_row(unsigned char* to, const unsigned char* from) {
    groups.back().push_back([=] { std::memcpy(to, from, ROW_BYTES); });
}
void wait_but_newest() {
    run_all_but_newest(1);
}
void wait_for_stores() {
    run_all_but_newest(0);
}

#include SOURCE

long long Read() {
    long long value;
    if (std::scanf("%lld", &value) != 1) std::exit(2);
    return value;
}

int main() {
    const long long pool_rows = Read(), arena_rows = Read();
    gridDim.x = static_cast<unsigned>(Read());
    const long long n = Read();
    std::vector<long long> src_rows(n), dst_rows(n);
    for (long long i = 0; i < n; ++i) src_rows[i] = Read(), dst_rows[i] = Read();

    std::vector<unsigned char> pool(pool_rows * ROW_BYTES), arena(arena_rows * ROW_BYTES, 0xcc);
    for (size_t i = 0; i < pool.size(); ++i) pool[i] = static_cast<unsigned char>(i * 2654435761u >> 13);
    std::vector<unsigned char> expected = arena;
    for (long long i = 0; i < n; ++i) {
        std::memcpy(&expected[dst_rows[i] * ROW_BYTES], &pool[src_rows[i] * ROW_BYTES], ROW_BYTES);
    }

    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
        warps.clear();
        for (int warp = 0; warp < WARPS; ++warp) warps.push_back(std::make_unique<Warp>());
        std::vector<std::thread> lanes;
        for (unsigned thread = 0; thread < 32 * WARPS; ++thread) {
            lanes.emplace_back([&, thread] {
                threadIdx.x = thread;
                gather_rows_bulk(pool.data(), arena.data(), src_rows.data(), dst_rows.data(), n);
            });
        }
        for (std::thread& lane : lanes) lane.join();
    }
    for (long long row = 0; row < arena_rows; ++row) {
        if (std::memcmp(&arena[row * ROW_BYTES], &expected[row * ROW_BYTES], ROW_BYTES) != 0) {
            std::printf("arena row %lld is wrong\n", row);
            return 1;
        }
    }
    return 0;
}
