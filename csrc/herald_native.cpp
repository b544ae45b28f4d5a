// herald._native: the Python side of csrc. Checks what arrays must have so that no kernel leaves its memory;
// the callers in herald/ check what users can get wrong, and say so in their own words.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "device_share.h"
#include "encode.h"
#include "isa.h"
#include "pack_rows.h"
#include "rotate.h"
#include "scan.h"
#include "select.h"
#include "threads.h"
#include "update.h"

namespace py = pybind11;

namespace {

using namespace herald;

// What the functions below take and give; herald/kvstore/native.py refuses an extension with another number.
constexpr int kInterface = 7;

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

void Require(bool condition, const char* problem) {
    if (!condition) throw std::invalid_argument(problem);
}

// Pointer and kind of an array of values: float32, bfloat16 (as uint16) or, if `half`, float16 (as uint16).
const void* Values(const py::array& array, bool half, int& kind) {
    Require((array.flags() & py::array::c_style) != 0, "values must be C-contiguous");
    if (py::isinstance<py::array_t<float>>(array)) {
        kind = kFloat32;
    } else if (py::isinstance<py::array_t<uint16_t>>(array)) {
        kind = half ? kFloat16 : kBfloat16;
    } else {
        throw std::invalid_argument("values must be float32 or uint16");
    }
    return array.data();
}

void CheckPages(const Array<int32_t>& page_ids, int64_t last, int64_t page_size, int64_t num_pages) {
    Require(page_ids.ndim() == 1 && page_ids.shape(0) * page_size >= last, "page_ids are too few");
    for (py::ssize_t i = 0; i < page_ids.shape(0); ++i) {
        Require(page_ids.data()[i] >= 0 && page_ids.data()[i] < num_pages,
                "page_ids name pages that do not exist");
    }
}

void BindPackRows(Array<uint8_t> dst, const Array<uint8_t>& src, const Array<int64_t>& row_ids,
                  int64_t row_bytes, int threads, const std::string& isa) {
    Require(dst.ndim() == 2 && src.ndim() == 2 && row_ids.ndim() == 1,
            "dst and src must be matrices of bytes, row_ids one-dimensional");
    Require(row_bytes >= 1 && dst.shape(1) == row_bytes && src.shape(1) == row_bytes,
            "rows of dst and src must have row_bytes bytes, at least 1");
    Require(dst.shape(0) >= row_ids.shape(0), "dst has fewer rows than there are row_ids");
    Require(threads >= 1, "threads must be at least 1");
    uint8_t* to = dst.mutable_data();
    py::gil_scoped_release without_gil;
    PackRows(to, src.data(), row_ids.data(), row_ids.shape(0), src.shape(0), row_bytes, threads, isa);
}

KeyIndexView View(const Array<uint8_t>& codes, const Array<float>& row_scales,
                  const Array<int8_t>& mean_codes, const Array<float>& page_scales, const Array<float>& signs,
                  int bits, int64_t head_dim) {
    Require(bits == 8 || bits == 4 || bits == 1, "bits must be 8, 4 or 1");
    Require(codes.ndim() == 5 && row_scales.ndim() == 4 && mean_codes.ndim() == 5 &&
                page_scales.ndim() == 4 && signs.ndim() == 1,
            "codes, row_scales, mean_codes, page_scales and signs must have 5, 4, 5, 4 and 1 dimensions");
    KeyIndexView view = {};
    view.codes = codes.data();
    view.row_scales = row_scales.data();
    view.mean_codes = mean_codes.data();
    view.page_scales = page_scales.data();
    view.signs = signs.data();
    view.layers = codes.shape(0);
    view.pages = codes.shape(1);
    view.heads = codes.shape(2);
    view.page_size = codes.shape(3);
    view.n = static_cast<int>(signs.shape(0));
    view.bits = bits;
    Require(view.n >= 16 && view.n <= 1024 && (view.n & (view.n - 1)) == 0, "signs must be 16, 32 .. 1024");
    Require(head_dim >= 1 && head_dim <= view.n, "head_dim does not fit the signs");
    view.head_dim = static_cast<int>(head_dim);
    Require(codes.shape(4) == view.n * bits / 8, "codes do not fit the signs");
    for (int i = 0; i < 3; ++i) {
        Require(row_scales.shape(i) == codes.shape(i) && mean_codes.shape(i) == codes.shape(i) &&
                    page_scales.shape(i) == codes.shape(i),
                "the arrays of the index differ");
    }
    Require(row_scales.shape(3) == (bits == 8 ? 0 : view.page_size), "row_scales do not fit the bits");
    Require(mean_codes.shape(3) == 2 && mean_codes.shape(4) == view.n && page_scales.shape(3) == 2,
            "mean_codes and page_scales must be [.., 2, n] and [.., 2]");
    return view;
}

// A selection over arrays that outlive it; `k` and `out` are left to the caller.
Selection SelectionOf(const Array<uint8_t>& codes, const Array<float>& row_scales,
                      const Array<int8_t>& mean_codes, const Array<float>& page_scales,
                      const Array<float>& signs, int bits, const py::array& queries, const Array<float>& lse,
                      float scale) {
    Selection s = {};
    s.queries = Values(queries, false, s.kind);
    Require(queries.ndim() == 4 && lse.ndim() == 3, "queries and lse must have 4 and 3 dimensions");
    s.index = View(codes, row_scales, mean_codes, page_scales, signs, bits, queries.shape(3));
    for (int i = 0; i < 3; ++i) Require(queries.shape(i) == lse.shape(i), "queries and lse differ");
    Require(queries.shape(0) == s.index.layers && queries.shape(1) >= 1 && queries.shape(2) >= 1 &&
                queries.shape(2) % s.index.heads == 0,
            "queries do not fit the index");
    Require(queries.shape(1) * queries.shape(2) / s.index.heads <= (1 << 20), "too many queries");
    s.lse = lse.data();
    s.positions = queries.shape(1);
    s.query_heads = queries.shape(2);
    s.scale = scale;
    return s;
}

// The same with its span and its result.
Selection WholeSelection(const Array<uint8_t>& codes, const Array<float>& row_scales,
                         const Array<int8_t>& mean_codes, const Array<float>& page_scales,
                         const Array<float>& signs, int bits, const Array<int32_t>& page_ids, int64_t first,
                         int64_t last, const py::array& queries, const Array<float>& lse, float scale,
                         Array<int32_t>& out) {
    Selection s = SelectionOf(codes, row_scales, mean_codes, page_scales, signs, bits, queries, lse, scale);
    Require(out.ndim() == 3 && out.shape(0) == s.index.layers && out.shape(1) == s.index.heads,
            "out must be [L, H, k]");
    s.k = out.shape(2);
    Require(0 <= first && first < last && 1 <= s.k && s.k <= last - first, "first, last and k do not fit");
    CheckPages(page_ids, last, s.index.page_size, s.index.pages);
    s.page_ids = page_ids.data();
    s.first = first;
    s.last = last;
    s.out = out.mutable_data();
    return s;
}

void BindSelect(const Array<uint8_t>& codes, const Array<float>& row_scales, const Array<int8_t>& mean_codes,
                const Array<float>& page_scales, const Array<float>& signs, int bits,
                const Array<int32_t>& page_ids, int64_t first, int64_t last, const py::array& queries,
                const Array<float>& lse, float scale, Array<int32_t> out, int threads, const std::string& isa,
                Claims* claims) {
    const Selection s = WholeSelection(codes, row_scales, mean_codes, page_scales, signs, bits, page_ids,
                                       first, last, queries, lse, scale, out);
    Require(threads >= 1, "threads must be at least 1");
    const ScanKernels kernels = FindScanIsa(isa).kernels;
    py::gil_scoped_release without_gil;
    Select(s, kernels, threads, claims);
}

// Functions and memory of a device, all as addresses.
class BoundDeviceShare {
  public:
    using Addresses = std::vector<uint64_t>;

    BoundDeviceShare(const Addresses& calls, const Addresses& queues, const std::vector<int64_t>& sizes,
                     const std::vector<Addresses>& layers, const std::vector<Addresses>& pieces,
                     const Addresses& graphs, const Addresses& held, Array<int64_t> versions,
                     Array<int64_t> held_versions)
        : versions_(versions), held_versions_(held_versions) {
        Require(calls.size() == 8 && queues.size() == 3 && sizes.size() == 6 && held.size() == 6,
                "there must be 8 calls, 3 queues, 6 sizes and 6 addresses of what is held");
        calls_ = {To<decltype(calls_.set_context)>(calls[0]), To<decltype(calls_.copy_in)>(calls[1]),
                  To<decltype(calls_.copy_out)>(calls[2]),    To<decltype(calls_.record)>(calls[3]),
                  To<decltype(calls_.wait)>(calls[4]),        To<decltype(calls_.synchronize)>(calls[5]),
                  To<decltype(calls_.drain)>(calls[6]),       To<decltype(calls_.launch)>(calls[7])};
        setup_.context = Pointer(queues[0]);
        setup_.copy_stream = Pointer(queues[1]);
        setup_.scan_stream = Pointer(queues[2]);
        Require(*std::min_element(sizes.begin(), sizes.end() - 1) >= 1 && sizes.back() >= 0,
                "sizes must be at least 1, and the first layer 0");
        setup_.piece_pages = sizes[0];
        setup_.capacity = sizes[1];
        setup_.width = sizes[2];
        setup_.register_bytes = sizes[3];
        setup_.pieces_ahead = sizes[4];
        Require(!layers.empty() && graphs.size() == layers.size() * pieces.size(),
                "there must be a graph for every piece and layer");
        Require(!pieces.empty() || sizes.back() == 0, "layers that are not held need pieces");
        for (const Addresses& of : layers) {
            Require(of.size() == 11, "a layer has eleven addresses");
            setup_.layers.push_back({To<uint8_t*>(of[0]), of[1], To<int32_t*>(of[2]), of[3], of[4], of[5],
                                     of[6], To<int32_t*>(of[7]), Pointer(of[8]), Pointer(of[9]),
                                     Pointer(of[10])});
        }
        for (const Addresses& of : pieces) {
            Require(of.size() == 4, "a piece has four addresses");
            setup_.pieces.push_back({of[0], of[1], Pointer(of[2]), Pointer(of[3])});
        }
        for (const uint64_t graph : graphs) setup_.graphs.push_back(Pointer(graph));
        Require(versions.ndim() == 1 && held_versions.size() == versions.size(),
                "versions and held_versions must be [pages]");
        setup_.held = {sizes[5],
                       held[0],
                       held[1],
                       held[2],
                       held[3],
                       versions_.data(),
                       held_versions_.mutable_data(),
                       To<int32_t*>(held[4]),
                       held[5]};
    }

    int64_t Run(const Array<uint8_t>& codes, const Array<float>& row_scales, const Array<int8_t>& mean_codes,
                const Array<float>& page_scales, const Array<float>& signs, int bits,
                const Array<int32_t>& page_ids, int64_t first, int64_t last, const py::array& queries,
                const Array<float>& lse, float scale, Array<int32_t> out, const std::string& isa,
                Claims& claims, int64_t leave) const {
        const Selection s = WholeSelection(codes, row_scales, mean_codes, page_scales, signs, bits, page_ids,
                                           first, last, queries, lse, scale, out);
        const int64_t size = s.index.page_size;
        Require((last + size - 1) / size - first / size <= setup_.capacity && QueryWidth(s) == setup_.width &&
                    versions_.size() == s.index.pages,
                "the buffers are for other pages or queries");
        const ScanKernels kernels = FindScanIsa(isa).kernels;
        py::gil_scoped_release without_gil;
        return RunDeviceShare(calls_, setup_, s, kernels, claims, leave);
    }

  private:
    template <typename T>
    static T To(uint64_t address) {
        return reinterpret_cast<T>(static_cast<uintptr_t>(address));
    }
    static void* Pointer(uint64_t address) { return To<void*>(address); }

    Array<int64_t> versions_, held_versions_;  // kept alive
    DriverCalls calls_ = {};
    DeviceSetup setup_ = {};
};

void BindEncode(const py::array& rows, bool half, Array<uint8_t> codes, Array<float> row_scales,
                Array<int8_t> mean_codes, Array<float> page_scales, const Array<float>& signs, int bits,
                const Array<int32_t>& page_ids, int64_t first, int64_t last, int64_t layer_begin,
                int64_t layer_end, int threads, const std::string& isa) {
    EncodeTarget target = {};
    target.rows = static_cast<const uint8_t*>(Values(rows, half, target.kind));
    Require(rows.ndim() == 5 && rows.shape(4) % 2 == 0, "rows must be [L, P, H, page_size, 2 D]");
    const KeyIndexView view =
        View(codes, row_scales, mean_codes, page_scales, signs, bits, rows.shape(4) / 2);
    for (int i = 0; i < 4; ++i) Require(rows.shape(i) == codes.shape(i), "rows and codes differ");
    Require(0 <= layer_begin && layer_begin <= layer_end && layer_end <= view.layers, "no such layers");
    Require(0 <= first && first <= last, "first and last do not fit");
    CheckPages(page_ids, last, view.page_size, view.pages);
    target.codes = codes.mutable_data();
    target.row_scales = row_scales.mutable_data();
    target.mean_codes = mean_codes.mutable_data();
    target.page_scales = page_scales.mutable_data();
    target.signs = view.signs;
    target.pages = view.pages;
    target.heads = view.heads;
    target.page_size = view.page_size;
    target.head_dim = view.head_dim;
    target.n = view.n;
    target.bits = bits;
    const int32_t* pages = page_ids.data();
    py::gil_scoped_release without_gil;
    EncodeSpan(target, pages, first, last, layer_begin, layer_end, threads, isa);
}

py::tuple BindPlanUpdate(const Array<int32_t>& slot_positions, int64_t length, const Array<int32_t>& selected,
                         int64_t first, int64_t last, int64_t upto, const Array<int32_t>& page_ids,
                         int64_t own_rows, bool move_all, int64_t capacity, int64_t row_start,
                         int64_t num_pages, int64_t page_size, int threads) {
    Require(slot_positions.ndim() == 3 && selected.ndim() == 3,
            "slot_positions and selected must be [L, H, n]");
    UpdateInput in = {};
    in.layers = slot_positions.shape(0);
    in.heads = slot_positions.shape(1);
    in.slots = slot_positions.shape(2);
    in.k = selected.shape(2);
    Require(selected.shape(0) == in.layers && selected.shape(1) == in.heads,
            "slot_positions and selected differ");
    Require(0 <= first && first <= last && last <= upto && own_rows >= 0, "first, last, upto do not fit");
    const int64_t rows = first + in.k + (upto - last) + own_rows;
    Require(0 <= length && length <= rows && rows <= in.slots, "the target does not fit the slots");
    Require(page_size >= 1, "page_size must be at least 1");
    CheckPages(page_ids, upto, page_size, num_pages);
    in.slot_positions = slot_positions.data();
    in.selected = selected.data();
    in.page_ids = page_ids.data();
    in.length = length;
    in.first = first;
    in.last = last;
    in.upto = upto;
    in.own_rows = own_rows;
    in.move_all = move_all;
    in.capacity = capacity;
    in.row_start = row_start;
    in.num_pages = num_pages;
    in.page_size = page_size;
    py::gil_scoped_release without_gil;
    const UpdatePlan plan(in, threads);
    py::gil_scoped_acquire with_gil;
    Array<int64_t> src(plan.arrivals()), staging(plan.arrivals()), slot(plan.arrivals());
    Array<int64_t> free_rows(in.layers * in.heads * own_rows);
    Array<int32_t> counts({in.layers, in.heads}), positions({in.layers, in.heads, in.slots});
    int64_t *to_src = src.mutable_data(), *to_staging = staging.mutable_data(),
            *to_slot = slot.mutable_data();
    int64_t* to_free = free_rows.mutable_data();
    int32_t *to_counts = counts.mutable_data(), *to_positions = positions.mutable_data();
    {
        py::gil_scoped_release writing;
        plan.Write(to_src, to_staging, to_slot, to_counts, to_free, to_positions);
    }
    return py::make_tuple(src, staging, slot, counts, free_rows, positions);
}

py::dict ScanIsaReasons() {
    py::dict reasons;
    for (const Isa& isa : ScanIsas()) {
        if (isa.automatic) reasons[isa.name] = isa.unavailable;
    }
    return reasons;
}

}  // namespace

PYBIND11_MODULE(_native, m) {
    StartPools();

    m.doc() = "CPU side of HERALD: selection, key codes, changes of resident sets, packing of rows.";
    m.attr("INTERFACE") = kInterface;
    m.def("pack_rows", &BindPackRows, py::arg("dst").noconvert(), py::arg("src").noconvert(),
          py::arg("row_ids").noconvert(), py::arg("row_bytes"), py::arg("threads") = 1,
          py::arg("isa") = "auto",
          "dst[i] = src[row_ids[i]] for uint8 matrices with rows of row_bytes bytes.\n\n"
          "Runs on `threads` threads without the interpreter's lock. isa: 'auto' or a forced\n"
          "'avx512', 'avx2', 'scalar'. Raises ValueError on mismatched arrays or an instruction set\n"
          "that this CPU lacks, IndexError on an id outside src.");
    m.def(
        "select", &BindSelect, py::arg("codes").noconvert(), py::arg("row_scales").noconvert(),
        py::arg("mean_codes").noconvert(), py::arg("page_scales").noconvert(), py::arg("signs").noconvert(),
        py::arg("bits"), py::arg("page_ids").noconvert(), py::arg("first"), py::arg("last"),
        py::arg("queries"), py::arg("lse").noconvert(), py::arg("scale"), py::arg("out").noconvert(),
        py::arg("threads") = 1, py::arg("isa") = "auto", py::arg("claims") = nullptr,
        "out[l, h] = the k best positions of [first, last), ascending, for int32 out [L, H, k].\n\n"
        "Arrays as KeyIndex and Selector.select have them; queries float32, or uint16 for bfloat16.\n"
        "isa: 'auto' or one of scan_isas(). claims: Claims over L * H tasks that somebody else takes from,\n"
        "too; None does all.");
    // module_local: another build of the extension may live in the same process (tests).
    py::class_<Claims>(m, "Claims", py::module_local(),
                       "The tasks 0 .. count - 1 of a selection, taken from both ends. Thread-safe.")
        .def(py::init([](int64_t count) {
                 Require(0 <= count && count <= INT32_MAX, "count must be 0 to 2 ** 31 - 1");
                 return std::make_unique<Claims>(count);
             }),
             py::arg("count"))
        .def("front", &Claims::Front, "The first task that is left, now the caller's; -1 for none.")
        .def("back", &Claims::Back, py::arg("count"), py::arg("leave"),
             "The first of the last `count` tasks, now the caller's; -1 unless `leave` more are left.");
    py::class_<BoundDeviceShare>(
        m, "DeviceShare", py::module_local(),
        "Scores layers of a selection on a CUDA device: memory, streams, events and graphs as addresses, in\n"
        "the order of csrc/device_share.h; herald/select/device_scan.py makes and owns all of them.")
        .def(py::init<const BoundDeviceShare::Addresses&, const BoundDeviceShare::Addresses&,
                      const std::vector<int64_t>&, const std::vector<BoundDeviceShare::Addresses>&,
                      const std::vector<BoundDeviceShare::Addresses>&, const BoundDeviceShare::Addresses&,
                      const BoundDeviceShare::Addresses&, Array<int64_t>, Array<int64_t>>(),
             py::arg("calls"), py::arg("queues"), py::arg("sizes"), py::arg("layers"), py::arg("pieces"),
             py::arg("graphs"), py::arg("held"), py::arg("versions").noconvert(),
             py::arg("held_versions").noconvert(),
             "queues: context, copy and scan stream. sizes: piece_pages, capacity, width, register_bytes,\n"
             "pieces_ahead, first layer held. held: codes, row_scales, mean_codes, page_scales,\n"
             "host_table, table.")
        .def(
            "run", &BoundDeviceShare::Run, py::arg("codes").noconvert(), py::arg("row_scales").noconvert(),
            py::arg("mean_codes").noconvert(), py::arg("page_scales").noconvert(),
            py::arg("signs").noconvert(), py::arg("bits"), py::arg("page_ids").noconvert(), py::arg("first"),
            py::arg("last"), py::arg("queries"), py::arg("lse").noconvert(), py::arg("scale"),
            py::arg("out").noconvert(), py::arg("isa"), py::arg("claims"), py::arg("leave"),
            "Takes layers from the back of claims, while more than `leave` tasks are left, and writes their\n"
            "rows into out as select does. Returns how many. One thread at a time. RuntimeError: the\n"
            "driver's error.");
    m.def(
        "query_width",
        [](int64_t positions, int64_t group) { return (positions * group + kLanes - 1) / kLanes * kLanes; },
        py::arg("positions"), py::arg("group"), "Query rows of a KV head, rounded up to whole vectors.");
    m.def("scan_isas", &ScanIsaReasons,
          "Instruction sets of select, best first, each with the reason why this CPU cannot run it, or ''.");
    m.def(
        "scan_isa", [](const std::string& name) { return std::string(FindScanIsa(name).name); },
        py::arg("isa") = "auto", "The instruction set that select uses for a name. Raises ValueError.");
    m.def("encode", &BindEncode, py::arg("rows"), py::arg("half"), py::arg("codes").noconvert(),
          py::arg("row_scales").noconvert(), py::arg("mean_codes").noconvert(),
          py::arg("page_scales").noconvert(), py::arg("signs").noconvert(), py::arg("bits"),
          py::arg("page_ids").noconvert(), py::arg("first"), py::arg("last"), py::arg("layer_begin"),
          py::arg("layer_end"), py::arg("threads") = 1, py::arg("isa") = "auto",
          "Writes codes, scales and means of positions first .. last, as key_codes.encode_span.\n\n"
          "rows float32 or uint16; half tells float16 from bfloat16.");
    m.def("plan_update", &BindPlanUpdate, py::arg("slot_positions").noconvert(), py::arg("length"),
          py::arg("selected").noconvert(), py::arg("first"), py::arg("last"), py::arg("upto"),
          py::arg("page_ids").noconvert(), py::arg("own_rows"), py::arg("move_all"), py::arg("capacity"),
          py::arg("row_start"), py::arg("num_pages"), py::arg("page_size"), py::arg("threads") = 1,
          "(src, staging, slot, counts, free_rows, positions): see herald/select/update.py.");
    m.def("cpu_features", &CpuFeatures, "Vector instruction sets of this CPU that matter here.");
    m.def("active_isa", &PackingIsa, "Instruction set that pack_rows uses when none is forced.");
}
