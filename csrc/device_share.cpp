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

    // Begins layers on this thread and finishes them on others, so that the bus never waits for a top k.
    int64_t Take(Claims& claims, int64_t leave) {
        std::exception_ptr error;
        std::vector<std::thread> finishers;
        try {
            for (int64_t i = 0; i < setup_.finishers; ++i) finishers.emplace_back([this] { FinishAll(); });
            for (;;) {
                if (!WaitForTurn()) break;
                const int64_t task = claims.Back(index_.heads, leave);
                if (task < 0) break;
                const int64_t layer = task / index_.heads;
                if (begun_.empty() && Holds(layer)) BringPages();  // not for layers that the CPU took
                Begin(layer, Begun() % Depth());
                std::lock_guard<std::mutex> lock(mutex_);
                begun_.push_back(layer);
                finished_.push_back(false);
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
        for (std::thread& finisher : finishers) finisher.join();
        if (error == nullptr) error = finish_error_;
        if (error != nullptr) std::rethrow_exception(error);
        return Begun();
    }

    // The device holds none of the request's pages.
    void ForgetPages() {
        if (setup_.held.first_layer >= index_.layers) return;
        const int32_t* pages = s_.page_ids + s_.first / index_.page_size;
        for (int64_t i = 0; i < num_pages_; ++i) setup_.held.held[pages[i]] = -1;
    }

  private:
    int64_t Depth() const { return static_cast<int64_t>(setup_.layers.size()); }
    int64_t Begun() const { return static_cast<int64_t>(begun_.size()); }
    bool Holds(int64_t layer) const { return layer >= setup_.held.first_layer; }

    // Until the next layer may begin: its buffers are free, and not too many layers wait for the bus. False
    // where another thread has failed.
    bool WaitForTurn() {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] {
            if (finish_error_ != nullptr) return true;
            const bool by_bus = !begun_.empty() && !Holds(begun_.back() - 1);
            return Begun() - first_unfinished_ < (by_bus ? std::min(setup_.pieces_ahead, Depth()) : Depth());
        });
        return finish_error_ == nullptr;
    }

    void FinishAll() {
        try {
            Check(calls_.set_context(setup_.context), "cuCtxSetCurrent");
            for (;;) {
                std::unique_lock<std::mutex> lock(mutex_);
                changed_.wait(lock, [&] {
                    return next_to_finish_ < Begun() || all_begun_ || finish_error_ != nullptr;
                });
                if (finish_error_ != nullptr || next_to_finish_ == Begun()) return;
                const int64_t number = next_to_finish_++, layer = begun_[number];
                lock.unlock();
                Finish(layer, setup_.layers[number % Depth()]);
                lock.lock();
                finished_[number] = true;
                while (first_unfinished_ < Begun() && finished_[first_unfinished_]) ++first_unfinished_;
                changed_.notify_all();
            }
        } catch (...) {
            std::lock_guard<std::mutex> lock(mutex_);
            finish_error_ = std::current_exception();
            changed_.notify_all();
        }
    }

    // Copies what the device does not hold yet of the request's pages, in all held layers, and the table.
    void BringPages() {
        const HeldLayers& held = setup_.held;
        const int32_t* pages = s_.page_ids + s_.first / index_.page_size;
        // Others write them meanwhile: what is read of a page after its version is of that version at least.
        const auto version = [&](int64_t i) {
            return __atomic_load_n(held.versions + pages[i], __ATOMIC_ACQUIRE);
        };
        const auto stale = [&](int64_t i) { return held.held[pages[i]] != version(i); };
        for (int64_t i = 0; i < num_pages_;) {
            if (!stale(i)) {
                ++i;
                continue;
            }
            const int64_t first = i, page = pages[i];
            std::vector<int64_t> versions;
            do {
                versions.push_back(version(i++));
            } while (i < num_pages_ && pages[i] == page + (i - first) && stale(i));
            for (int64_t layer = held.first_layer; layer < index_.layers; ++layer) {
                const Run run = {first, page, i - first};
                const int64_t to = (layer - held.first_layer) * index_.pages + page;
                const int64_t heads = index_.heads, size = index_.page_size;
                CopyPages(held.codes, index_.codes, heads * size * index_.n * index_.bits / 8, layer, run,
                          to);
                CopyPages(held.mean_codes, index_.mean_codes, heads * 2 * index_.n, layer, run, to);
                CopyPages(held.page_scales, index_.page_scales, heads * 2 * 4, layer, run, to);
                if (index_.bits < 8) {
                    CopyPages(held.row_scales, index_.row_scales, heads * size * 4, layer, run, to);
                }
            }
            // what was written meanwhile has another number by then
            std::copy(versions.begin(), versions.end(), held.held + page);
        }
        std::copy(pages, pages + num_pages_, held.host_table);
        Check(calls_.copy_in(held.table, held.host_table, 4 * num_pages_, setup_.copy_stream),
              "cuMemcpyHtoDAsync");
    }

    // Queues one layer on the two streams, the buffers of whose turn nobody uses.
    void Begin(int64_t layer, int64_t turn) {
        const LayerBuffers& b = setup_.layers[turn];
        const int64_t heads = index_.heads, width = setup_.width, n = index_.n, size = index_.page_size;
        const int64_t code_bytes = heads * width * n, lead_bytes = 4 * heads * width;
        const int64_t query_bytes = code_bytes + lead_bytes + 4 * heads;
        const int64_t stride = num_pages_ * size;
        PrepareLayer(
            s_, kernels_, layer,
            {reinterpret_cast<int8_t*>(b.host_queries), reinterpret_cast<float*>(b.host_queries + code_bytes),
             reinterpret_cast<float*>(b.host_queries + code_bytes + lead_bytes)});
        const int64_t held = Holds(layer) ? (layer - setup_.held.first_layer) * index_.pages : 0;
        WriteSpan(reinterpret_cast<int32_t*>(b.host_queries + query_bytes), 0, num_pages_, stride, held);
        Check(calls_.copy_in(b.queries, b.host_queries, query_bytes + 4 * kSpan, setup_.copy_stream),
              "cuMemcpyHtoDAsync");
        if (Holds(layer)) {
            Check(calls_.record(b.asked, setup_.copy_stream), "cuEventRecord");
            Check(calls_.wait(setup_.scan_stream, b.asked, 0), "cuStreamWaitEvent");
            Check(calls_.launch(b.graph, setup_.scan_stream), "cuGraphLaunch");
        } else {
            Bring(layer, turn, stride);
        }
        Check(calls_.copy_out(b.host_keys, b.keys, 4 * heads * stride, setup_.scan_stream),
              "cuMemcpyDtoHAsync");
        Check(calls_.record(b.done, setup_.scan_stream), "cuEventRecord");
    }

    // A layer's codes, piece by piece, and their scores.
    void Bring(int64_t layer, int64_t turn, int64_t stride) {
        const LayerBuffers& b = setup_.layers[turn];
        const int64_t heads = index_.heads, n = index_.n, size = index_.page_size;
        for (const Run& run : runs_) {
            CopyPages(b.mean_codes, index_.mean_codes, heads * 2 * n, layer, run, run.at);
            CopyPages(b.page_scales, index_.page_scales, heads * 2 * 4, layer, run, run.at);
            if (index_.bits < 8) {
                CopyPages(b.row_scales, index_.row_scales, heads * size * 4, layer, run, run.at);
            }
        }
        for (int64_t first = 0, number = 0; first < num_pages_; first += setup_.piece_pages, ++number) {
            const int64_t count = std::min(setup_.piece_pages, num_pages_ - first);
            int32_t* span = b.host_spans + number * kSpan;
            WriteSpan(span, first, count, stride, 0);
            Score(layer, turn, first, count, span);
        }
    }

    static void WriteSpan(int32_t* span, int64_t first, int64_t count, int64_t stride, int64_t held) {
        span[0] = static_cast<int32_t>(first);
        span[1] = static_cast<int32_t>(count);
        span[2] = static_cast<int32_t>(stride);
        span[3] = static_cast<int32_t>(held);
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

    // Between the threads.
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<int64_t> begun_;    // layers, in order
    std::vector<bool> finished_;    // of them
    int64_t next_to_finish_ = 0;    // the next one that a thread takes
    int64_t first_unfinished_ = 0;  // all before it are finished
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
        // Whether what was queued has been copied nobody knows.
        calls.drain(setup.copy_stream);
        calls.drain(setup.scan_stream);
        share.ForgetPages();
        throw;
    }
}

}  // namespace herald
