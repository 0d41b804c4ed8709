// A GEMM in one thread, whose factors and result are in a core's cache. It saves the packing of both factors and the
// pass over the result of a library's call.
#pragma once

#include <functional>

#include "src/cpu/aligned_memory.h"
#include "src/cpu/gemm/matrix.h"

namespace onepass::cpu {

// Whether `right_factor` takes matrices of this type: float32 and float64, and bfloat16 where the processor has
// AVX512_BF16 but not AMX, with which the library is faster.
bool has_panel_product(dtype);

// A right factor in tiles of columns. Strides count elements (bfloat16: pairs of elements).
struct factor_tiles {
  const void* data;
  int64 tile_stride, row_stride;
};

// Rounds float32. For processors with has_panel_product(bf16).
void round_to_bf16(const matrix& floats, const matrix& result);

// The right factor of a GEMM, packed; or the matrix itself where it can be read as it is: then it must outlive this.
class right_factor {
 public:
  void take(const matrix&);
  // The same by several threads. make_room returns the number of tiles to pack, 0 where the matrix is read as it is;
  // take_tiles packs some of them.
  int64 make_room(const matrix&, const std::function<void*(int64 bytes)>& room);
  void take_tiles(const matrix&, int64 begin, int64 end);
  // result = a b, or result += a b, with the first columns of b where the result has fewer. a has b's type, and so has
  // the result, or it is float32 where b is bfloat16. The result's rows are contiguous; a's rows or columns are. Where
  // a's rows are, several threads may call it at once.
  void multiply(const matrix& result, const matrix& a, bool add);

 private:
  aligned_memory own_, left_;
  void* packed_ = nullptr;
  factor_tiles tiles_{};
};

}  // namespace onepass::cpu
