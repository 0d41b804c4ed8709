// A way to share a call's rows, or its tiles, out to threads: as the table of tuning has it, or as `onepass tune`
// found.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "src/cuda/row/tuning.h"

namespace onepass::cuda {

// Whole rows held on chip, whole rows of which only numbers stay, rows in parts behind which come tiles, or tiles
// alone.
enum class way_kind : int { rows, streamed, parts, tiles };

struct way {
  way_kind kind{};
  row_tuning row{.numbers = 0, .stages = 0};
  streamed_tuning stream{};
  elementwise_tuning tile{};  // of parts: without threads the table's
};

// As "rows numbers=32 block=128 threads=512 ...": all that is not zero.
std::string text_of(const way&);
// None where it says something else, or numbers that no kernel has.
std::optional<way> way_of(std::string_view text);

}  // namespace onepass::cuda
