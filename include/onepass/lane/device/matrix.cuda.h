// wgmma: GEMM instructions of a warpgroup (128 threads) on sm_90a, and the TMA copies that load their tiles.
//
// Tiles in shared memory are rows of 64 16-bit elements, 128 bytes each, whose 16-byte pieces are exchanged within
// eight rows (TMA's 128-byte swizzle), from addresses that are multiples of 1024.
// Source of the layouts: PTX ISA 8.7, "Asynchronous Warpgroup Level Matrix Instructions".
#pragma once

#include "onepass/lane/device/memory.cuda.h"
#include "onepass/lane/device/tensor_map.h"

ONEPASS_BEGIN

ONEPASS_FUNCTION void prefetch(const tensor_map& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// Loads the map's tile that begins at (row, column); its bytes arrive at `mbarrier`, in this block. Elements outside
// the matrix are 0.
ONEPASS_FUNCTION void tma_load_tile(uint32 to, const tensor_map& map, int row, int column, uint32 mbarrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
          "r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(mbarrier)
      : "memory");
}
// Likewise of a map of five dimensions, the first of which is the tile's columns.
ONEPASS_FUNCTION void tma_load_tile(uint32 to, const tensor_map& map, int c0, int c1, int c2, int c3, int c4,
                                    uint32 mbarrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, "
      "%6}], "
      "[%7];" ::"r"(to),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(mbarrier)
      : "memory");
}
// The same into several blocks of a cluster (bits), at the same address, and to the mbarrier at the same address, in
// each.
ONEPASS_FUNCTION void tma_load_tile_multicast(uint16 blocks, uint32 to, const tensor_map& map, int row, int column,
                                              uint32 mbarrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
      "{%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(mbarrier), "h"(blocks)
      : "memory");
}
// Bytes of memory, both sides and their count multiples of 16.
ONEPASS_FUNCTION void bulk_load(uint32 to, const void* from, int count, uint32 mbarrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(count), "r"(mbarrier)
               : "memory");
}
// From this block's shared memory to another's (in_block), where the mbarrier is, too. Not to its own: TMA does that as
// well, but compute-sanitizer calls it an invalid write.
ONEPASS_FUNCTION void bulk_send(uint32 to, uint32 from, int count, uint32 mbarrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "r"(from), "r"(count), "r"(mbarrier)
               : "memory");
}
// This thread's earlier accesses to the block's shared memory come before TMA copies and wgmmas that are ordered after
// it. A read needs it as well: a TMA write to a released buffer does not queue behind a read in flight, as other
// threads' writes do.
ONEPASS_FUNCTION void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Registers of each thread of the warpgroup: more, or fewer.
template <int kCount>
ONEPASS_FUNCTION void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
ONEPASS_FUNCTION void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Where a tile is, for the tensor cores: 64 rows (A), N rows (B). 16 columns further is 32 bytes further.
ONEPASS_FUNCTION uint64 tile_descriptor(uint32 address) {
  constexpr uint64 kSwizzle128 = uint64{1} << 62, kEightRows = uint64{1024 >> 4} << 32, kUnused = uint64{1} << 16;
  return kSwizzle128 | kEightRows | kUnused | static_cast<uint64>((address & 0x3ffff) >> 4);
}

// Where a tile is that is read the other way round: what it has 64 of in a row are the product's rows (A) or columns
// (B), further ones in the next tile of kRows rows; 16 of its rows further is 2048 bytes further.
template <int kRows = 64>
ONEPASS_FUNCTION uint64 transposed_tile_descriptor(uint32 address) {
  constexpr uint64 kSwizzle128 = uint64{1} << 62, kEightRows = uint64{1024 >> 4} << 32,
                   kNextTile = uint64{kRows * 128 >> 4} << 16;
  return kSwizzle128 | kEightRows | kNextTile | static_cast<uint64>((address & 0x3ffff) >> 4);
}

ONEPASS_FUNCTION void begin_wgmma() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
ONEPASS_FUNCTION void commit_wgmma() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// All but the last kPending groups are done.
template <int kPending>
ONEPASS_FUNCTION void wait_for_wgmma() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// What d was is not needed any more: the compiler need not carry it to products that do not add.
template <int N>
ONEPASS_FUNCTION void forget(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "=f"(d[i]));
}

// d (64 x N) = a (64 x 16) times the transpose of b (N x 16), added to what d was where `adds`; either may be
// transposed (see the descriptors above). Of d, a thread has rows 16 (warp of four) + lane_id / 4 and 8 more, and of
// each eight columns 2 (lane_id % 4) and the next: d[4 j] and d[4 j + 1] of the first row, d[4 j + 2] and d[4 j + 3] of
// the second.
#define ONEPASS_D8(i)                                                                                         \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define ONEPASS_D32(i) ONEPASS_D8(i), ONEPASS_D8(i + 8), ONEPASS_D8(i + 16), ONEPASS_D8(i + 24)
#define ONEPASS_HALF_R0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define ONEPASS_R0                                                                                                     \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30," \
  "%31"
#define ONEPASS_R1                                                                                               \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58," \
  "%59,%60,%61,%62,%63"
#define ONEPASS_R2                                                                                               \
  "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90," \
  "%91,%92,%93,%94,%95"
#define ONEPASS_PRODUCT(n, type, registers, a_at, b_at, adds_at, turns_a_at, turns_b_at, ...)                        \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, " adds_at ", 0; wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type \
               "." type " {" registers "}, " a_at ", " b_at ", p, 1, 1, " turns_a_at ", " turns_b_at "; }"           \
               : __VA_ARGS__                                                                                         \
               : "l"(a), "l"(b), "r"(static_cast<int>(adds)), "n"(kTransposeA), "n"(kTransposeB))
#define ONEPASS_PRODUCT_OF(type)                                                                             \
  if constexpr (N == 192)                                                                                    \
    ONEPASS_PRODUCT(192, type, ONEPASS_R0 "," ONEPASS_R1 "," ONEPASS_R2, "%96", "%97", "%98", "%99", "%100", \
                    ONEPASS_D32(0), ONEPASS_D32(32), ONEPASS_D32(64));                                       \
  else if constexpr (N == 128)                                                                               \
    ONEPASS_PRODUCT(128, type, ONEPASS_R0 "," ONEPASS_R1, "%64", "%65", "%66", "%67", "%68", ONEPASS_D32(0), \
                    ONEPASS_D32(32));                                                                        \
  else if constexpr (N == 64)                                                                                \
    ONEPASS_PRODUCT(64, type, ONEPASS_R0, "%32", "%33", "%34", "%35", "%36", ONEPASS_D32(0));                \
  else ONEPASS_PRODUCT(32, type, ONEPASS_HALF_R0, "%16", "%17", "%18", "%19", "%20", ONEPASS_D8(0), ONEPASS_D8(8))

template <dtype D, int N, int kTransposeA = 0, int kTransposeB = 0>
ONEPASS_FUNCTION void add_wgmma(float (&d)[N / 2], uint64 a, uint64 b, bool adds) {
  static_assert(N == 32 || N == 64 || N == 128 || N == 192 || N == 256);
  if constexpr (N == 256) {  // in halves: 128 results in one instruction are more than blocks of 512 threads may have
    add_wgmma<D, 128>(reinterpret_cast<float(&)[64]>(d[0]), a, b, adds);
    add_wgmma<D, 128>(reinterpret_cast<float(&)[64]>(d[64]), a, b + (128 * 128 >> 4), adds);
  } else if constexpr (D == dtype::bf16) {
    ONEPASS_PRODUCT_OF("bf16");
  } else {
    ONEPASS_PRODUCT_OF("f16");
  }
}
#undef ONEPASS_PRODUCT_OF

// Likewise with a from registers: rows as of d, of each row columns 2 (lane_id % 4) and the next in the first two,
// eight columns behind in the last two. b is transposed.
#define ONEPASS_PRODUCT_OF_REGISTERS(n, type, registers, a0_at, a1_at, a2_at, a3_at, b_at, ...)                      \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" registers "}, {" a0_at "," a1_at \
               "," a2_at "," a3_at "}, " b_at ", 1, 1, 1, 1;"                                                        \
               : __VA_ARGS__                                                                                         \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define ONEPASS_PRODUCT_OF(type)                                                                          \
  if constexpr (N == 128)                                                                                 \
    ONEPASS_PRODUCT_OF_REGISTERS(128, type, ONEPASS_R0 "," ONEPASS_R1, "%64", "%65", "%66", "%67", "%68", \
                                 ONEPASS_D32(0), ONEPASS_D32(32));                                        \
  else ONEPASS_PRODUCT_OF_REGISTERS(64, type, ONEPASS_R0, "%32", "%33", "%34", "%35", "%36", ONEPASS_D32(0))

// kNext: bytes from 64 of b's elements in a row to the next.
template <dtype D, int N, int kNext>
ONEPASS_FUNCTION void add_wgmma_of_registers(float (&d)[N / 2], const uint32 (&a)[4], uint64 b) {
  static_assert(N == 64 || N == 128 || N == 192 || N == 256);
  if constexpr (N > 128) {
    add_wgmma_of_registers<D, 128, kNext>(reinterpret_cast<float(&)[64]>(d[0]), a, b);
    add_wgmma_of_registers<D, N - 128, kNext>(reinterpret_cast<float(&)[(N - 128) / 2]>(d[64]), a,
                                              b + (2 * kNext >> 4));
  } else if constexpr (D == dtype::bf16) {
    ONEPASS_PRODUCT_OF("bf16");
  } else {
    ONEPASS_PRODUCT_OF("f16");
  }
}
#undef ONEPASS_PRODUCT_OF
#undef ONEPASS_PRODUCT_OF_REGISTERS
#undef ONEPASS_PRODUCT
#undef ONEPASS_R2
#undef ONEPASS_R1
#undef ONEPASS_R0
#undef ONEPASS_HALF_R0
#undef ONEPASS_D32
#undef ONEPASS_D8

// Four matrices of 8 x 8 16-bit elements into shared memory; each thread gives the address of a row: 8 i + r that of
// row r of matrix i.
ONEPASS_FUNCTION void store_matrices(uint32 row, uint32 a, uint32 b, uint32 c, uint32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

ONEPASS_END
