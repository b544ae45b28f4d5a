// Threads that outlive a call: starting sixteen takes longer than most of the work they are given.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>

namespace herald {

// Runs one batch at a time; a second caller waits. Its threads never end, so it is never destroyed.
class WorkerPool {
  public:
    // Runs body(0) .. body(parts - 1) on the calling thread and parts - 1 others. body must not throw.
    void Run(int parts, const std::function<void(int)>& body);

    // Runs body(task) for every task in [0, count) on at most `threads` threads, tasks in order of start.
    // The first exception of a body ends the batch and is thrown here.
    void ForEach(int threads, int64_t count, const std::function<void(int64_t)>& body);

  private:
    void Loop();
    void Work(std::unique_lock<std::mutex>& lock);

    std::mutex batch_mutex_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::condition_variable done_;
    const std::function<void(int)>* body_ = nullptr;
    int threads_ = 0;
    int next_ = 0;
    int parts_ = 0;
    int unfinished_ = 0;
};

// Pools of their own, so that planning and packing the rows of a transfer, or feeding a device, never wait
// for a scan. Call StartPools once, on import. A forked child has none of the threads, so it gets new pools.
void StartPools();
WorkerPool& PackingPool();
WorkerPool& SelectionPool();
WorkerPool& DevicePool();

}  // namespace herald
