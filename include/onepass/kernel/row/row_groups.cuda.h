// A block's rows on CUDA where the gradients of some operands have a row for each group of rows (row_groups): it takes
// groups one after the other, or shares one with other blocks.
#pragma once

#include "onepass/kernel/common/batch.cuda.h"
#include "onepass/kernel/common/cursor.cuda.h"

ONEPASS_BEGIN

template <class Config>
inline constexpr bool kGrouped = Config::kGroupedOperand != 0;

// Kernels without groups have arguments without them.
template <class Config, class Arguments>
ONEPASS_FUNCTION const row_groups& groups_of(const Arguments& a) {
  return a.groups;
}

// In steps of kTile rows of one group. A row that the last step of a group has too many is a.rows, which is none.
template <class Config, int kTile>
class group_walk {
 public:
  using index = typename Config::index;

  ONEPASS_FUNCTION group_walk(const arguments& a, share_of_blocks share)
      : groups_(groups_of<Config>(a)),
        rows_(static_cast<index>(a.rows)),
        own_(share.block % static_cast<unsigned>(groups_.blocks)),
        first_(share.block / static_cast<unsigned>(groups_.blocks)),
        apart_(share.blocks / static_cast<unsigned>(groups_.blocks)),
        steps_a_group_(static_cast<unsigned>((groups_.rows + groups_.blocks * kTile - 1) / (groups_.blocks * kTile))),
        steps_(static_cast<unsigned>((groups_.count - first_ + apart_ - 1) / apart_) * steps_a_group_) {}

  ONEPASS_FUNCTION unsigned steps() const { return steps_; }
  ONEPASS_FUNCTION index group(unsigned step) const { return first_ + static_cast<index>(turn(step)) * apart_; }
  ONEPASS_FUNCTION bool ends_group(unsigned step) const {
    return step - turn(step) * steps_a_group_ + 1 == steps_a_group_;
  }
  // Of the step's rows number `i`.
  ONEPASS_FUNCTION index row(unsigned step, int i) const {
    const unsigned within = step - turn(step) * steps_a_group_;
    const index number = (static_cast<index>(within) * static_cast<index>(groups_.blocks) + own_) * kTile + i,
                g = group(step), count = static_cast<index>(groups_.rows);
    if (step >= steps_ || number >= count) return rows_;
    if constexpr (!Config::kApart) return g * count + number;
    const auto outer = static_cast<index>(groups_.outer), kept = static_cast<index>(groups_.kept),
               inner = static_cast<index>(groups_.inner);
    return ((g / kept * outer + number / inner) * kept + g % kept) * inner + number % inner;
  }

 private:
  // Which of the block's groups a step is of: where it has one, there is nothing to divide.
  ONEPASS_FUNCTION unsigned turn(unsigned step) const { return step < steps_a_group_ ? 0 : step / steps_a_group_; }

  const row_groups& groups_;
  const index rows_, own_, first_, apart_;
  const unsigned steps_a_group_, steps_;
};

ONEPASS_END
