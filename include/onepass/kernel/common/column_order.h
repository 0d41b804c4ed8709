// In which order a kernel takes the columns of a row: as they are, but in lines with `rope` of halves, which take both
// numbers of a pair one behind the other. A lane that has one then has the other, too, and no word but `rope`
// notices. `place`: in that order; `column`: in memory.
#if defined(ONEPASS_KERNEL_COMMON_COLUMN_ORDER_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ONEPASS_KERNEL_COMMON_COLUMN_ORDER_H_
#undef ONEPASS_KERNEL_COMMON_COLUMN_ORDER_H_
#else
#define ONEPASS_KERNEL_COMMON_COLUMN_ORDER_H_
#endif

#include "onepass/kernel/arguments.h"
#include "onepass/word/chain.h"

ONEPASS_BEGIN

// What is turned, and what is behind it, are each taken by halves: column `first` of a part and the one `apart` from it
// stand at two places that follow each other.
template <class Index>
struct pair_of_columns {
  Index first, apart;
};

template <class Line>
struct column_order {
  static constexpr bool kZips = Line::turns == turning::halves;

  // How many of the row's first numbers are turned.
  template <class Index>
  static ONEPASS_FUNCTION Index turned(const arguments& a) {
    if constexpr (Line::turned_parameter < 0) return static_cast<Index>(a.columns);
    else return static_cast<Index>(a.parameter[Line::turned_parameter]);
  }
  // place: an even one.
  template <class Index>
  static ONEPASS_FUNCTION pair_of_columns<Index> pair_at(const arguments& a, Index place) {
    const auto end = turned<Index>(a);
    if (Line::turned_parameter < 0 || place < end) return {place / 2, end / 2};
    return {end + (place - end) / 2, (static_cast<Index>(a.columns) - end) / 2};
  }
  template <class Index>
  static ONEPASS_FUNCTION Index column_at(const arguments& a, Index place) {
    if constexpr (!kZips) return place;
    const pair_of_columns<Index> pair = pair_at(a, place - place % 2);
    return place % 2 == 0 ? pair.first : pair.first + pair.apart;
  }
};

ONEPASS_END
#endif
