#include "threads.h"

#include <pthread.h>

#include <algorithm>
#include <thread>

namespace herald {
namespace {

WorkerPool* packing_pool = nullptr;
WorkerPool* selection_pool = nullptr;
WorkerPool* device_pool = nullptr;

void NewPools() {
    packing_pool = new WorkerPool;
    selection_pool = new WorkerPool;
    device_pool = new WorkerPool;
}

}  // namespace

void WorkerPool::Run(int parts, const std::function<void(int)>& body) {
    std::lock_guard<std::mutex> one_batch(batch_mutex_);
    std::unique_lock<std::mutex> lock(mutex_);
    for (; threads_ < parts - 1; ++threads_) std::thread([this] { Loop(); }).detach();
    body_ = &body;
    next_ = 0;
    parts_ = unfinished_ = parts;
    wake_.notify_all();
    Work(lock);
    done_.wait(lock, [this] { return unfinished_ == 0; });
}

void WorkerPool::ForEach(int threads, int64_t count, const std::function<void(int64_t)>& body) {
    const int parts = static_cast<int>(std::min<int64_t>(std::max(threads, 1), count));
    if (parts <= 1) {
        for (int64_t task = 0; task < count; ++task) body(task);
        return;
    }
    std::atomic<int64_t> next{0};
    std::mutex error_mutex;
    std::exception_ptr error;
    Run(parts, [&](int) {
        try {
            for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < count;) body(task);
        } catch (...) {
            std::lock_guard<std::mutex> lock(error_mutex);
            if (!error) error = std::current_exception();
            next = count;
        }
    });
    if (error) std::rethrow_exception(error);
}

void WorkerPool::Loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        wake_.wait(lock, [this] { return next_ < parts_; });
        Work(lock);
    }
}

void WorkerPool::Work(std::unique_lock<std::mutex>& lock) {
    while (next_ < parts_) {
        const int part = next_++;
        const std::function<void(int)>& body = *body_;
        lock.unlock();
        body(part);
        lock.lock();
        if (--unfinished_ == 0) done_.notify_one();
    }
}

void StartPools() {
    NewPools();
    pthread_atfork(nullptr, nullptr, NewPools);
}

WorkerPool& PackingPool() {
    return *packing_pool;
}
WorkerPool& SelectionPool() {
    return *selection_pool;
}
WorkerPool& DevicePool() {
    return *device_pool;
}

}  // namespace herald
