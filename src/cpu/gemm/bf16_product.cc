// The GEMM of bfloat16 matrices by AVX512_BF16's instruction, which adds the products of pairs of elements to a
// float32.
#include "src/cpu/gemm/bf16_product.h"

#ifdef __AVX512BF16__  // an option of this file alone

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

namespace onepass::cpu {
namespace {

constexpr int kTileRows = 12, kTileColumns = kBf16TileColumns;  // two registers of float sums a row

// Two elements that are neighbours along K.
using pair = std::uint32_t;

[[gnu::always_inline]] inline std::uint16_t element(const char* from) {
  std::uint16_t bits;
  std::memcpy(&bits, from, sizeof bits);
  return bits;
}
[[gnu::always_inline]] inline pair both(const char* from) {
  pair bits;
  std::memcpy(&bits, from, sizeof bits);
  return bits;
}
__mmask16 first(int64 count) {
  return static_cast<__mmask16>(count >= 16 ? 0xffff : count <= 0 ? 0 : (1 << count) - 1);
}

// Packs 32 columns of two rows (the second is zeros behind the last row) as pairs. Columns are contiguous; zeros fill
// those behind the last.
[[gnu::always_inline]] inline void interleave(const matrix& m, int64 row, int64 column, pair* to) {
  const int64 left = m.columns - column;
  const auto present = static_cast<__mmask32>(left >= 32 ? ~0U : (1U << left) - 1);
  alignas(64) static constexpr std::uint16_t kLow[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                         8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_load_si512(kLow), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  const __m512i one = _mm512_maskz_loadu_epi16(present, address(m, row, column));
  const __m512i two =
      row + 1 < m.rows ? _mm512_maskz_loadu_epi16(present, address(m, row + 1, column)) : _mm512_setzero_si512();
  _mm512_store_si512(to, _mm512_permutex2var_epi16(one, low, two));
  _mm512_store_si512(to + 16, _mm512_permutex2var_epi16(one, high, two));
}

template <int N, class Body>
[[gnu::always_inline]] inline void each(const Body& body) {
  [&]<int... I>(std::integer_sequence<int, I...>) { (body(std::integral_constant<int, I>()), ...); }
  (std::make_integer_sequence<int, N>());
}

// Transposes 16 x 16 pairs.
[[gnu::always_inline]] inline void transpose(__m512i (&rows)[16]) {
  __m512i of[16];
  each<8>([&](auto i) {  // pairs of rows, then fours, then their quarters
    of[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
    of[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
  });
  each<4>([&](auto i) {
    rows[4 * i] = _mm512_unpacklo_epi64(of[4 * i], of[4 * i + 2]);
    rows[4 * i + 1] = _mm512_unpackhi_epi64(of[4 * i], of[4 * i + 2]);
    rows[4 * i + 2] = _mm512_unpacklo_epi64(of[4 * i + 1], of[4 * i + 3]);
    rows[4 * i + 3] = _mm512_unpackhi_epi64(of[4 * i + 1], of[4 * i + 3]);
  });
  each<4>([&](auto i) {
    of[i] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
    of[i + 4] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
    of[i + 8] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
    of[i + 12] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xdd);
  });
  each<4>([&](auto i) {
    rows[i] = _mm512_shuffle_i32x4(of[i], of[i + 8], 0x88);
    rows[i + 4] = _mm512_shuffle_i32x4(of[i + 4], of[i + 12], 0x88);
    rows[i + 8] = _mm512_shuffle_i32x4(of[i], of[i + 8], 0xdd);
    rows[i + 12] = _mm512_shuffle_i32x4(of[i + 4], of[i + 12], 0xdd);
  });
}

// Packs 16 pairs of rows of 16 columns, whose rows are contiguous. Zeros fill what is behind the last.
void transpose_pairs(const matrix& m, int64 row, int64 column, pair* to) {
  const int64 left = m.rows - row, count = std::min<int64>(m.columns - column, 16);
  const auto present = static_cast<__mmask32>(left >= 32 ? ~0U : (1U << left) - 1);
  __m512i columns[16];
  each<16>([&](auto i) {
    columns[i] = i < count ? _mm512_maskz_loadu_epi16(present, address(m, row, column + i)) : _mm512_setzero_si512();
    _mm_prefetch(address(m, row, column + 16 + i), _MM_HINT_T0);
  });
  transpose(columns);
  each<16>([&](auto i) {
    if (2 * i < left) _mm512_store_si512(to + i * kTileColumns, columns[i]);
  });
}

[[gnu::always_inline]] inline __m512 load(const char* from, __mmask16 present, bool is_float) {
  if (is_float) return _mm512_maskz_loadu_ps(present, from);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(present, from)), 16));
}

[[gnu::always_inline]] inline void store(char* to, __mmask16 present, __m512 value, bool is_float) {
  if (is_float) return _mm512_mask_storeu_ps(to, present, value);
  const auto rounded = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(value));
  if (present == 0xffff) _mm256_storeu_epi16(to, rounded);  // AMD's processors take many times as long with a mask
  else _mm256_mask_storeu_epi16(to, present, rounded);
}

// The left factor as pairs along K, with the bytes from row to row and from pair to pair. odd: K is odd, and one
// element of a row is left behind its last pair.
struct left_pairs {
  const char* data;
  int64 row_bytes, pair_bytes, pairs;
  bool odd;
};

template <int Rows>
[[gnu::flatten]] void tile(const left_pairs& a, const pair* b, const matrix& result, int64 row, int64 column,
                           bool add) {
  constexpr int kThird = (Rows + 2) / 3;
  const __mmask16 low = first(result.columns - column), high = first(result.columns - column - 16);
  __m512 sums[Rows][2];
  const bool is_float = result.type == dtype::f32;
  const int64 row_bytes = result.row_stride * size_of(result.type), half = 16 * size_of(result.type);
  char* to = address(result, row, column);
  each<Rows>([&](auto i) {
    const char* from = to + i * row_bytes;
    sums[i][0] = add ? load(from, low, is_float) : _mm512_setzero_ps();
    sums[i][1] = add ? load(from + half, high, is_float) : _mm512_setzero_ps();
  });
  const char* third[kThird];  // every third row has a pointer
  each<kThird>([&](auto i) { third[i] = a.data + (row + 3 * i) * a.row_bytes; });
  const auto step = [&](const auto& read) {
    const __m512bh b0 = reinterpret_cast<__m512bh>(_mm512_load_si512(b)),
                   b1 = reinterpret_cast<__m512bh>(_mm512_load_si512(b + 16));
    each<Rows>([&](auto i) {
      const auto x =
          reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(read(third[i / 3] + i % 3 * a.row_bytes))));
      sums[i][0] = _mm512_dpbf16_ps(sums[i][0], x, b0);
      sums[i][1] = _mm512_dpbf16_ps(sums[i][1], x, b1);
    });
    each<kThird>([&](auto i) { third[i] += a.pair_bytes; });
    b += kTileColumns;
  };
  for (int64 k = 0; k < a.pairs; ++k) step([](const char* from) { return both(from); });
  if (a.odd) step([](const char* from) { return pair{element(from)}; });
  each<Rows>([&](auto i) {
    store(to + i * row_bytes, low, sums[i][0], is_float);
    store(to + i * row_bytes + half, high, sums[i][1], is_float);
  });
}

void multiply(const matrix& result, const left_pairs& a, const factor_tiles& b, bool add) {
  const auto* packed = static_cast<const pair*>(b.data);
  const auto rows = [&]<int Rows>(std::integral_constant<int, Rows>, int64 row) {
    for (int64 c = 0; c < result.columns; c += kTileColumns)
      tile<Rows>(a, packed + c / kTileColumns * b.tile_stride, result, row, c, add);
    return row + Rows;
  };
  int64 row = 0;
  while (row + kTileRows <= result.rows) row = rows(std::integral_constant<int, kTileRows>(), row);
  while (row + 8 <= result.rows) row = rows(std::integral_constant<int, 8>(), row);
  while (row + 4 <= result.rows) row = rows(std::integral_constant<int, 4>(), row);
  while (row < result.rows) row = rows(std::integral_constant<int, 1>(), row);
}

int64 whole_pairs(int64 rows) { return (rows + 1) / 2; }

// A transposed left factor is packed kTransposedRows rows at a time, which stay in L2 while they are multiplied. The
// stride between pairs is an odd number of cache lines, which use all sets of the cache.
constexpr int64 kTransposedRows = 96, kTransposedStride = kTransposedRows + 16;

}  // namespace

extern const bool kHasBf16Product = true;

void pack_bf16_factor(const matrix& b, void* to, int64 begin, int64 end) {
  auto* packed = static_cast<pair*>(to);
  const int64 tile_pairs = whole_pairs(b.rows) * kTileColumns;
  if (b.column_stride == 1) {
    constexpr int64 kBeside = 4;  // tiles that are packed row by row together, so that long runs are read
    for (int64 first = begin; first < end; first += kBeside) {
      const int64 last = std::min(first + kBeside, end);
      for (int64 row = 0; row < b.rows; row += 2) {
        for (int64 tile = first; tile < last; ++tile) {
          _mm_prefetch(address(b, row + 32, tile * kTileColumns), _MM_HINT_T0);
          _mm_prefetch(address(b, row + 33, tile * kTileColumns), _MM_HINT_T0);
          interleave(b, row, tile * kTileColumns, packed + tile * tile_pairs + row / 2 * kTileColumns);
        }
      }
    }
    return;
  }
  for (int64 tile = begin; tile < end; ++tile) {
    for (int64 row = 0; row < b.rows; row += 32) {
      pair* at = packed + tile * tile_pairs + row / 2 * kTileColumns;
      transpose_pairs(b, row, tile * kTileColumns, at);
      transpose_pairs(b, row, tile * kTileColumns + 16, at + 16);
    }
  }
}

int64 bf16_left_bytes(const matrix& a) {
  return a.column_stride == 1 ? 0 : whole_pairs(a.columns) * kTransposedStride * int64{sizeof(pair)};
}

void bf16_product(const matrix& result, const matrix& a, const factor_tiles& b, void* room_for_left, bool add) {
  if (a.column_stride == 1)
    return multiply(result, {static_cast<const char*>(a.data), a.row_stride * 2, 4, a.columns / 2, a.columns % 2 != 0},
                    b, add);
  const matrix terms = transposed(a);
  const int64 pairs = whole_pairs(a.columns);
  auto* left = static_cast<pair*>(room_for_left);
  for (int64 first = 0; first < result.rows; first += kTransposedRows) {
    matrix part = result;
    part.data = address(result, first, 0), part.rows = std::min(kTransposedRows, result.rows - first);
    for (int64 k = 0; k < pairs; ++k) {
      for (int64 c = 0; c < part.rows; c += kTileColumns)
        interleave(terms, 2 * k, first + c, left + k * kTransposedStride + c);
    }
    multiply(part, {reinterpret_cast<const char*>(left), 4, kTransposedStride * 4, pairs, false}, b, add);
  }
}

void round_rows_to_bf16(const matrix& floats, const matrix& result) {
  for (int64 r = 0; r < result.rows; ++r) {
    for (int64 c = 0; c < result.columns; c += 16) {
      const __mmask16 present = first(result.columns - c);
      store(address(result, r, c), present, load(address(floats, r, c), present, true), false);
    }
  }
}

}  // namespace onepass::cpu

#else

namespace onepass::cpu {

extern const bool kHasBf16Product = false;
void pack_bf16_factor(const matrix&, void*, int64, int64) {}
int64 bf16_left_bytes(const matrix&) { return 0; }
void bf16_product(const matrix&, const matrix&, const factor_tiles&, void*, bool) {}
void round_rows_to_bf16(const matrix&, const matrix&) {}

}  // namespace onepass::cpu

#endif
