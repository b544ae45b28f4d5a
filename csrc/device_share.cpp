#include "device_share.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <stdexcept>
#include <string>

#include "threads.h"

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
        next_layer_ = index_.layers - 1;
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

    // A thread for each layer that may be under way does all of a layer: claims it, makes codes of its
    // queries, queues what the device does, waits and takes the top k. What is queued is queued layer by
    // layer.
    int64_t Take(Claims& claims, int64_t leave) {
        DevicePool().ForEach(static_cast<int>(Depth()), Depth(), [&](int64_t turn) {
            Check(calls_.set_context(setup_.context), "cuCtxSetCurrent");
            try {
                for (int64_t layer; (layer = Claim(claims, leave, turn)) >= 0;) {
                    Prepare(layer, setup_.layers[turn]);
                    Queue(layer, turn);
                    Finish(layer, setup_.layers[turn]);
                }
            } catch (...) {
                failed_ = true;
                throw;
            }
        });
        return taken_;
    }

    // The device holds none of the request's pages.
    void ForgetPages() {
        if (setup_.held.first_layer >= index_.layers) return;
        const int32_t* pages = s_.page_ids + s_.first / index_.page_size;
        for (int64_t i = 0; i < num_pages_; ++i) setup_.held.held[pages[i]] = -1;
    }

  private:
    int64_t Depth() const { return static_cast<int64_t>(setup_.layers.size()); }
    bool Holds(int64_t layer) const { return layer >= setup_.held.first_layer; }

    // The next layer for the buffers of a turn; -1 for none.
    int64_t Claim(Claims& claims, int64_t leave, int64_t turn) {
        std::lock_guard<std::mutex> lock(claim_mutex_);
        // Whoever waits for the bus claims no more than that the bus always has work: the CPU may be sooner.
        if (failed_ || (turn >= setup_.pieces_ahead && !Holds(next_layer_))) return -1;
        const int64_t task = claims.Back(index_.heads, leave);
        if (task < 0) return -1;
        const int64_t layer = task / index_.heads;
        next_layer_ = layer - 1;
        if (taken_++ == 0 && Holds(layer)) BringPages();  // not for layers that the CPU took
        return layer;
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

    int64_t QueryBytes() const { return index_.heads * setup_.width * (index_.n + 4) + 4 * index_.heads; }

    // Codes of a layer's queries, in the host's buffer.
    void Prepare(int64_t layer, const LayerBuffers& b) {
        const int64_t codes = index_.heads * setup_.width * index_.n, leads = 4 * index_.heads * setup_.width;
        PrepareLayer(
            s_, kernels_, layer,
            {reinterpret_cast<int8_t*>(b.host_queries), reinterpret_cast<float*>(b.host_queries + codes),
             reinterpret_cast<float*>(b.host_queries + codes + leads)});
    }

    // Queues a layer on the two streams.
    void Queue(int64_t layer, int64_t turn) {
        std::lock_guard<std::mutex> lock(queue_mutex_);
        const LayerBuffers& b = setup_.layers[turn];
        const int64_t stride = num_pages_ * index_.page_size;
        const int64_t held = Holds(layer) ? (layer - setup_.held.first_layer) * index_.pages : 0;
        WriteSpan(reinterpret_cast<int32_t*>(b.host_queries + QueryBytes()), 0, num_pages_, stride, held);
        Check(calls_.copy_in(b.queries, b.host_queries, QueryBytes() + 4 * kSpan, setup_.copy_stream),
              "cuMemcpyHtoDAsync");
        if (Holds(layer)) {
            Check(calls_.record(b.asked, setup_.copy_stream), "cuEventRecord");
            Check(calls_.wait(setup_.scan_stream, b.asked, 0), "cuStreamWaitEvent");
            Check(calls_.launch(b.graph, setup_.scan_stream), "cuGraphLaunch");
        } else {
            Bring(layer, turn, stride);
        }
        Check(calls_.copy_out(b.host_keys, b.keys, 4 * index_.heads * stride, setup_.scan_stream),
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

    std::mutex claim_mutex_;
    int64_t taken_ = 0;       // layers
    int64_t next_layer_ = 0;  // that will be claimed, if the CPU does not come first
    std::mutex queue_mutex_;
    int64_t next_piece_ = 0;
    std::atomic<bool> failed_{false};
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
