// Matrix products whose factors and result lie in a core's cache, in one thread.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/cpu/panel_product.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <functional>

#include "onepass/skeleton/place.cpu.h"
#include "src/cpu/bf16_product.h"
#include "src/cpu/panel_product.h"

ONEPASS_BEGIN

// A tile of the result is as many rows of two lanes as there are registers for.
constexpr int kTileRows = HWY_TARGET <= HWY_AVX3 && HWY_ARCH_X86 ? 12 : 6;
// So many terms are added up apart from the others, which keeps the error of long sums small.
constexpr int64 kTerms = 128;
template <class T>
inline constexpr int kTileColumns = 2 * lanes<vec<T>>();

// The factor in tiles of columns, each with its rows one after the other; zeros fill up the last.
template <class T>
void pack_tiles(const cpu::matrix& b, T* to) {
  using L = vec<T>;
  constexpr int kLanes = lanes<L>();
  const hn::ScalableTag<T> d;
  const hn::RebindToSigned<decltype(d)> di;
  const T* from = static_cast<const T*>(b.data);
  const auto each = hn::Mul(hn::Iota(di, 0), hn::Set(di, static_cast<hn::TFromD<decltype(di)>>(b.column_stride)));
  for (int64 c = 0; c < whole_lanes<L>(b.columns); c += kLanes) {
    T* lane = to + c / kTileColumns<T> * kTileColumns<T> * b.rows + c % kTileColumns<T>;
    const T* first = from + c * b.column_stride;
    const int64 left = b.columns - c;
    const char* next = reinterpret_cast<const char*>(first + kLanes * b.column_stride);  // of a factor transposed
    for (int64 r = 0; r < b.rows; ++r, lane += kTileColumns<T>, first += b.row_stride) {
      if (left > kLanes) hwy::Prefetch(next + r * kLanes * static_cast<int64>(sizeof(T)));
      if (HWY_UNLIKELY(left < kLanes)) {
        for (int i = 0; i < kLanes; ++i) lane[i] = i < left ? first[i * b.column_stride] : T(0);
      } else if (b.column_stride == 1) {
        hn::Store(hn::LoadU(d, first), d, lane);
      } else {
        hn::Store(hn::GatherIndex(d, first, each), d, lane);
      }
    }
  }
}

// Where a tile of the result is and what it is made of.
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
  // Rows are addressed from every third one.
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

template <class T>
void multiply_tiles(const cpu::matrix& result, const cpu::matrix& a, const cpu::factor_tiles& b, bool add) {
  const auto rows = [&](auto tile_rows, int64 row, auto run) {
    for (int64 c = 0; c < result.columns; c += kTileColumns<T>) {
      const int columns = static_cast<int>(result.columns - c < kTileColumns<T> ? result.columns - c : kTileColumns<T>);
      for (int64 k = 0; k == 0 || k < a.columns; k += kTerms) {
        run({static_cast<const T*>(a.data) + row * a.row_stride + k * a.column_stride, a.row_stride, a.column_stride,
             a.columns - k < kTerms ? a.columns - k : kTerms,
             static_cast<const T*>(b.data) + c / kTileColumns<T> * b.tile_stride + k * b.row_stride, b.row_stride,
             static_cast<T*>(result.data) + row * result.row_stride + c, result.row_stride, columns, add || k > 0});
      }
    }
    return row + tile_rows;
  };
  int64 row = 0;
  while (row + kTileRows <= result.rows)
    row = rows(kTileRows, row, [](const tile_work<T>& w) ONEPASS_LAMBDA { tile<kTileRows>(w); });
  while (row + 4 <= result.rows) row = rows(4, row, [](const tile_work<T>& w) ONEPASS_LAMBDA { tile<4>(w); });
  while (row < result.rows) row = rows(1, row, [](const tile_work<T>& w) ONEPASS_LAMBDA { tile<1>(w); });
}

template <class T, class Room>
cpu::factor_tiles tiles_of(const cpu::matrix& b, const Room& room) {
  constexpr int64 kTile = kTileColumns<T>, kFarthest = 1024;  // bytes: rows farther apart share a few sets of the cache
  if (b.column_stride == 1 && b.columns % kTile == 0 && b.row_stride * static_cast<int64>(sizeof(T)) <= kFarthest)
    return {b.data, kTile, b.row_stride};
  const int64 tiles = (b.columns + kTile - 1) / kTile;
  T* packed = static_cast<T*>(room(tiles * b.rows * kTile * static_cast<int64>(sizeof(T))));
  pack_tiles(b, packed);
  return {packed, b.rows * kTile, kTile};
}

cpu::factor_tiles factor_tiles_of(const cpu::matrix& b, const std::function<void*(int64)>& room) {
  return b.type == dtype::f64 ? tiles_of<double>(b, room) : tiles_of<float>(b, room);
}
void panel_product(const cpu::matrix& result, const cpu::matrix& a, const cpu::factor_tiles& b, bool add) {
  if (result.type == dtype::f64) multiply_tiles<double>(result, a, b, add);
  else multiply_tiles<float>(result, a, b, add);
}

ONEPASS_END

#if HWY_ONCE
namespace onepass {
HWY_EXPORT(factor_tiles_of);
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
  if (b.type == dtype::bf16) {
    tiles_ = pack_bf16_factor(b, packed_.at_least(bf16_factor_bytes(b.rows, b.columns)));
    return;
  }
  tiles_ = HWY_DYNAMIC_DISPATCH(factor_tiles_of)(b, [this](int64 bytes) { return packed_.at_least(bytes); });
}

void right_factor::multiply(const matrix& result, const matrix& a, bool add) {
  if (a.type == dtype::bf16) bf16_product(result, a, tiles_, left_.at_least(bf16_left_bytes(a)), add);
  else HWY_DYNAMIC_DISPATCH(panel_product)(result, a, tiles_, add);
}

}  // namespace cpu
}  // namespace onepass
#endif
