// A GEMM in one thread, whose factors and result are in a core's cache.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/cpu/gemm/panel_product.cc"
#include <hwy/foreach_target.h>
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <cstring>
#include <functional>

#include "onepass/kernel/common/cursor.cpu.h"
#include "src/cpu/gemm/bf16_product.h"
#include "src/cpu/gemm/panel_product.h"
#include "src/cpu/simd.h"

ONEPASS_BEGIN

// A tile of the result has two vectors a row, and as many rows as there are registers for.
constexpr int kTileRows = HWY_TARGET <= HWY_AVX3 && HWY_ARCH_X86 ? 12 : 6;
// K is summed in parts of kTerms, which keeps the error of long sums small.
constexpr int64 kTerms = 256;
template <class T>
inline constexpr int kTileColumns = 2 * lanes<vec<T>>();

// Sixteen bytes, whatever the target.
template <class T>
inline constexpr int kPiece = 16 / static_cast<int>(sizeof(T));
typedef float floats4 __attribute__((vector_size(16)));
typedef double doubles2 __attribute__((vector_size(16)));

// Transposes a square of 16 bytes a row.
inline void transpose_square(const float* from, int64 stride, float* to, int64 to_stride) {
  floats4 row[4];
  for (int i = 0; i < 4; ++i) std::memcpy(&row[i], from + i * stride, 16);
  const floats4 a = __builtin_shufflevector(row[0], row[1], 0, 4, 1, 5),
                b = __builtin_shufflevector(row[2], row[3], 0, 4, 1, 5),
                c = __builtin_shufflevector(row[0], row[1], 2, 6, 3, 7),
                d = __builtin_shufflevector(row[2], row[3], 2, 6, 3, 7);
  const floats4 column[4] = {__builtin_shufflevector(a, b, 0, 1, 4, 5), __builtin_shufflevector(a, b, 2, 3, 6, 7),
                             __builtin_shufflevector(c, d, 0, 1, 4, 5), __builtin_shufflevector(c, d, 2, 3, 6, 7)};
  for (int i = 0; i < 4; ++i) std::memcpy(to + i * to_stride, &column[i], 16);
}
inline void transpose_square(const double* from, int64 stride, double* to, int64 to_stride) {
  doubles2 row[2];
  for (int i = 0; i < 2; ++i) std::memcpy(&row[i], from + i * stride, 16);
  const doubles2 column[2] = {__builtin_shufflevector(row[0], row[1], 0, 2),
                              __builtin_shufflevector(row[0], row[1], 1, 3)};
  for (int i = 0; i < 2; ++i) std::memcpy(to + i * to_stride, &column[i], 16);
}

// Packs a tile of a matrix whose rows are columns in memory: as much of K at a time as stays in L1.
template <class T>
void pack_transposed(const T* from, int64 column_stride, int64 rows, T* to) {
  for (int64 k = 0; k < rows; k += kTerms) {
    const int64 end = rows - k < kTerms ? rows : k + kTerms, whole = end / kPiece<T> * kPiece<T>;
    for (int c = 0; c < kTileColumns<T>; c += kPiece<T>) {
      const T* columns = from + c * column_stride;
      for (int64 r = k; r < whole; r += kPiece<T>) {
        // The hardware prefetcher does not follow short reads of many columns.
        if ((r - k) % (64 / static_cast<int64>(sizeof(T))) == 0)
          for (int i = 0; i < kPiece<T>; ++i) hwy::Prefetch(columns + (kPiece<T> + i) * column_stride + r);
        transpose_square(columns + r, column_stride, to + r * kTileColumns<T> + c, kTileColumns<T>);
      }
      for (int64 r = whole; r < end; ++r)
        for (int i = 0; i < kPiece<T>; ++i) to[r * kTileColumns<T> + c + i] = columns[i * column_stride + r];
    }
  }
}

// Packs tiles [begin, end) of the right factor's columns, each row by row. Zeros fill up the last tile.
template <class T>
void pack_tiles(const cpu::matrix& b, T* to, int64 begin, int64 end) {
  constexpr int64 kTile = kTileColumns<T>;
  const auto tile_of = [&](int64 c) { return to + c * b.rows; };
  const auto element = [&](int64 r, int64 c) { return reinterpret_cast<const T*>(cpu::address(b, r, c)); };
  const int64 whole = end * kTile <= b.columns ? end * kTile : b.columns / kTile * kTile;
  int64 c = begin * kTile;
  if (b.row_stride == 1 && kTile % kPiece<T> == 0) {
    for (; c < whole; c += kTile) pack_transposed(element(0, c), b.column_stride, b.rows, tile_of(c));
  } else if (b.column_stride == 1) {  // read as it lies
    for (int64 r = 0; r < b.rows; ++r)
      for (int64 i = c; i < whole; i += kTile) std::memcpy(tile_of(i) + r * kTile, element(r, i), kTile * sizeof(T));
    c = c < whole ? whole : c;
  }
  for (; c < end * kTile; c += kTile) {
    for (int64 r = 0; r < b.rows; ++r)
      for (int64 i = 0; i < kTile; ++i) tile_of(c)[r * kTile + i] = c + i < b.columns ? *element(r, c + i) : T(0);
  }
}

// A tile of the result and its factors.
template <class T>
struct tile_work {
  const T* a;
  int64 row_stride, term_stride, terms;
  const T* b;
  int64 b_stride;
  T* result;
  int64 stride;
  int columns;
  bool add;
};

template <int Rows, class T>
ONEPASS_FUNCTION void tile(const tile_work<T>& w) {
  using L = vec<T>;
  constexpr int kLanes = lanes<L>(), kThird = (Rows + 2) / 3;
  L sums[Rows][2];
  each_index<Rows>([&](int i) ONEPASS_LAMBDA { sums[i][0] = sums[i][1] = L(T(0)); });
  // Every third row has a pointer.
  const T* third[kThird];
  each_index<kThird>([&](int i) ONEPASS_LAMBDA { third[i] = w.a + 3 * i * w.row_stride; });
  const T* b = w.b;
  for (int64 k = 0; k < w.terms; ++k) {
    const L b0(hn::LoadU(hn::ScalableTag<T>(), b)), b1(hn::LoadU(hn::ScalableTag<T>(), b + kLanes));
    each_index<Rows>([&](int i) ONEPASS_LAMBDA {
      const L x(third[i / 3][i % 3 * w.row_stride]);
      sums[i][0] = fma(x, b0, sums[i][0]);
      sums[i][1] = fma(x, b1, sums[i][1]);
    });
    each_index<kThird>([&](int i) ONEPASS_LAMBDA { third[i] += w.term_stride; });
    b += w.b_stride;
  }
  const hn::ScalableTag<T> d;
  const int low = w.columns < kLanes ? w.columns : kLanes, high = w.columns - low;
  each_index<Rows>([&](int i) ONEPASS_LAMBDA {
    T* row = w.result + i * w.stride;
    if (HWY_LIKELY(high == kLanes)) {
      if (w.add)
        sums[i][0] = L(hn::LoadU(d, row)) + sums[i][0], sums[i][1] = L(hn::LoadU(d, row + kLanes)) + sums[i][1];
      hn::StoreU(sums[i][0].raw, d, row);
      hn::StoreU(sums[i][1].raw, d, row + kLanes);
    } else {
      store_first(w.add ? load_first<L>(row, low) + sums[i][0] : sums[i][0], row, low);
      if (high > 0)
        store_first(w.add ? load_first<L>(row + kLanes, high) + sums[i][1] : sums[i][1], row + kLanes, high);
    }
  });
}

// A tile of columns by kTerms of K of the right factor stays in L1 while it is multiplied with all rows.
template <class T>
void multiply_tiles(const cpu::matrix& result, const cpu::matrix& a, const cpu::factor_tiles& b, bool add) {
  for (int64 c = 0; c < result.columns; c += kTileColumns<T>) {
    const int columns = static_cast<int>(result.columns - c < kTileColumns<T> ? result.columns - c : kTileColumns<T>);
    for (int64 k = 0; k == 0 || k < a.columns; k += kTerms) {
      const auto from = [&](int64 row) {
        return tile_work<T>{static_cast<const T*>(a.data) + row * a.row_stride + k * a.column_stride,
                            a.row_stride,
                            a.column_stride,
                            a.columns - k < kTerms ? a.columns - k : kTerms,
                            static_cast<const T*>(b.data) + c / kTileColumns<T> * b.tile_stride + k * b.row_stride,
                            b.row_stride,
                            static_cast<T*>(result.data) + row * result.row_stride + c,
                            result.row_stride,
                            columns,
                            add || k > 0};
      };
      int64 row = 0;
      for (; row + kTileRows <= result.rows; row += kTileRows) tile<kTileRows>(from(row));
      for (; row + 4 <= result.rows; row += 4) tile<4>(from(row));
      for (; row < result.rows; ++row) tile<1>(from(row));
    }
  }
}

int64 tile_columns_of(dtype type) { return type == dtype::f64 ? kTileColumns<double> : kTileColumns<float>; }
void pack_factor(const cpu::matrix& b, void* to, int64 begin, int64 end) {
  if (b.type == dtype::f64) pack_tiles(b, static_cast<double*>(to), begin, end);
  else pack_tiles(b, static_cast<float*>(to), begin, end);
}
void panel_product(const cpu::matrix& result, const cpu::matrix& a, const cpu::factor_tiles& b, bool add) {
  if (result.type == dtype::f64) multiply_tiles<double>(result, a, b, add);
  else multiply_tiles<float>(result, a, b, add);
}

ONEPASS_END

#if HWY_ONCE
namespace onepass {
HWY_EXPORT(tile_columns_of);
HWY_EXPORT(pack_factor);
HWY_EXPORT(panel_product);
namespace cpu {

bool has_panel_product(dtype type) {
#if HWY_ARCH_X86
  static const bool has_pairs =
      kHasBf16Product && __builtin_cpu_supports("avx512bf16") && !__builtin_cpu_supports("amx-bf16");
#else
  constexpr bool has_pairs = false;
#endif
  return type == dtype::f32 || type == dtype::f64 || (type == dtype::bf16 && has_pairs);
}

void round_to_bf16(const matrix& floats, const matrix& result) { round_rows_to_bf16(floats, result); }

void right_factor::take(const matrix& b) {
  take_tiles(b, 0, make_room(b, [this](int64 bytes) { return own_.at_least(bytes); }));
}

int64 right_factor::make_room(const matrix& b, const std::function<void*(int64)>& room) {
  [[maybe_unused]] static const bool checked = (require_simd(), true);
  constexpr int64 kFarthest = 1024;  // bytes: rows farther apart share a few sets of the cache
  const bool pairs = b.type == dtype::bf16;
  const int64 tile = pairs ? kBf16TileColumns : HWY_DYNAMIC_DISPATCH(tile_columns_of)(b.type);
  const int64 rows = pairs ? (b.rows + 1) / 2 : b.rows, element_bytes = pairs ? 4 : size_of(b.type);
  if (!pairs && b.column_stride == 1 && b.columns % tile == 0 && b.row_stride * element_bytes <= kFarthest) {
    tiles_ = {b.data, tile, b.row_stride};
    return 0;
  }
  const int64 tiles = (b.columns + tile - 1) / tile;
  packed_ = room(tiles * rows * tile * element_bytes);
  tiles_ = {packed_, rows * tile, tile};
  return tiles;
}

void right_factor::take_tiles(const matrix& b, int64 begin, int64 end) {
  if (b.type == dtype::bf16) pack_bf16_factor(b, packed_, begin, end);
  else HWY_DYNAMIC_DISPATCH(pack_factor)(b, packed_, begin, end);
}

void right_factor::multiply(const matrix& result, const matrix& a, bool add) {
  if (a.type == dtype::bf16) bf16_product(result, a, tiles_, left_.at_least(bf16_left_bytes(a)), add);
  else HWY_DYNAMIC_DISPATCH(panel_product)(result, a, tiles_, add);
}

}  // namespace cpu
}  // namespace onepass
#endif
