#include "device_share.h"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

namespace herald {
namespace {

void Check(int error, const char* function) {
    if (error != 0) throw std::runtime_error(std::string(function) + ": CUDA error " + std::to_string(error));
}

// Consecutive pages of the pool that are also consecutive in the request.
struct Run {
    int64_t at, page, count;  // at: index of the first, from the first page that is scored
};

class Share {
  public:
    Share(const DriverCalls& calls, const DeviceSetup& setup, const Selection& selection,
          const ScanKernels& kernels)
        : calls_(calls), setup_(setup), s_(selection), index_(selection.index), kernels_(kernels) {
        const int64_t size = index_.page_size, begin = s_.first / size;
        num_pages_ = (s_.last + size - 1) / size - begin;
        for (int64_t i = 0; i < num_pages_; ++i) {
            const int64_t page = s_.page_ids[begin + i];
            const bool cut = i % setup_.piece_pages == 0;
            if (cut || runs_.back().page + runs_.back().count != page) {
                runs_.push_back({i, page, 0});
            }
            ++runs_.back().count;
        }
    }

    // Begins layers on this thread and finishes them on another, so that the bus never waits for a top k.
    int64_t Take(Claims& claims, int64_t leave) {
        std::thread finisher([this] { FinishAll(); });
        std::exception_ptr error;
        try {
            for (int64_t number = 0; WaitForTurn(number); ++number) {
                const int64_t task = claims.Back(index_.heads, leave);
                if (task < 0) break;
                const int64_t layer = task / index_.heads;
                Begin(layer, number % Depth());
                std::lock_guard<std::mutex> lock(mutex_);
                begun_.push_back(layer);
                changed_.notify_all();
            }
        } catch (...) {
            error = std::current_exception();
        }
        {
            std::lock_guard<std::mutex> lock(mutex_);
            all_begun_ = true;
            changed_.notify_all();
        }
        finisher.join();
        if (error == nullptr) error = finish_error_;
        if (error != nullptr) std::rethrow_exception(error);
        return finished_;
    }

  private:
    int64_t Depth() const { return static_cast<int64_t>(setup_.layers.size()); }

    // Until the buffers of the number-th layer are free; false where the other thread has failed.
    bool WaitForTurn(int64_t number) {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return number - finished_ < Depth() || finish_error_ != nullptr; });
        return finish_error_ == nullptr;
    }

    void FinishAll() {
        try {
            Check(calls_.set_context(setup_.context), "cuCtxSetCurrent");
            for (;;) {
                std::unique_lock<std::mutex> lock(mutex_);
                changed_.wait(lock, [&] { return finished_ < Begun() || all_begun_; });
                if (finished_ == Begun()) return;
                const int64_t layer = begun_[finished_];
                lock.unlock();
                Finish(layer, setup_.layers[finished_ % Depth()]);
                lock.lock();
                ++finished_;
                changed_.notify_all();
            }
        } catch (...) {
            std::lock_guard<std::mutex> lock(mutex_);
            finish_error_ = std::current_exception();
            changed_.notify_all();
        }
    }

    int64_t Begun() const { return static_cast<int64_t>(begun_.size()); }

    // Queues one layer on the two streams, the buffers of whose turn nobody uses.
    void Begin(int64_t layer, int64_t turn) {
        const LayerBuffers& b = setup_.layers[turn];
        const int64_t heads = index_.heads, width = setup_.width, n = index_.n, size = index_.page_size;
        const int64_t code_bytes = heads * width * n, lead_bytes = 4 * heads * width;
        PrepareLayer(
            s_, kernels_, layer,
            {reinterpret_cast<int8_t*>(b.host_queries), reinterpret_cast<float*>(b.host_queries + code_bytes),
             reinterpret_cast<float*>(b.host_queries + code_bytes + lead_bytes)});
        Check(calls_.copy_in(b.queries, b.host_queries, code_bytes + lead_bytes + 4 * heads,
                             setup_.copy_stream),
              "cuMemcpyHtoDAsync");
        for (const Run& run : runs_) {
            CopyPages(b.mean_codes, index_.mean_codes, heads * 2 * n, layer, run, run.at);
            CopyPages(b.page_scales, index_.page_scales, heads * 2 * 4, layer, run, run.at);
            if (index_.bits < 8)
                CopyPages(b.row_scales, index_.row_scales, heads * size * 4, layer, run, run.at);
        }
        const int64_t stride = num_pages_ * size;
        for (int64_t first = 0, number = 0; first < num_pages_; first += setup_.piece_pages, ++number) {
            const int64_t count = std::min(setup_.piece_pages, num_pages_ - first);
            int32_t* span = b.host_spans + number * kSpan;
            span[0] = static_cast<int32_t>(first);
            span[1] = static_cast<int32_t>(count);
            span[2] = static_cast<int32_t>(stride);
            span[3] = 0;
            Score(layer, turn, first, count, span);
        }
        Check(calls_.copy_out(b.host_keys, b.keys, 4 * heads * stride, setup_.scan_stream),
              "cuMemcpyDtoHAsync");
        Check(calls_.record(b.done, setup_.scan_stream), "cuEventRecord");
    }

    // Copies pages [first, first + count) of a layer into the next piece and scores them.
    void Score(int64_t layer, int64_t turn, int64_t first, int64_t count, const int32_t* span) {
        const int64_t number = next_piece_++ % static_cast<int64_t>(setup_.pieces.size());
        const PieceBuffers& piece = setup_.pieces[number];
        if (next_piece_ > static_cast<int64_t>(setup_.pieces.size())) {
            Check(calls_.wait(setup_.copy_stream, piece.scored, 0), "cuStreamWaitEvent");
        }
        Check(calls_.copy_in(piece.span, span, 4 * kSpan, setup_.copy_stream), "cuMemcpyHtoDAsync");
        const int64_t page_bytes = index_.heads * index_.page_size * index_.n * index_.bits / 8;
        for (const Run& run : runs_) {
            if (first <= run.at && run.at < first + count) {
                CopyPages(piece.codes, index_.codes, page_bytes, layer, run, run.at - first);
            }
        }
        Check(calls_.record(piece.copied, setup_.copy_stream), "cuEventRecord");
        Check(calls_.wait(setup_.scan_stream, piece.copied, 0), "cuStreamWaitEvent");
        const size_t graph = number * setup_.layers.size() + turn;
        Check(calls_.launch(setup_.graphs[graph], setup_.scan_stream), "cuGraphLaunch");
        Check(calls_.record(piece.scored, setup_.scan_stream), "cuEventRecord");
    }

    // A run of pages of an index array to page `at` of `to`, in copies that stay within one registration.
    void CopyPages(uint64_t to, const void* array, int64_t page_bytes, int64_t layer, const Run& run,
                   int64_t at) {
        const char* base = static_cast<const char*>(array);
        int64_t from = (layer * index_.pages + run.page) * page_bytes, left = run.count * page_bytes;
        to += at * page_bytes;
        while (left > 0) {
            const int64_t count = std::min(left, setup_.register_bytes - from % setup_.register_bytes);
            Check(calls_.copy_in(to, base + from, count, setup_.copy_stream), "cuMemcpyHtoDAsync");
            to += count;
            from += count;
            left -= count;
        }
    }

    // Waits for a layer's keys and takes their top k.
    void Finish(int64_t layer, const LayerBuffers& b) {
        Check(calls_.synchronize(b.done), "cuEventSynchronize");
        const int64_t heads = index_.heads;
        TopKOfLayer(kernels_, b.host_keys, heads, num_pages_ * index_.page_size, s_.first % index_.page_size,
                    s_.last - s_.first, s_.k, s_.first, s_.out + layer * heads * s_.k);
    }

    const DriverCalls& calls_;
    const DeviceSetup& setup_;
    const Selection& s_;
    const KeyIndexView& index_;
    const ScanKernels& kernels_;
    std::vector<Run> runs_;
    int64_t num_pages_ = 0;
    int64_t next_piece_ = 0;

    // Between the two threads.
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<int64_t> begun_;  // layers
    int64_t finished_ = 0;        // of them; written by the finishing thread alone
    bool all_begun_ = false;
    std::exception_ptr finish_error_;
};

}  // namespace

int64_t RunDeviceShare(const DriverCalls& calls, const DeviceSetup& setup, const Selection& selection,
                       const ScanKernels& kernels, Claims& claims, int64_t leave) {
    Check(calls.set_context(setup.context), "cuCtxSetCurrent");
    Share share(calls, setup, selection, kernels);
    try {
        return share.Take(claims, leave);
    } catch (...) {
        // The buffers' next user must not meet what is queued; of a device that is lost nothing comes back.
        calls.drain(setup.copy_stream);
        calls.drain(setup.scan_stream);
        throw;
    }
}

}  // namespace herald
