// herald._native: rows of host memory gathered into a dense buffer by several threads.
//
// The buffer is read by the copy engine next, not by this CPU, so it is written with streaming stores,
// which save reading every line of it first; the rows are prefetched a fixed distance ahead, since no
// hardware prefetcher can guess where the next id points. One function per instruction set, chosen at
// run time, so that one binary serves every x86-64 CPU; other CPUs get the portable one.

#include <pthread.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#define HERALD_X86 1
#endif

namespace py = pybind11;

namespace {

// Enough lines under way to cover the latency of DRAM, few enough to stay in the first-level cache.
constexpr int64_t kPrefetchBytes = 4096;
constexpr int64_t kLineBytes = 64;

// Part of a gather: dst[i] = src[ids[i]] for i in [begin, end), rows of row_bytes bytes.
struct Gather {
    uint8_t* dst;
    const uint8_t* src;
    const int64_t* ids;
    int64_t row_bytes;

    const uint8_t* From(int64_t i) const { return src + ids[i] * row_bytes; }
    uint8_t* To(int64_t i) const { return dst + i * row_bytes; }
    bool Aligned(int64_t bytes) const {
        return reinterpret_cast<uintptr_t>(dst) % bytes == 0 && row_bytes % bytes == 0;
    }
    void PrefetchAhead(int64_t i, int64_t end) const {
        const int64_t ahead = i + std::max<int64_t>(1, kPrefetchBytes / row_bytes);
        if (ahead >= end) return;
        const uint8_t* row = From(ahead);
        for (int64_t at = 0; at < row_bytes; at += kLineBytes) __builtin_prefetch(row + at, 0, 0);
    }
};

using GatherFunction = void (*)(const Gather&, int64_t begin, int64_t end);

void GatherScalar(const Gather& g, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
        g.PrefetchAhead(i, end);
        std::memcpy(g.To(i), g.From(i), g.row_bytes);
    }
}

#ifdef HERALD_X86
__attribute__((target("avx2"))) void GatherAvx2(const Gather& g, int64_t begin, int64_t end) {
    const int64_t body = g.row_bytes / 32 * 32;
    const bool stream = g.Aligned(32);
    for (int64_t i = begin; i < end; ++i) {
        g.PrefetchAhead(i, end);
        const uint8_t* from = g.From(i);
        uint8_t* to = g.To(i);
        for (int64_t at = 0; at < body; at += 32) {
            const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at));
            if (stream) {
                _mm256_stream_si256(reinterpret_cast<__m256i*>(to + at), v);
            } else {
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + at), v);
            }
        }
        std::memcpy(to + body, from + body, g.row_bytes - body);
    }
    _mm_sfence();
}

__attribute__((target("avx512f"))) void GatherAvx512(const Gather& g, int64_t begin, int64_t end) {
    const int64_t body = g.row_bytes / 64 * 64;
    const bool stream = g.Aligned(64);
    for (int64_t i = begin; i < end; ++i) {
        g.PrefetchAhead(i, end);
        const uint8_t* from = g.From(i);
        uint8_t* to = g.To(i);
        for (int64_t at = 0; at < body; at += 64) {
            const __m512i v = _mm512_loadu_si512(from + at);
            if (stream) {
                _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), v);
            } else {
                _mm512_storeu_si512(to + at, v);
            }
        }
        std::memcpy(to + body, from + body, g.row_bytes - body);
    }
    _mm_sfence();
}
#endif

struct Isa {
    const char* name;
    bool supported;
    GatherFunction gather;
};

// Best first. The last one always works.
std::vector<Isa> AllIsas() {
    std::vector<Isa> isas;
#ifdef HERALD_X86
    isas.push_back({"avx512", __builtin_cpu_supports("avx512f") != 0, GatherAvx512});
    isas.push_back({"avx2", __builtin_cpu_supports("avx2") != 0, GatherAvx2});
#endif
    isas.push_back({"scalar", true, GatherScalar});
    return isas;
}

Isa FindIsa(const std::string& name) {
    for (const Isa& isa : AllIsas()) {
        if (name == isa.name && !isa.supported) {
            throw std::invalid_argument("isa='" + name + "' is not supported by this CPU; use 'auto'");
        }
        if (isa.supported && (name == "auto" || name == isa.name)) return isa;
    }
    throw std::invalid_argument("isa='" + name + "' is unknown here; use 'auto' or 'scalar'");
}

// Threads that outlive a call: starting sixteen takes longer than packing a few MiB.
class WorkerPool {
  public:
    // Runs body(0) .. body(parts - 1) on the calling thread and parts - 1 others. body must not throw.
    void Run(int parts, const std::function<void(int)>& body) {
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

  private:
    void Loop() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [this] { return next_ < parts_; });
            Work(lock);
        }
    }

    void Work(std::unique_lock<std::mutex>& lock) {
        while (next_ < parts_) {
            const int part = next_++;
            lock.unlock();
            (*body_)(part);
            lock.lock();
            if (--unfinished_ == 0) done_.notify_one();
        }
    }

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

// Never deleted: its threads wait on it until the process ends. A forked child has none of them, so
// it starts anew.
WorkerPool* pool = nullptr;

void NewPool() {
    pool = new WorkerPool;
}

using Bytes = py::array_t<uint8_t, py::array::c_style>;
using Ids = py::array_t<int64_t, py::array::c_style>;

void PackRows(Bytes dst, const Bytes& src, const Ids& row_ids, int64_t row_bytes, int threads,
              const std::string& isa_name) {
    if (dst.ndim() != 2 || src.ndim() != 2 || row_ids.ndim() != 1) {
        throw std::invalid_argument("dst and src must be matrices of bytes, row_ids one-dimensional");
    }
    if (row_bytes < 1 || dst.shape(1) != row_bytes || src.shape(1) != row_bytes) {
        throw std::invalid_argument("rows of dst and src must have row_bytes bytes, at least 1");
    }
    const int64_t n = row_ids.shape(0);
    if (dst.shape(0) < n) throw std::invalid_argument("dst has fewer rows than there are row_ids");
    if (threads < 1) throw std::invalid_argument("threads must be at least 1");
    const Isa isa = FindIsa(isa_name);
    const Gather gather{dst.mutable_data(), src.data(), row_ids.data(), row_bytes};
    const int64_t num_rows = src.shape(0);

    py::gil_scoped_release without_gil;
    for (int64_t i = 0; i < n; ++i) {
        if (gather.ids[i] < 0 || gather.ids[i] >= num_rows) {
            throw std::out_of_range("row_ids[" + std::to_string(i) + "] = " + std::to_string(gather.ids[i]) +
                                    " is outside src, which has " + std::to_string(num_rows) + " rows");
        }
    }
    const int parts = static_cast<int>(std::min<int64_t>(threads, std::max<int64_t>(n, 1)));
    if (parts == 1) {
        isa.gather(gather, 0, n);
        return;
    }
    pool->Run(parts, [&](int part) { isa.gather(gather, n * part / parts, n * (part + 1) / parts); });
}

std::vector<std::string> CpuFeatures() {
    std::vector<std::string> names;
#ifdef HERALD_X86
    if (__builtin_cpu_supports("avx2")) names.emplace_back("avx2");
    if (__builtin_cpu_supports("avx512f")) names.emplace_back("avx512f");
    if (__builtin_cpu_supports("avx512bw")) names.emplace_back("avx512bw");
    if (__builtin_cpu_supports("avx512vl")) names.emplace_back("avx512vl");
    if (__builtin_cpu_supports("avx512vnni")) names.emplace_back("avx512_vnni");
#endif
    return names;
}

}  // namespace

PYBIND11_MODULE(_native, m) {
    NewPool();
    pthread_atfork(nullptr, nullptr, NewPool);

    m.doc() = "CPU side of HERALD's transfers.";
    m.def("pack_rows", &PackRows, py::arg("dst").noconvert(), py::arg("src").noconvert(),
          py::arg("row_ids").noconvert(), py::arg("row_bytes"), py::arg("threads") = 1,
          py::arg("isa") = "auto",
          "dst[i] = src[row_ids[i]] for uint8 matrices with rows of row_bytes bytes.\n\n"
          "Runs on `threads` threads without the interpreter's lock. isa: 'auto' or a forced\n"
          "'avx512', 'avx2', 'scalar'. Raises ValueError on mismatched arrays or an instruction set\n"
          "that this CPU lacks, IndexError on an id outside src.");
    m.def("cpu_features", &CpuFeatures, "Vector instruction sets of this CPU that matter here.");
    m.def(
        "active_isa", [] { return std::string(FindIsa("auto").name); },
        "Instruction set that pack_rows uses when none is forced.");
}
