// Which kernel serves a call: the numbers that a CUDA kernel is compiled for.
#include "src/cuda/row/configuration.h"

#include <algorithm>
#include <bit>
#include <cstdint>

#include "src/cuda/row/tensors.h"
#include "src/cuda/row/tuning.h"

namespace onepass::cuda {
namespace {

int64 power_of_two_from(int64 n) { return static_cast<int64>(std::bit_ceil(static_cast<std::uint64_t>(n))); }

// The tensors whose rows a kernel reads. Their elements are as wide as x's.
uint64 streams_of(const request& r, const arguments& a) {
  return tensors_of(a, [&](const view& v) {
    const bool written = !r.backward && (&v == &a.y || (&v >= a.kept && &v < a.kept + kMaxKeeps));
    return !written && has_rows_of_x(r, a, v) && !is_repeated(v) && size_of(v.type) == size_of(r.x);
  });
}

// How many tensors of x's size a kernel reads, as its line has them: of one row, too, which serves all that there are.
int row_tensors(const request& r, const arguments& a) {
  const auto is_row = [&](const view& v) { return v.data && v.column_stride == 1 && size_of(v.type) == size_of(r.x); };
  int count = is_row(a.x) + (r.backward && is_row(a.y));
  for (int i = 0; i < kMaxOperands; ++i) count += (r.tensors >> i & 1) != 0 && is_row(a.operand[i]);
  for (int k = 0; k < kMaxKeeps; ++k) count += is_row(a.kept_gradient[k]);
  return count;
}

// Operands whose one row serves all, of elements as wide as x's.
uint64 repeated_operands(const request& r, const arguments& a) {
  uint64 operands = 0;
  for (int i = 0; i < kMaxOperands; ++i)
    operands |= static_cast<uint64>(is_repeated(a.operand[i]) && has_rows_of_x(r, a, a.operand[i]) &&
                                    size_of(r.operand[i]) == size_of(r.x))
                << i;
  return operands;
}

// Whether rows begin where accesses of 16 bytes may.
bool moves_16_bytes(const request& r, const configuration& c) {
  return c.ragged == 0 && c.access == c.vector_size && c.vector_size * size_of(r.x) >= 16;
}

// Bytes of shared memory for a tensor's rows in a block, and for the results that leave through it.
int64 rows_bytes(const request& r, const configuration& c) {
  return row_bytes(c.across, std::max(c.held_vectors, 1), c.spare_vectors, c.vector_size * size_of(r.x)) * c.down;
}
int64 staged_bytes(const request& r, const configuration& c) {
  return std::popcount(c.staged) * rows_bytes(r, c) * std::max(c.unroll, 1);
}

int64 threads_of_group(const request& r, const configuration& c) { return std::max(together(r) / c.vector_size, 1); }

// Columns in stripes, rows down the block: how a block of so many threads shares rows of `lanes`, so that few threads
// of its warps are left without elements. Threads across are a multiple of `neighbours`.
void share_lanes(int64 lanes, int threads, int64 neighbours, configuration& c) {
  constexpr int kTries = 8;
  constexpr double kWorthwhile = 0.03;
  const int64 fewest = ceil_div(lanes, threads);
  double best = 0;
  for (int64 stripes = fewest; stripes < fewest + kTries; ++stripes) {
    const int64 across = ceil_div(lanes, stripes * neighbours) * neighbours, down = threads / across;
    if (stripes > fewest && across < kTuning.least_across) break;
    const double busy =
        static_cast<double>(lanes * down) / static_cast<double>(stripes * ceil_div(across * down, 32) * 32);
    if (busy < best + kWorthwhile) continue;
    best = busy;
    c.across = static_cast<int>(across), c.down = static_cast<int>(down);
  }
}

void set_parts(plan& p, int64 parts) {
  p.parts = parts;
  p.with.one_part = parts == 1 && p.with.members == 0;
  p.built = nullptr;
}

// How many blocks take groups of rows in so many steps each, where `most` fill the chip. Several share a group where
// that leaves few of them without work; else each takes groups in turn.
int64 blocks_for(const row_groups& groups, int64 rows_a_step, int64 most, plan& p) {
  constexpr int64 kTries = 8;
  constexpr double kBusy = 0.9;
  const int64 steps = ceil_div(groups.rows, rows_a_step), fewest = std::clamp(most / groups.count, int64{1}, steps);
  double best = 0;
  for (int64 blocks = fewest; blocks < fewest + kTries && blocks <= steps && best < kBusy; ++blocks) {
    const int64 rounds = ceil_div(groups.count * blocks, most) * ceil_div(steps, blocks);
    const double busy = static_cast<double>(groups.count * steps) / static_cast<double>(rounds * most);
    if (busy > best) best = busy, p.group_blocks = blocks;
  }
  p.with.groups_a_block = p.group_blocks > 1 ? 0 : groups.count <= most ? 1 : 2;
  return p.group_blocks > 1 ? groups.count * p.group_blocks : std::min(groups.count, most);
}

const elementwise_tuning& tiles_for(const request& r, const arguments& a, const configuration& c) {
  const bool of_endings = r.backward && r.wants_column == 0 && r.only_endings && !r.paired;
  if (c.staged != 0)
    return !r.backward                   ? kTuning.forward_staged
           : of_endings && r.summed == 0 ? kTuning.backward_of_endings_staged
                                         : kTuning.backward_staged;
  if (r.backward && r.wants_column == 0 && a.x.data == nullptr) return kTuning.backward_of_gradients;
  if (of_endings && r.flops == 0) return kTuning.backward_of_endings;
  if (r.backward) return kTuning.backward;
  if (c.vector_size * size_of(r.x) < 16) return kTuning.forward_short;
  return size_of(r.x) == 2 ? kTuning.forward_16_bits : kTuning.forward;
}

void choose_elementwise(const request& r, const arguments& a, const device_facts& chip, const elementwise_tuning& tuned,
                        plan& p) {
  configuration& c = p.with;
  const int64 lanes_a_row = ceil_div(a.columns, c.vector_size);
  c.unroll = has_long_lanes(r, c) ? 1 : tuned.unroll;
  if (r.wants_column == 0) {  // whose parts are those of all sizes
    while (c.unroll > 1 && lanes_a_row * a.rows < int64{chip.sm_count} * tuned.threads * c.unroll) c.unroll /= 2;
  }
  c.blocks_per_sm = r.x == dtype::f64 ? 1 : tuned.resident / tuned.threads;
  c.flat = a.rows == 1 && r.wants_column == 0;
  c.sums_in_registers = 1;
  // Blocks that stride: those that add up columns, and those that may end at once, of which many would take their time.
  const bool strides = r.wants_column != 0 || c.one_factor != 0;
  if (c.flat) {
    c.across = tuned.threads;
    c.down = 1;
    c.exact = a.columns % (int64{c.across} * c.unroll * c.vector_size) == 0;
    const int64 most_x = strides ? int64{chip.sm_count} * c.blocks_per_sm : 1 << 30;
    p.grid_x = static_cast<unsigned>(std::min<int64>(ceil_div(lanes_a_row, c.across * c.unroll), most_x));
    p.grid_y = 1;
    p.shared_bytes = static_cast<unsigned>(staged_bytes(r, c));
    return;
  }
  share_lanes(lanes_a_row, tuned.threads, threads_of_group(r, c), c);
  p.shared_bytes = static_cast<unsigned>(staged_bytes(r, c));
  const auto set_grid = [&] {
    c.exact = a.columns % (int64{c.across} * c.vector_size) == 0;
    const int64 grid_x = ceil_div(lanes_a_row, c.across), most_y = ceil_div(a.rows, c.down * c.unroll);
    const int64 filling = std::max<int64>(chip.sm_count * tuned.blocks_per_sm / grid_x, 1);
    p.grid_x = static_cast<unsigned>(grid_x);
    if (r.has_groups) {
      constexpr int64 kMostY = 65535;
      p.grid_y = static_cast<unsigned>(blocks_for(a.groups, c.down * c.unroll, std::min(filling, kMostY / 8), p));
      return;
    }
    const int64 each = std::clamp<int64>(most_y / filling, 1, std::max(tuned.tiles, 1));
    p.grid_y = static_cast<unsigned>(std::min<int64>({most_y, strides ? filling : ceil_div(most_y, each), 65535}));
  };
  set_grid();
  const few_rows_tuning& few = kTuning.few_rows;
  if (r.wants_column != 0 && !r.has_groups && p.grid_y > 1 && a.rows <= few.unroll * few.down && c.staged == 0 &&
      c.unit == 0) {
    c.unroll = few.unroll;
    c.down = static_cast<int>(power_of_two_from(ceil_div(a.rows, c.unroll)));
    c.across = static_cast<int>(std::min<int64>(lanes_a_row, std::max(32 / c.down, kTuning.least_across)));
    if (r.x != dtype::f64) c.blocks_per_sm = few.resident / (c.across * c.down);
    set_grid();
  }
  set_parts(p, r.wants_column != 0 ? p.grid_y : 0);
}

// What is loaded before a row's statistics: all that words behind the row word take, if there are registers for it.
uint64 early_operands(const request& r, const configuration& c, int resident) {
  if (r.backward || c.recomputes != 0 || c.access != c.vector_size || c.ragged != 0 || r.features > 0 || r.rope >= 0)
    return 0;
  uint64 early = 0;
  for (int i = 0; i < kMaxOperands; ++i) {
    const bool is_row = (r.behind >> i & 1) != 0 && (c.single_operand >> i & 1) == 0;
    if (is_row && c.vector_size * size_of(r.operand[i]) != 16) return 0;
    early |= static_cast<uint64>(is_row) << i;
  }
  constexpr int kRegisters = 1 << 16, kOfLane = 4;  // of an SM; 16 bytes
  const int numbers = c.held_vectors * c.vector_size * (r.x == dtype::f64 ? 2 : 1);
  const int all = numbers + std::popcount(early) * c.held_vectors * kOfLane + kTuning.other_registers;
  return all <= kRegisters / resident ? early : 0;
}

// Whether the threads of a cluster have room for a row, and how they share it.
bool hold_row(const request& r, const arguments& a, const device_facts& chip, const row_tuning& tuned, plan& p) {
  configuration& c = p.with;
  const int slots = std::popcount(r.wants_column),
            of_units = c.unit > 0 ? std::popcount(r.wants_column & r.channels) : 0;
  if (slots - of_units > tuned.sums || (tuned.unaligned && moves_16_bytes(r, c)) ||
      std::popcount(c.repeated_operand & ~r.of_batches) > tuned.repeated ||
      (tuned.recomputes && r.flops > kTuning.again_flops) || (tuned.ahead && r.features > 0) ||
      ((tuned.recomputes || tuned.ahead) && r.row_words > 1) || (tuned.ahead && r.has_groups))
    return false;
  const int wide = r.x == dtype::f64 ? 2 : 1;  // a double takes two registers
  const int64 lanes_a_row = ceil_div(a.columns, c.vector_size);
  const int most_lanes = std::clamp(tuned.numbers / wide / c.vector_size, 1, kTuning.held_vectors);
  const int64 wanted = power_of_two_from(ceil_div(lanes_a_row, most_lanes));
  const int64 fewest = tuned.across > 0 ? tuned.across
                       : r.backward     ? kTuning.least_across
                                        : kTuning.least_across_forward;
  const int64 least_across = std::min(fewest, power_of_two_from(lanes_a_row));
  const int64 across = std::max({wanted, least_across, power_of_two_from(r.features), threads_of_group(r, c)});
  const int64 most = std::min(tuned.cluster, chip.cluster);
  c.across = static_cast<int>(std::min<int64>(across, tuned.threads));
  c.cluster = static_cast<int>(std::min(across / c.across, most));
  const int most_down = c.across <= kWarp || (r.backward && c.cluster == 1) ? 15 : 1;  // barriers that a block has
  const auto lanes_each = [&] { return ceil_div(lanes_a_row, int64{c.across} * c.cluster); };
  const auto numbers = [&] { return lanes_each() * c.vector_size * wide; };
  if (lanes_each() > most_lanes || numbers() < tuned.least_numbers || row_tensors(r, a) > tuned.tensors) return false;
  if (c.across > kWarp && r.features == 0 && threads_of_group(r, c) <= kWarp) {  // no more warps than the row fills
    const int64 filled = ceil_div(lanes_a_row, lanes_each() * c.cluster);
    c.across = static_cast<int>(ceil_div(filled, kWarp) * kWarp);
  }
  c.down = c.across <= kWarp ? tuned.block / c.across : std::clamp(tuned.block / c.across, 1, most_down);
  if (c.down < 1) return false;
  const auto sums = [&] { return numbers() * (slots - of_units) + lanes_each() * of_units * wide; };
  c.sums_in_registers = sums() <= kTuning.sum_numbers;
  if (!c.sums_in_registers && c.down > 1) {  // one row a block: several would add to the same sums
    c.across = std::max(c.across, kWarp);    // since a shuffle names a whole warp
    c.down = 1;
    c.sums_in_registers = sums() <= kTuning.sum_numbers;
  }
  c.held_vectors = static_cast<int>(lanes_each());
  if (lanes_a_row * 100 < tuned.busy * int64{c.held_vectors} * c.across * c.cluster) return false;
  c.recomputes = tuned.recomputes;
  c.ahead = tuned.ahead && c.across * c.cluster > kWarp;
  const int64 sum_bytes =
      c.sums_in_registers ? 0 : slots * int64{c.held_vectors} * c.across * c.vector_size * (wide * 4);
  const int threads = c.across * c.down;
  if (tuned.stages == 0) c.early = early_operands(r, c, tuned.resident);
  if (tuned.early && (c.early & ~c.repeated_operand) == 0) return false;
  const uint64 taken = tuned.stages == 0 ? c.early : r.behind;
  if (tuned.of_batches && (taken & r.of_batches) == 0) return false;
  const bool many_sums = r.backward && r.features > 2;  // 24 to 400 bytes of them spilled with half the registers
  const int resident = tuned.resident / (many_sums ? 2 : 1);
  c.blocks_per_sm = wide == 1 ? std::max(1, (resident + threads / 2) / threads) : 1;
  if (r.backward && c.blocks_per_sm > 1) c.ahead = 0;  // one block computes while another's statistics are on their way
  constexpr int kReserved = 1024, kMbarriers = 512;    // kReserved: for the system, in every block
  const int64 reductions = kMostReductionSets * int64{most_reduced(r.features, result_bits(r) <= kShortBits)} * wide *
                               4 * std::max(threads / 32, 1) * c.cluster +
                           kMbarriers;
  const int64 staged = staged_bytes(r, c);
  const int64 own = reductions + staged + (c.down > 1 && slots > 0 ? int64{threads} * c.vector_size * wide * 4 : 0) +
                    (r.features > 0 ? int64{threads} * wide * 4 : 0);
  const int64 room = (chip.shared_per_block + kReserved) / c.blocks_per_sm - kReserved - own - sum_bytes;
  if (sum_bytes + own > chip.shared_per_block) return false;
  p.shared_bytes = static_cast<unsigned>(sum_bytes + staged);
  const int64 row_bytes = rows_bytes(r, c);
  constexpr int kLeastCopied = 4;  // bytes
  const bool copies = (r.rope < 0 || c.access * size_of(r.x) >= kLeastCopied) && !has_long_lanes(r, c);
  const uint64 streams = copies ? streams_of(r, a) : 0, once = copies ? repeated_operands(r, a) : 0;
  const int64 stage_bytes = std::popcount(streams) * row_bytes, once_bytes = std::popcount(once) * row_bytes;
  const int least = c.ahead ? 2 : 1;
  const auto stages = [&](int64 bytes) {
    return stage_bytes > 0 ? std::min<int64>(bytes / stage_bytes, tuned.stages) : 0;
  };
  if (stages(room) < least) return !tuned.recomputes;
  const bool all = stages(room - once_bytes) >= std::min(tuned.stages, 2);
  c.stages = static_cast<int>(stages(all ? room - once_bytes : room));
  c.streams = streams, c.loaded_once = all ? once : 0;
  p.shared_bytes += static_cast<unsigned>(c.stages * stage_bytes + (all ? once_bytes : 0));
  return true;
}

// Lines of features have a row word that is none (word::whole), and sums of their own.
bool needs_sums(const request& r, int row_word) { return r.row_words == 0 || (r.summed >> row_word & 1) != 0; }

// Whether values are kept that are rows.
bool gives_rows(const arguments& a) {
  return std::any_of(a.kept, a.kept + kMaxKeeps, [](const view& v) { return v.data && v.column_stride != 0; });
}

// Blocks take parts of rows, then a block each row, for each row word; then tiles. The parts depend on nothing but the
// row's length. tuned: without threads as the table has it.
std::vector<plan> take_in_parts(const request& r, const arguments& a, const device_facts& chip, const plan& blank,
                                const elementwise_tuning& tuned = {}) {
  plan parts = blank;
  configuration& c = parts.with;
  c.of = part::parts;
  c.across = kTuning.part_threads;
  c.down = 1;
  c.held_vectors = kTuning.part_lanes_at_once;
  c.blocks_per_sm = 1;
  c.sums_in_registers = 1;
  const int64 at_once = int64{c.across} * c.held_vectors * c.vector_size;
  c.exact = a.columns % at_once == 0;
  parts.row_columns = int64{c.across} * kTuning.part_lanes * c.vector_size;
  parts.grid_x = static_cast<unsigned>(a.rows * ceil_div(a.columns, parts.row_columns));
  parts.grid_y = 1;
  plan combined = parts;
  combined.with.of = part::combined;
  combined.grid_x = static_cast<unsigned>(a.rows);
  std::vector<plan> all;
  for (int i = 0; i < std::max(r.row_words, 1); ++i) {
    const int row_word = r.backward ? std::max(r.row_words, 1) - 1 - i : i;
    if (r.backward && !needs_sums(r, row_word)) continue;
    parts.with.row_word = combined.with.row_word = row_word;
    all.push_back(parts), all.push_back(combined);
  }
  if (r.only_statistics || (!r.backward && r.gives_number && !gives_rows(a))) return all;
  plan tiles = blank;
  tiles.with.of = part::tiles;
  choose_elementwise(r, a, chip, tuned.threads > 0 ? tuned : tiles_for(r, a, tiles.with), tiles);
  all.push_back(tiles);
  return all;
}

// Rows that the chip has at once.
int64 rows_at_once(const configuration& c, const device_facts& chip) {
  return std::max<int64>(int64{chip.sm_count} * c.blocks_per_sm / c.cluster, 1) * c.down;
}

// A row's numbers do not depend on how many rows there are: nor do the threads that share it.
plan stream_rows(const request& r, const arguments& a, const streamed_tuning& tuned, const plan& blank) {
  plan p = blank;
  configuration& c = p.with;
  c.of = r.paired ? part::paired : part::streamed;
  const int64 threads = power_of_two_from(ceil_div(a.columns, int64{c.vector_size} * tuned.vectors * tuned.steps));
  c.across = static_cast<int>(std::clamp<int64>(threads, 32, tuned.threads));
  c.down = 1;
  c.held_vectors = tuned.vectors;
  c.blocks_per_sm = tuned.resident / c.across;
  c.sums_in_registers = 1;
  c.exact = a.columns % (int64{c.across} * c.held_vectors * c.vector_size) == 0;
  p.grid_x = static_cast<unsigned>(std::min<int64>(a.rows, (1LL << 31) - 1));
  p.grid_y = 1;
  return p;
}

bool only_streams(const request& r) { return !r.backward && r.paired; }
bool may_stream(const request& r, const arguments& a) {
  return only_streams(r) || (!r.backward && r.only_endings && !gives_rows(a));
}

bool has_one_target(const request& r) { return r.has_target && r.row_words == 1; }

bool is_for(const row_tuning& tuned, const request& r, const arguments& a) {
  return a.columns <= tuned.columns && r.flops * 2 >= tuned.least_flops * size_of(r.x) && r.flops <= tuned.most_flops &&
         (!tuned.short_only || size_of(r.x) == 2) && r.features >= tuned.features && r.row_words >= tuned.row_words &&
         (!tuned.target || has_one_target(r));
}

// The held row's grid, and what of the row is known.
void finish_rows(const request& r, const arguments& a, const device_facts& chip, plan& p) {
  configuration& c = p.with;
  c.exact = int64{c.across} * c.cluster * c.held_vectors * c.vector_size == a.columns;
  c.whole_vectors = c.cluster == 1 ? static_cast<int>(a.columns / (c.across * c.vector_size)) : 0;
  const int64 all = ceil_div(a.rows, c.down);
  const int64 persistent = rows_at_once(c, chip) / c.down;
  // A block adds up its rows' columns, or fetches rows ahead.
  const bool strides = r.wants_column != 0 || c.stages > 0 || c.recomputes;
  const int64 rows = std::min<int64>(strides ? std::min(all, persistent) : all, ((1LL << 31) - 1) / c.cluster);
  p.grid_x = static_cast<unsigned>(rows * c.cluster);
  p.grid_y = 1;
  set_parts(p, r.wants_column != 0 ? rows : 0);
  if (r.has_groups) share_groups(a.groups, persistent, p);
}

std::vector<plan> choose_rowwise(const request& r, const arguments& a, const device_facts& chip, const plan& blank) {
  if (only_streams(r)) return {stream_rows(r, a, kTuning.paired, blank)};
  const int least = has_one_target(r) ? kMostHeldWithTarget + 1
                    : r.has_target    ? kTuning.streams.least_of_several
                                      : kTuning.streams.least;
  if (may_stream(r, a) && a.columns >= least && a.columns <= kTuning.streams.most)
    return {stream_rows(r, a, kTuning.streamed, blank)};
  // Where nothing is summed over a row, tiles need no more than the statistics. Of rows that do not begin at 16 bytes,
  // kernels of rows bring lanes through shared memory ahead of their use: "Backward of endings behind words".
  if (r.backward && r.row_words > 0 && r.summed == 0 &&
      (moves_16_bytes(r, blank.with) || r.paired || a.columns > kTuning.most_ragged_endings))
    return take_in_parts(r, a, chip, blank);
  // Units' sums are one number of a vector in tiles, too, and a long row's clusters would take turns.
  if (r.backward && blank.with.unit > 0 && a.columns > kTuning.unit_columns) return take_in_parts(r, a, chip, blank);
  plan p;
  bool held = false;
  each_row_tuning(r.backward, [&](const row_tuning& tuned) {
    if (!is_for(tuned, r, a)) return false;
    p = blank;
    held = hold_row(r, a, chip, tuned, p) && a.rows >= tuned.rounds * rows_at_once(p.with, chip);
    return held;
  });
  if (!held) return take_in_parts(r, a, chip, blank);
  finish_rows(r, a, chip, p);
  return {p};
}

}  // namespace

void share_groups(const row_groups& groups, int64 most, plan& p) {
  const int64 blocks = blocks_for(groups, p.with.down, most, p);
  p.grid_x = static_cast<unsigned>(blocks * p.with.cluster);
  set_parts(p, blocks);
}

std::vector<plan> choose(const request& r, const arguments& a, const device_facts& chip) {
  return choose(r, a, chip, describe(r, a));
}

std::vector<plan> choose(const request& r, const arguments& a, const device_facts& chip,
                         const configuration& described) {
  plan p{};
  p.with = described;
  if (r.rowwise) return choose_rowwise(r, a, chip, p);
  choose_elementwise(r, a, chip, tiles_for(r, a, described), p);
  return {p};
}

std::vector<plan> other_rows(const request& r, const arguments& a, const device_facts& chip,
                             const configuration& described) {
  std::vector<plan> copied, all, fewer;
  const auto add = [&](const row_tuning& tuned, std::vector<plan>& to) {
    plan p{};
    p.with = described;
    if (!hold_row(r, a, chip, tuned, p)) return false;
    finish_rows(r, a, chip, p);
    to.push_back(p);
    return true;
  };
  each_row_tuning(r.backward, [&](row_tuning tuned) {
    if (!is_for(tuned, r, a) || tuned.rounds > 0 || !add(tuned, all)) return false;
    if (all.back().with.early != 0) {
      tuned.stages = 2, tuned.early = false;
      add(tuned, copied);
    }
    tuned.resident = tuned.resident * 3 / 4;
    if (add(tuned, fewer)) {
      const configuration& c = fewer.back().with;
      if (c.across * c.down * c.blocks_per_sm * 5 < tuned.resident * 4) fewer.pop_back();
    }
    return false;
  });
  copied.insert(copied.end(), all.begin(), all.end());
  copied.insert(copied.end(), fewer.begin(), fewer.end());
  return copied;
}

plan usual_form(const request& r, const arguments& a, plan p) {
  configuration& c = p.with;
  c.small = 1, c.dims = 1, c.one_part = 0, c.in_place = 0, c.strided_dx = 0, c.apart = 0;
  c.groups_a_block = r.has_groups ? 1 : 0;
  c.only_statistics = 0, c.saves_statistics = !r.backward;
  c.dense = tensors_of(a, [&](const view& v) {
    const std::ptrdiff_t operand = &v - a.operand;
    const bool is_operand = operand >= 0 && operand < kMaxOperands;
    return has_rows_of_x(r, a, v) && (!is_operand || (r.tensors >> operand & 1) != 0);
  });
  p.built = nullptr;
  return p;
}

namespace {

std::vector<plan> laid_out(const way& by, const request& r, const arguments& a, const device_facts& chip,
                           const configuration& described) {
  plan p{};
  p.with = described;
  if (r.rowwise != (by.kind != way_kind::tiles) || (only_streams(r) && by.kind != way_kind::streamed)) return {};
  switch (by.kind) {
    case way_kind::tiles: choose_elementwise(r, a, chip, by.tile, p); return {p};
    case way_kind::parts: return take_in_parts(r, a, chip, p, by.tile);
    case way_kind::streamed:
      return may_stream(r, a) ? std::vector<plan>{stream_rows(r, a, by.stream, p)} : std::vector<plan>();
    case way_kind::rows:
      if (!hold_row(r, a, chip, by.row, p)) return {};
      finish_rows(r, a, chip, p);
      return {p};
  }
  return {};
}

}  // namespace

std::vector<plan> lay_out(const way& by, const request& r, const arguments& a, const device_facts& chip,
                          const configuration& described) {
  constexpr int kReductions = 4096;  // bytes, at most
  std::vector<plan> plans = laid_out(by, r, a, chip, described);
  const bool fits = std::all_of(plans.begin(), plans.end(), [&](const plan& p) {
    const int64 parts = p.row_columns > 0 ? a.rows * ceil_div(a.columns, p.row_columns) : 1;
    return parts < 1LL << 31 && p.with.across * p.with.down <= 1024 &&
           static_cast<int>(p.shared_bytes) + kReductions <= chip.shared_per_block;
  });
  return fits ? plans : std::vector<plan>();
}

}  // namespace onepass::cuda
