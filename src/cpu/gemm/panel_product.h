// Matrix products whose factors and result lie in a core's cache, in one thread: without the copies of both factors and
// the pass over the result that a library's call makes for each.
#pragma once

#include <functional>

#include "src/cpu/aligned_memory.h"
#include "src/cpu/gemm/matrix.h"

namespace onepass::cpu {

// Whether `right_factor` takes matrices of this type: float32 and float64; bfloat16 where the processor multiplies
// pairs of its numbers, but not where it has AMX, with which the library is faster.
bool has_panel_product(dtype);

// A right factor: so many numbers (bfloat16: pairs of them) from one tile of columns and from one row to the next.
struct factor_tiles {
  const void* data;
  int64 tile_stride, row_stride;
};

// Of float32, where bfloat16 has products here.
void round_to_bf16(const matrix& floats, const matrix& result);

// The right factor of a product, in the order in which it is read: a copy, or the matrix itself, which must stay.
class right_factor {
 public:
  void take(const matrix&);
  // The same in parts, by several threads: how many tiles of columns there are to take, into this room, none where it
  // is the matrix itself; then some of them.
  int64 make_room(const matrix&, const std::function<void*(int64 bytes)>& room);
  void take_tiles(const matrix&, int64 begin, int64 end);
  // result = a b, or is added to, with as many rows of b as a has columns, and as many of its columns as the result:
  // all, or the first. Of b's type, or float32 where that is bfloat16. The result's rows are contiguous, those of a or
  // its columns. Several threads may do it at once where they are a's rows.
  void multiply(const matrix& result, const matrix& a, bool add);

 private:
  aligned_memory own_, left_;
  void* packed_ = nullptr;
  factor_tiles tiles_{};
};

}  // namespace onepass::cpu
