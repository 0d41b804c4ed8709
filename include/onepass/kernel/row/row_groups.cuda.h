// A block's rows on CUDA where the gradients of some operands have a row for each group of rows (row_groups): it takes
// groups one after the other, or shares one with other blocks.
#pragma once

#include "onepass/kernel/common/batch.cuda.h"
#include "onepass/kernel/common/cursor.cuda.h"

ONEPASS_BEGIN

template <class Config>
inline constexpr bool kGrouped = Config::kGroupedOperand != 0;
// A block has all rows of its groups.
template <class Config>
inline constexpr bool kWholeGroups = Config::kGroupsABlock > 0;
// Its rows are of one group.
template <class Config>
inline constexpr bool kOneGroup = Config::kGroupsABlock < 2;

// Kernels without groups have arguments without them.
template <class Config, class Arguments>
ONEPASS_FUNCTION const row_groups& groups_of(const Arguments& a) {
  return a.groups;
}

// A block's rows of one group, in steps of kTile. What takes a division is done once.
template <class Config, int kTile>
class rows_of_group {
 public:
  using index = typename Config::index;

  ONEPASS_FUNCTION rows_of_group(const row_groups& groups, index rows, index own, index g)
      : groups_(groups), rows_(rows), own_(own), first_(first_row(groups, g)) {}

  // Of a step's rows number `i`; one that the last step has too many is a.rows, which is none.
  ONEPASS_FUNCTION index row(unsigned step, int i) const {
    const index number = (static_cast<index>(step) * static_cast<index>(groups_.blocks) + own_) * kTile + i;
    if (number >= static_cast<index>(groups_.rows)) return rows_;
    if constexpr (!Config::kApart) return first_ + number;
    const auto inner = static_cast<index>(groups_.inner), outer = inner == 1 ? number : number / inner;
    return first_ + outer * static_cast<index>(groups_.kept) * inner + number - outer * inner;
  }

 private:
  static ONEPASS_FUNCTION index first_row(const row_groups& groups, index g) {
    if constexpr (!Config::kApart) return g * static_cast<index>(groups.rows);
    const auto kept = static_cast<index>(groups.kept), inner = static_cast<index>(groups.inner), outer = g / kept;
    return (outer * static_cast<index>(groups.outer) * kept + g - outer * kept) * inner;
  }

  const row_groups& groups_;
  const index rows_, own_, first_;
};

// The groups that a block takes in turn, each in so many steps.
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
        turns_(static_cast<unsigned>((groups_.count - first_ + apart_ - 1) / apart_)) {}

  ONEPASS_FUNCTION unsigned turns() const { return kOneGroup<Config> ? 1 : turns_; }
  ONEPASS_FUNCTION unsigned steps_a_group() const { return steps_a_group_; }
  ONEPASS_FUNCTION index group_of_turn(unsigned turn) const { return first_ + static_cast<index>(turn) * apart_; }
  ONEPASS_FUNCTION rows_of_group<Config, kTile> rows_of_turn(unsigned turn) const {
    return {groups_, rows_, own_, group_of_turn(turn)};
  }

  // Of steps that are counted through all groups.
  ONEPASS_FUNCTION unsigned steps() const { return turns() * steps_a_group_; }
  ONEPASS_FUNCTION index group(unsigned step) const { return group_of_turn(turn(step)); }
  ONEPASS_FUNCTION bool ends_group(unsigned step) const {
    return step - turn(step) * steps_a_group_ + 1 == steps_a_group_;
  }
  ONEPASS_FUNCTION index row(unsigned step, int i) const {
    if constexpr (kOneGroup<Config>) return rows_of_turn(0).row(step, i);  // of a step past the last there is none
    if (step >= steps()) return rows_;
    return rows_of_turn(turn(step)).row(step - turn(step) * steps_a_group_, i);
  }

 private:
  // Which of the block's groups a step is of.
  ONEPASS_FUNCTION unsigned turn(unsigned step) const {
    return kOneGroup<Config> || step < steps_a_group_ ? 0 : step / steps_a_group_;
  }

  const row_groups& groups_;
  const index rows_, own_, first_, apart_;
  const unsigned steps_a_group_, turns_;
};

ONEPASS_END
