#include "update.h"

#include <algorithm>
#include <stdexcept>

#include "scan.h"
#include "threads.h"

namespace herald {
namespace {

// State of a position while a (layer, head) is planned; a resident one has slot + kResident.
enum : int32_t { kAbsent = 0, kWanted = 1, kResident = 2 };

}  // namespace

UpdatePlan::UpdatePlan(const UpdateInput& input, int threads)
    : in_(input), threads_(threads), most_(input.k + input.first + input.upto - input.last) {
    static thread_local Buffer positions, slots, free;
    const int64_t heads = in_.layers * in_.heads;
    positions_ = positions.Get<int32_t>(heads * most_);
    slots_ = slots.Get<int32_t>(heads * most_);
    free_ = free.Get<int32_t>(heads * in_.own_rows);
    begins_.assign(heads + 1, 0);
    PackingPool().ForEach(threads_, heads, [&](int64_t head) { PlanHead(head); });
    for (int64_t head = 0; head < heads; ++head) begins_[head + 1] += begins_[head];
}

void UpdatePlan::PlanHead(int64_t head) {
    static thread_local std::vector<int32_t> states;  // all kAbsent between calls
    static thread_local std::vector<int32_t> leaving;
    if (static_cast<int64_t>(states.size()) < in_.upto) states.resize(in_.upto, kAbsent);
    leaving.clear();
    int32_t* state = states.data();
    const int32_t* selected = in_.selected + head * in_.k;
    int64_t before = in_.first - 1;
    for (int64_t i = 0; i < in_.k; ++i) {
        if (selected[i] <= before || selected[i] >= in_.last) {
            throw std::invalid_argument("selected positions are not ascending within [first, last)");
        }
        before = selected[i];
    }
    std::fill(state, state + in_.first, kWanted);
    std::fill(state + in_.last, state + in_.upto, kWanted);
    for (int64_t i = 0; i < in_.k; ++i) state[selected[i]] = kWanted;

    const int32_t* held = in_.slot_positions + head * in_.slots;
    for (int64_t slot = 0; slot < in_.length; ++slot) {
        const int32_t position = held[slot];
        if (position >= 0 && position < in_.upto && state[position] == kWanted) {
            state[position] = static_cast<int32_t>(slot) + kResident;
        } else {
            leaving.push_back(static_cast<int32_t>(slot));
        }
    }
    int64_t handed_out = 0;
    const auto next_slot = [&] {
        const int64_t gone = static_cast<int64_t>(leaving.size()), i = handed_out++;
        return i < gone ? leaving[i] : static_cast<int32_t>(in_.length + i - gone);
    };
    int32_t* positions = positions_ + head * most_;
    int32_t* slots = slots_ + head * most_;
    int64_t count = 0;
    const auto visit = [&](int64_t position) {
        const int32_t found = state[position];
        state[position] = kAbsent;
        if (found == kWanted) {
            positions[count] = static_cast<int32_t>(position);
            slots[count++] = next_slot();
        } else if (in_.move_all && position < in_.last) {
            positions[count] = static_cast<int32_t>(position);
            slots[count++] = found - kResident;
        }
    };
    for (int64_t position = 0; position < in_.first; ++position) visit(position);
    for (int64_t i = 0; i < in_.k; ++i) visit(selected[i]);
    for (int64_t position = in_.last; position < in_.upto; ++position) visit(position);
    begins_[head + 1] = count;
    for (int64_t i = 0; i < in_.own_rows; ++i) free_[head * in_.own_rows + i] = next_slot();
}

void UpdatePlan::Write(int64_t* src, int64_t* staging, int64_t* slot, int32_t* counts, int64_t* free,
                       int32_t* positions) const {
    PackingPool().ForEach(threads_, in_.layers * in_.heads, [&](int64_t head) {
        const int64_t begin = begins_[head], count = begins_[head + 1] - begin;
        const int64_t base = head * in_.capacity + in_.row_start;
        const int64_t layer = head / in_.heads, kv_head = head % in_.heads;
        const int32_t* where = positions_ + head * most_;
        const int32_t* to = slots_ + head * most_;
        int32_t* after = positions + head * in_.slots;
        std::copy_n(in_.slot_positions + head * in_.slots, in_.slots, after);
        for (int64_t i = 0; i < count; ++i) {
            const int32_t block = where[i] / static_cast<int32_t>(in_.page_size);
            const int64_t page = layer * in_.num_pages + in_.page_ids[block];
            src[begin + i] = (page * in_.heads + kv_head) * in_.page_size + where[i] - block * in_.page_size;
            staging[begin + i] = base + in_.slots + i;
            slot[begin + i] = base + to[i];
            after[to[i]] = where[i];
        }
        counts[head] = static_cast<int32_t>(count);
        for (int64_t i = 0; i < in_.own_rows; ++i) {
            const int32_t own = free_[head * in_.own_rows + i];
            free[head * in_.own_rows + i] = base + own;
            after[own] = static_cast<int32_t>(in_.upto + i);
        }
    });
}

}  // namespace herald
