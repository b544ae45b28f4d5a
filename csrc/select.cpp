#include "select.h"

#include <algorithm>
#include <limits>

#include "rotate.h"
#include "threads.h"

namespace herald {
namespace {

int64_t Width(const Selection& s) {
    const int64_t count = s.positions * (s.query_heads / s.index.heads);
    return (count + kLanes - 1) / kLanes * kLanes;
}

// The queries of a (layer, head), in buffers of `work`.
Queries LoadQueries(const Selection& s, const ScanKernels& kernels, int64_t layer, int64_t head,
                    Workspace& work) {
    const int64_t group = s.query_heads / s.index.heads, n = s.index.n, width = Width(s);
    Queries queries;
    queries.count = static_cast<int>(s.positions * group);
    queries.width = static_cast<int>(width);
    queries.n = s.index.n;
    queries.lead = work.lead.Get<float>(width);
    queries.codes = work.codes.Get<int8_t>(width * n);
    queries.packed = work.packed.Get<int8_t>(2 * width * n);
    queries.excess = work.excess.Get<int32_t>(width);
    float* rows = work.rotated.Get<float>(width * n);
    const int64_t row_bytes = int64_t{s.index.head_dim} * (s.kind == kFloat32 ? 4 : 2);
    float least = std::numeric_limits<float>::infinity();
    std::fill(queries.lead, queries.lead + width, least);
    for (int64_t q = 0; q < queries.count; ++q) {
        const int64_t at = (layer * s.positions + q / group) * s.query_heads + head * group + q % group;
        LoadValues(static_cast<const char*>(s.queries) + at * row_bytes, s.kind, s.index.head_dim,
                   rows + q * n);
        queries.lead[q] = s.lse[at];
        least = s.lse[at] < least ? s.lse[at] : least;
    }
    for (int64_t q = 0; q < width; ++q) queries.lead[q] = least - queries.lead[q];
    kernels.prepare(rows, s.index.head_dim, s.index.signs, s.scale, queries);
    return queries;
}

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
        queries_ = LoadQueries(s_, kernels_, layer_, head_, work_);
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

int64_t Claims::Front() {
    int64_t range = range_.load();
    for (;;) {
        const int64_t begin = range >> 32, end = range & UINT32_MAX;
        if (begin >= end) return -1;
        if (range_.compare_exchange_weak(range, (begin + 1) << 32 | end)) return begin;
    }
}

int64_t Claims::Back(int64_t count, int64_t leave) {
    int64_t range = range_.load();
    for (;;) {
        const int64_t begin = range >> 32, end = range & UINT32_MAX;
        if (end - begin < count + leave) return -1;
        if (range_.compare_exchange_weak(range, begin << 32 | (end - count))) return end - count;
    }
}

void Select(const Selection& selection, const ScanKernels& kernels, int threads, Claims* claims) {
    const auto run = [&](int64_t number) {
        static thread_local Workspace work;
        Task(selection, kernels, number, work).Run();
    };
    if (claims == nullptr) {
        SelectionPool().ForEach(threads, selection.index.layers * selection.index.heads, run);
        return;
    }
    SelectionPool().ForEach(threads, threads, [&](int64_t) {
        for (int64_t number; (number = claims->Front()) >= 0;) run(number);
    });
}

int64_t QueryWidth(const Selection& selection) {
    return Width(selection);
}

void PrepareLayer(const Selection& selection, const ScanKernels& kernels, int64_t layer,
                  const LayerQueries& out) {
    static thread_local Workspace work;
    const int64_t width = Width(selection), n = selection.index.n;
    for (int64_t head = 0; head < selection.index.heads; ++head) {
        const Queries queries = LoadQueries(selection, kernels, layer, head, work);
        std::copy(queries.codes, queries.codes + width * n, out.codes + head * width * n);
        std::copy(queries.lead, queries.lead + width, out.lead + head * width);
        out.reach[head] = queries.reach;
    }
}

void TopKOfLayer(const ScanKernels& kernels, const int32_t* keys, int64_t heads, int64_t stride,
                 int64_t begin, int64_t count, int64_t k, int64_t first, int32_t* out) {
    static thread_local Buffer scratch;
    for (int64_t head = 0; head < heads; ++head) {
        kernels.top_k(keys + head * stride + begin, count, k, static_cast<int32_t>(first), scratch,
                      out + head * k);
    }
}

}  // namespace herald
