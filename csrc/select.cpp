#include "select.h"

#include <algorithm>
#include <limits>

#include "rotate.h"
#include "threads.h"

namespace herald {
namespace {

// One (layer, head), on one thread.
class Task {
  public:
    Task(const Selection& selection, const ScanKernels& kernels, int64_t number, Workspace& work)
        : s_(selection),
          index_(selection.index),
          kernels_(kernels),
          layer_(number / selection.index.heads),
          head_(number % selection.index.heads),
          work_(work) {}

    void Run() {
        if (kernels_.begin != nullptr) kernels_.begin(index_.n);
        LoadQueries();
        const int64_t count = s_.last - s_.first;
        int32_t* keys = work_.keys.Get<int32_t>(count);
        Scan(keys);
        int32_t* out = s_.out + (layer_ * index_.heads + head_) * s_.k;
        kernels_.top_k(keys, count, s_.k, static_cast<int32_t>(s_.first), work_.candidates, out);
        if (kernels_.end != nullptr) kernels_.end();
    }

  private:
    // Number of a page's block of rows of this head.
    int64_t PageOf(int64_t block) const {
        return (layer_ * index_.pages + s_.page_ids[block]) * index_.heads + head_;
    }

    void LoadQueries() {
        const int64_t group = s_.query_heads / index_.heads, n = index_.n;
        queries_.count = static_cast<int>(s_.positions * group);
        queries_.width = (queries_.count + kLanes - 1) / kLanes * kLanes;
        queries_.n = index_.n;
        const int64_t width = queries_.width;
        queries_.lead = work_.lead.Get<float>(width);
        queries_.codes = work_.codes.Get<int8_t>(width * n);
        queries_.packed = work_.packed.Get<int8_t>(2 * width * n);
        queries_.excess = work_.excess.Get<int32_t>(width);
        float* rows = work_.rotated.Get<float>(width * n);
        const int64_t row_bytes = int64_t{index_.head_dim} * (s_.kind == kFloat32 ? 4 : 2);
        float least = std::numeric_limits<float>::infinity();
        std::fill(queries_.lead, queries_.lead + width, least);
        for (int64_t q = 0; q < queries_.count; ++q) {
            const int64_t at =
                (layer_ * s_.positions + q / group) * s_.query_heads + head_ * group + q % group;
            LoadValues(static_cast<const char*>(s_.queries) + at * row_bytes, s_.kind, index_.head_dim,
                       rows + q * n);
            queries_.lead[q] = s_.lse[at];
            least = s_.lse[at] < least ? s_.lse[at] : least;
        }
        for (int64_t q = 0; q < width; ++q) queries_.lead[q] = least - queries_.lead[q];
        kernels_.prepare(rows, index_.head_dim, index_.signs, s_.scale, queries_);
    }

    void Scan(int32_t* keys) {
        const int64_t size = index_.page_size, row_bytes = int64_t{index_.n} * index_.bits / 8;
        const int64_t begin = s_.first / size, end = (s_.last + size - 1) / size;
        float* shifts = work_.shifts.Get<float>(kPageGroup * int64_t{queries_.width});
        for (int64_t block = begin; block < end; ++block) {
            const int64_t in_group = (block - begin) % kPageGroup;
            if (in_group == 0) PageGroupShifts(block, std::min(block + kPageGroup, end), end, shifts);
            const int64_t start = std::max<int64_t>(0, s_.first - block * size);
            const int64_t stop = std::min(size, s_.last - block * size);
            const int64_t at = PageOf(block) * size + start;
            PageRows rows = {};
            rows.codes = index_.codes + at * row_bytes;
            rows.row_scales = index_.row_scales + at;
            rows.shifts = shifts + in_group * queries_.width;
            rows.unit = queries_.reach * index_.page_scales[2 * PageOf(block)];
            rows.count = static_cast<int>(stop - start);
            rows.bits = index_.bits;
            if (const int64_t next = block + kPagesAhead; next < end) {
                rows.next_codes = index_.codes + PageOf(next) * size * row_bytes;
                rows.next_row_scales = index_.row_scales + PageOf(next) * size;
                rows.next_count = std::min(size, s_.last - next * size);
            }
            kernels_.scores(queries_, rows, work_, keys + block * size + start - s_.first);
        }
    }

    // Shifts of pages [begin, end); fetches what the group after them needs.
    void PageGroupShifts(int64_t begin, int64_t end, int64_t last, float* shifts) {
        PageMean means[kPageGroup];
        for (int64_t block = begin; block < end; ++block) {
            const int64_t page = PageOf(block);
            means[block - begin] = {index_.mean_codes + page * 2 * index_.n,
                                    queries_.reach * index_.page_scales[2 * page + 1]};
        }
        for (int64_t block = end; block < std::min(end + kPageGroup, last); ++block) {
            const int8_t* codes = index_.mean_codes + PageOf(block) * 2 * index_.n;
            for (int64_t at = 0; at < 2 * index_.n; at += 64) __builtin_prefetch(codes + at, 0, 2);
            __builtin_prefetch(index_.page_scales + 2 * PageOf(block), 0, 2);
        }
        kernels_.shifts(queries_, means, static_cast<int>(end - begin), work_, shifts);
    }

    const Selection& s_;
    const KeyIndexView& index_;
    const ScanKernels& kernels_;
    const int64_t layer_;
    const int64_t head_;
    Workspace& work_;
    Queries queries_;
};

}  // namespace

void Select(const Selection& selection, const ScanKernels& kernels, int threads) {
    SelectionPool().ForEach(threads, selection.index.layers * selection.index.heads, [&](int64_t number) {
        static thread_local Workspace work;
        Task(selection, kernels, number, work).Run();
    });
}

}  // namespace herald
