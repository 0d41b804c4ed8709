// The GEMM of `linear` with its epilogue (onepass/kernel/linear/gemm_sm90.cuda.h): when it serves, and its launch.
#include "src/cuda/linear/gemm_sm90.h"

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "src/cuda/runtime/known_kernels.h"
#include "src/cuda/runtime/packed_arguments.h"
#include "src/cuda/runtime/source.h"

namespace onepass::cuda {
namespace {

constexpr int kTileRows = 128, kTileK = 64, kThreads = 512,
              kGroupThreads = 128;  // as in kernel/linear/gemm_sm90.cuda.h
constexpr int kLanes = kTileLanes, kFoldThreads = 256;

}  // namespace

bool is_aligned(const void* data, int64 stride) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && stride % kLanes == 0;
}

request widest(const request& a, const request& b) {
  request both = a;
  both.operands = std::max(a.operands, b.operands), both.keeps = std::max(a.keeps, b.keeps);
  both.parameters = std::max(a.parameters, b.parameters);
  return both;
}

bool needs_statistics(int64 columns) { return columns > std::rbegin(kLinearTuning.wide)->columns; }

tile_plan plan_tiles(int64 rows, int64 columns, bool defers, int flops_behind, const device_facts& chip) {
  tile_plan p{};
  p.cluster = rows > kTileRows ? 2 : 1;
  const int64 down = ceil_div(rows, int64{kTileRows} * p.cluster), clusters = chip.sm_count / p.cluster;
  const auto turns = [&](const linear_tile& tile) {
    return ceil_div(down * ceil_div(columns, tile.columns), clusters);
  };
  const auto time = [&](const linear_tile& tile) {
    const bool activates = flops_behind >= kLinearTuning.activation_flops;
    return static_cast<double>(turns(tile) * tile.columns) * (defers      ? tile.time_deferring
                                                              : activates ? tile.time_activating
                                                                          : tile.time);
  };
  const auto* narrow = std::find_if(std::begin(kLinearTuning.narrow), std::end(kLinearTuning.narrow),
                                    [&](const linear_tile& tile) { return columns <= tile.columns; });
  if (narrow != std::end(kLinearTuning.narrow)) p.tile = *narrow;
  else
    p.tile = *std::min_element(std::begin(kLinearTuning.wide), std::end(kLinearTuning.wide),
                               [&](const linear_tile& a, const linear_tile& b) { return time(a) < time(b); });
  p.turns = turns(p.tile);
  return p;
}

bool fits(const linear_call& call) {
  return call.a_behind.rows < 1 << 30 && is_aligned(call.input, call.input_stride) &&
         is_aligned(call.matrix, call.matrix_stride) && describe(call.behind, call.a_behind).access == kLanes;
}

linear_plan choose(const linear_call& call, const device_facts& chip) {
  linear_plan p{};
  const int64 columns = call.a_behind.columns, rows = call.a_behind.rows;
  p.tiles = plan_tiles(rows, columns, call.defers, call.behind.flops, chip);
  const linear_tile& tile = p.tiles.tile;
  const int64 accumulator_bytes = int64{tile.buffers} * kTileRows / 2 * tile.columns * 2;
  const int64 stage_bytes = int64{kTileRows + tile.columns} * kTileK * 2;
  constexpr int kAligned = 1024;
  const int reserved = call.defers ? 4096 : 2048;  // mbarriers, and a deferred norm
  p.stages = static_cast<int>(std::min<int64>(
      (chip.shared_per_block - kAligned - reserved - accumulator_bytes) / stage_bytes, kLinearTuning.stages));
  p.shared_bytes = static_cast<unsigned>(kAligned + accumulator_bytes + p.stages * stage_bytes);
  const int64 tiles = ceil_div(rows, int64{kTileRows} * p.tiles.cluster) * ceil_div(columns, tile.columns);
  p.grid = static_cast<unsigned>(std::min<int64>(tiles, chip.sm_count / p.tiles.cluster) * p.tiles.cluster);

  p.behind = describe(call.behind, call.a_behind);
  p.behind.across = tile.columns / kLanes;
  p.behind.down = kGroupThreads / p.behind.across;
  p.behind.threads = kThreads;
  p.behind.unroll = 2;
  p.behind.exact = columns % tile.columns == 0;
  p.behind.stages = 1;
  p.behind.streams = 1;  // the accumulators

  if (call.defers) p.before = describe(call.before, call.a_before);
  else p.before.vector_size = p.before.access = kLanes, p.before.dims = p.before.cluster = 1;
  return p;
}

std::string source(const linear_call& call, const linear_plan& p) {
  const request& r = call.behind;
  std::string text = heading(widest(r, call.before), "linear/gemm_sm90");
  const auto number = [&](const char* name, int value) { text += number_field(name, value); };
  text += "using line_before = " + (call.defers ? call.before.line : "line<chain<>>") + ";\n";
  text += "using line_behind = " + r.line + ";\nstruct config_before {\n" + fields(call.before, p.before);
  text += "};\nstruct config_behind {\n" + fields(r, p.behind) + "};\nstruct config {\n";
  text += type_field("kX", r.x);
  number("kTileN", p.tiles.tile.columns), number("kBuffers", p.tiles.tile.buffers), number("kStages", p.stages);
  number("kCluster", p.tiles.cluster), number("kDefers", call.defers);
  number("kTakesMoments", call.defers && !needs_statistics(call.a_behind.columns));
  number("kGroup", kLinearTuning.group);
  text += "  using before = config_before;\n  using behind = config_behind;\n};\n";
  return text +
         kernel_text("linear_forward", "config, line_before, line_behind", bounds(kThreads, 1, p.tiles.cluster),
                     "linear_arguments") +
         "ONEPASS_END\n";
}

void launch(const linear_call& call, int device, void* stream) {
  const device_facts& chip = facts(device);
  const linear_plan p = choose(call, chip);
  static known_kernels known;
  const request &before = call.before, &behind = call.behind;
  const kernel_key key(device, before.line, before.x, before.operand, p.before, behind.line, behind.x, behind.operand,
                       p.behind, call.defers, p.tiles.tile.columns, p.tiles.tile.buffers, p.tiles.cluster, p.stages);
  const kernel& built = known.find_or_build(key, [&]() -> const kernel& {
    return load(source(call, p), device, stream, chip.arch_name + " linear " + behind.line);
  });
  const bool is_bf16 = call.behind.x == dtype::bf16;
  const arguments& b = call.a_behind;
  const tensor_map maps[2] = {
      describe_matrix(built, {call.input, is_bf16, b.rows, call.k, call.input_stride, kTileRows, kTileK}),
      describe_matrix(built, {call.matrix, is_bf16, b.columns, call.k, call.matrix_stride,
                              static_cast<unsigned>(p.tiles.tile.columns / p.tiles.cluster), kTileK})};
  std::string packed;
  append_value(packed, maps), append_value(packed, call.k);
  append_value(packed, call.sums), append_value(packed, call.offsets);
  const request both = widest(call.behind, call.before);
  append_packed(packed, both, call.a_behind), append_packed(packed, both, call.a_before);
  constexpr std::size_t kAlignment = alignof(tensor_map);  // the kernel's argument ends at a multiple of it
  packed.resize((packed.size() + kAlignment - 1) / kAlignment * kAlignment);
  launch(built, {p.grid, 1}, {kThreads, 1}, p.shared_bytes, false, stream, packed.data());
}

std::string source(const fold_call& of) {
  return "#include \"onepass/kernel/linear/folded_norm.cuda.h\"\nONEPASS_BEGIN\nstruct config {\n" +
         type_field("kMatrix", of.type) + type_field("kScale", of.scale_type) + type_field("kBias", of.bias_type) +
         "  static constexpr bool kCentred = " + (of.centres ? "true" : "false") + ";\n};\n" +
         kernel_text("fold", "config, " + std::to_string(kFoldThreads), bounds(kFoldThreads), "fold_arguments") +
         "ONEPASS_END\n";
}

void launch(const fold_call& of, int device, void* stream) {
  struct {  // fold_arguments
    const void *matrix, *scale, *bias;
    void* folded;
    float *sums, *offsets;
    int64 k, stride;
  } const arguments{of.matrix, of.scale, of.bias, of.folded, of.sums, of.offsets, of.k, of.stride};
  static known_kernels known;
  const kernel_key key(device, of.type, of.scale_type, of.bias_type, of.centres);
  const kernel& built = known.find_or_build(key, [&]() -> const kernel& {
    return load(source(of), device, stream, facts(device).arch_name + " fold a norm");
  });
  launch(built, {static_cast<unsigned>(of.columns), 1}, {kFoldThreads, 1}, 0, false, stream, &arguments);
}

}  // namespace onepass::cuda
