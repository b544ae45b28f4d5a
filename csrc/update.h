// What a new selection changes in a request's resident set, as herald/select/update.py has it.

#pragma once

#include <cstdint>
#include <vector>

namespace herald {

struct UpdateInput {
    const int32_t* slot_positions;  // [layers, heads, slots]
    const int32_t* selected;        // [layers, heads, k], ascending
    const int32_t* page_ids;        // of the request, in order of position
    int64_t layers, heads, slots, k;
    int64_t length;             // slots in use
    int64_t first, last, upto;  // the target is [0, first), the selected, [last, upto)
    int64_t own_rows;
    bool move_all;
    int64_t capacity, row_start;   // of the arena
    int64_t num_pages, page_size;  // of the pool
};

// Plans every (layer, head) when made; then Write fills arrays of the sizes that are known by then. One at a
// time on a thread.
class UpdatePlan {
  public:
    // std::invalid_argument if a row of `selected` is not ascending within [first, last).
    UpdatePlan(const UpdateInput& input, int threads);

    int64_t arrivals() const { return begins_.back(); }

    // src, staging, slot: [arrivals()]. counts [layers, heads]. free [layers, heads, own_rows].
    // positions [layers, heads, slots], the slots once arrivals and own rows are in.
    void Write(int64_t* src, int64_t* staging, int64_t* slot, int32_t* counts, int64_t* free,
               int32_t* positions) const;

  private:
    void PlanHead(int64_t head);

    const UpdateInput in_;
    const int threads_;
    const int64_t most_;           // rows of the target in a (layer, head)
    std::vector<int64_t> begins_;  // [layers * heads + 1], first row of each in the flat arrays
    // Memory of the calling thread, which a later plan of the same thread reuses.
    int32_t* positions_;  // [layers * heads, most], those that travel
    int32_t* slots_;      // [layers * heads, most], their slots
    int32_t* free_;       // [layers * heads, own_rows]
};

}  // namespace herald
