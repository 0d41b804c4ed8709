// The ways of a line with `linear` on CUDA: the bytes that each moves, and its seconds by measured rates.
#include <algorithm>

#include "src/choose/chip_model.h"
#include "src/choose/ways.h"
#include "src/cpu/linear.h"
#include "src/cuda/linear/gemm_sm90.h"
#include "src/cuda/linear/small_k.h"
#include "src/cuda/linear/small_m.h"
#include "src/cuda/linear/small_n.h"
#include "src/cuda/linear/tuning.h"

namespace onepass::choice {

using cuda::ceil_div;
using cuda::device_facts;

namespace {

constexpr cuda::linear_speed kSpeed{};

// Of what `linear` gives to endings, a chunk at a time.
struct chunk_limits {
  int64 bytes, rows;  // of a chunk, at most; on CUDA more rows where that makes few chunks
  int64 step;         // its rows are a multiple
};
constexpr chunk_limits kCudaChunks{1 << 30, 4096, 256}, kCpuChunks{96 << 20, 1024, 64};

int flops_of(const spec::line& line) {
  int flops = 0;
  for (const spec::word& w : line.words) flops += w.about->flops_forward;
  return flops;
}

std::string why_not_short(const sizes& c) {
  if (c.type != dtype::bf16 && c.type != dtype::f16) return "its kernel is for bfloat16 and float16";
  if (c.depth % cuda::kTileLanes != 0 || c.columns % cuda::kTileLanes != 0)
    return "rows must be multiples of 8 elements";
  return "";
}

std::string why_not_tiled(const sizes& c, const device_facts& chip) {
  return chip.arch != 90 ? "its kernel is for compute capability 9.0" : why_not_short(c);
}

std::string why_not_deferred(const spec::contraction& of) {
  return of.norm.is_one ? "" : "only a norm, with scale and bias or without, can be deferred";
}

// One GEMM with an epilogue; the prologue is a deferred norm or empty.
way tiled(const spec::contraction& of, const sizes& c, const device_facts& chip, bool defers) {
  const int64 x = c.x_bytes(), y = c.result_bytes(), matrix = c.matrix_bytes();
  way p{.how = defers ? spec::strategy::deferred : spec::strategy::tiled,
        .by = implementation::gemm,
        .bytes = x + y + matrix,
        .kernel = "linear_forward"};
  p.why_not = why_not_tiled(c, chip);
  if (p.why_not.empty() && defers) p.why_not = why_not_deferred(of);
  else if (p.why_not.empty() && !of.before.words.empty())
    p.why_not = "nothing may stand before 'linear' (a norm there: 'deferred')";
  p.bytes += (defers ? 2 * matrix : 0) + (other_tensors(of.behind) + c.saves_product) * y;
  if (!p.serves()) return p;
  const cuda::tile_plan tiles = cuda::plan_tiles(c.rows, c.columns, defers, flops_of(of.behind), chip);
  const auto turns = static_cast<double>(tiles.turns), columns = turns * tiles.tile.columns,
             k = static_cast<double>(c.depth);
  double gemm = columns * k * kSpeed.tile_column;
  double before = 0, epilogue = columns * kSpeed.finish_column;  // warpgroup 0's work
  if (defers) {
    before = kSpeed.launch + seconds_for(2 * matrix, chip);
    gemm += columns * kSpeed.norm_column;
    if (cuda::needs_statistics(c.columns)) p.bytes += x, before += kSpeed.launch + seconds_for(x, chip);
    else epilogue += turns * (k * kSpeed.moments + kSpeed.moments_turn);
  }
  p.seconds = kSpeed.call + before + std::max({gemm, epilogue, seconds_for(p.bytes, chip)});
  return p;
}

// One kernel whose warps multiply: everything crosses memory once.
way by_warps(way p, const spec::contraction& of, const sizes& c, const std::string& why_not) {
  const int64 x = c.x_bytes(), y = c.result_bytes();
  p.bytes = x + y + c.matrix_bytes() + other_tensors(of.before) * x + (other_tensors(of.behind) + c.saves_product) * y;
  p.why_not = why_not_short(c);
  if (p.why_not.empty()) p.why_not = why_not;
  return p;
}

// Every block has all rows, and a part of the matrix.
way small_m(const spec::contraction& of, const sizes& c, const device_facts& chip) {
  const way named{.how = spec::strategy::small_m, .by = implementation::small_m, .kernel = "small_m_forward"};
  way p = by_warps(named, of, c, cuda::why_not_small_m(c.rows, c.depth, chip));
  if (!p.serves()) return p;
  const chip_model on = model_of(chip);
  const cuda::small_m_rows taken = cuda::take_rows(c.rows, c.depth, chip);
  const auto elements = static_cast<double>(ceil_div(c.rows, taken.at_once) * taken.elements);
  const double most = on.measured ? kSpeed.small_m_bytes : chip.bytes_per_second,
               rate = std::min(most, taken.steps_ahead * kSpeed.small_m_ahead / on.in_flight);
  p.seconds = on.margin * (kSpeed.small_m_call + elements * kSpeed.small_m_element * on.clock +
                           static_cast<double>(p.bytes) / rate);
  return p;
}

// Every block has the matrix, and a part of the rows.
way small_k(const spec::contraction& of, const sizes& c, const device_facts& chip) {
  const way named{.how = spec::strategy::small_k, .by = implementation::small_k, .kernel = "small_k_forward"};
  way p = by_warps(named, of, c, cuda::why_not_small_k(c.depth, c.columns, chip));
  if (!p.serves()) return p;
  const chip_model on = model_of(chip);
  const auto elements = static_cast<double>(c.rows * c.depth), fmas = elements * static_cast<double>(c.columns);
  const double computing = elements * kSpeed.small_k_element * on.issue + fmas * kSpeed.small_k_fma * on.mma;
  p.seconds = on.margin * (kSpeed.small_k_call + std::max(computing, seconds_for(p.bytes, chip)));
  return p;
}

// The rowwise kernel: a row ends in dot products.
way small_n(const spec::contraction& of, const sizes& c, const device_facts& chip) {
  const int64 x = c.x_bytes(), y = c.result_bytes();
  way p{.how = spec::strategy::small_n,
        .by = implementation::small_n,
        .bytes = x + y + c.matrix_bytes(),
        .kernel = "small_n_forward"};
  p.bytes += other_tensors(of.before) * x + (other_tensors(of.behind) + c.saves_product) * y;
  p.why_not = spec::why_not_small_n(of, c.columns);
  if (p.why_not.empty() && c.depth > cuda::kMostSmallNColumns)
    p.why_not = "it is for rows of at most " + std::to_string(cuda::kMostSmallNColumns) + " elements";
  if (!p.serves()) return p;
  const double fmas = static_cast<double>(c.rows * c.depth) * static_cast<double>(c.columns);
  p.seconds =
      kSpeed.small_n_call + std::max(seconds_for(p.bytes, chip), fmas * kSpeed.small_n_fma * model_of(chip).issue);
  return p;
}

}  // namespace

int64 other_tensors(const spec::line& line) {
  const auto is_tensor = [](const spec::word& w) { return w.about->operand == operand_kind::tensor; };
  return line.keeps + std::count_if(line.words.begin(), line.words.end(), is_tensor);
}

double seconds_for(int64 bytes, const device_facts& chip) { return static_cast<double>(bytes) / chip.bytes_per_second; }

way unfused(const call& call, const device_facts& chip) {
  const spec::contraction& of = call.of;
  const sizes& c = call.sizes;
  const int64 x = c.x_bytes(), y = c.result_bytes(), matrix = c.matrix_bytes();
  const chip_model on = model_of(chip);
  way p{.how = spec::strategy::unfused, .bytes = x + matrix + y};
  const double flops = 2.0 * static_cast<double>(c.rows * c.columns) * static_cast<double>(c.depth);
  p.seconds =
      kSpeed.call + std::max(flops / (size_of(c.type) == 2 ? on.flops : on.flops_wide), seconds_for(p.bytes, chip));
  const auto pass = [&](int64 bytes) {
    p.bytes += bytes;
    p.seconds += kSpeed.launch + seconds_for(bytes, chip);
  };
  if (!of.before.words.empty()) pass((2 + other_tensors(of.before)) * x);
  if (!of.behind.words.empty() && !spec::is_one_bias(of.behind)) pass((2 + other_tensors(of.behind)) * y);
  return p;
}

// No time is predicted: what moves less comes first. Panels compute the gradient of the words before `linear` from the
// result's, without the input's between.
std::vector<way> linear_gradient_ways(const call& c, bool on_cpu) {
  const sizes& s = c.sizes;
  const int64 x = s.x_bytes(), dy = s.result_bytes(), least = 2 * x + dy + 2 * s.matrix_bytes(),
              behind = c.of.behind.words.empty() ? 0 : 2 * dy;
  way library{.how = spec::strategy::unfused, .bytes = least + behind, .rank = 2},
      small_n{.how = spec::strategy::small_n, .by = implementation::small_n, .bytes = least, .rank = 0},
      panels{.how = spec::strategy::panels, .by = implementation::panels, .bytes = least + behind, .rank = 1};
  if (!c.of.before.words.empty()) library.bytes += 4 * x;
  if (c.from_input) small_n.why_not = panels.why_not = "the words before 'linear' start from its input";
  else small_n.why_not = spec::why_not_small_n(c.of, s.columns);
  if (!on_cpu) {
    small_n.kernel = "small_n_backward";
    return {library, small_n};
  }
  if (small_n.serves() && (c.unfit >> static_cast<int>(small_n.by) & 1))
    small_n.why_not = "it is compiled at first use, by a C++ compiler, or a tensor that it reads was not saved";
  if (c.gives_more) panels.why_not = "the gradient of the input of 'linear' must be written";
  else if (panels.serves() && cpu::backward_panel_rows(c.of, s.type, s.rows, s.depth, s.columns) == 0)
    panels.why_not = cpu::kWhyNoLinearPanels;
  return {library, small_n, panels};
}

int64 chunk_rows(const sizes& s, bool on_cpu) {
  const chunk_limits& most = on_cpu ? kCpuChunks : kCudaChunks;
  const int64 fit = most.bytes / std::max<int64>(s.columns * size_of(s.type), 1) / most.step * most.step,
              part = ceil_div(ceil_div(s.rows, kFewChunks), most.step) * most.step;
  if (!on_cpu && most.rows < part && part <= fit) return part;
  return std::clamp(fit, most.step, most.rows);
}

// Chunks take little more time, for their launches, and far less memory.
std::vector<way> ways_to_numbers(const call& c, const device_facts* chip) {
  const sizes& s = c.sizes;
  way whole{.how = spec::strategy::unfused};
  if (chip != nullptr && !c.backward) whole = unfused(c, *chip);
  else whole.bytes = s.x_bytes() + s.matrix_bytes() + (c.backward ? 4 : 2) * s.result_bytes();
  const int64 chunk = chunk_rows(s, chip == nullptr), chunks = ceil_div(std::max<int64>(s.rows, 1), chunk);
  whole.rank = 1;
  way chunked = whole;
  chunked.how = spec::strategy::chunked, chunked.by = implementation::chunks;
  chunked.why_not = spec::why_not_chunked(c.of);
  chunked.bytes += (chunks - 1) * s.matrix_bytes();
  chunked.seconds += static_cast<double>(chunks - 1) * kSpeed.call;
  chunked.rank = chunks > 1 ? 0 : 2;
  return {whole, chunked};
}

std::vector<way> linear_ways(const call& c, const device_facts& chip) {
  if (spec::gives_numbers(c.of)) return ways_to_numbers(c, &chip);
  if (c.backward) return linear_gradient_ways(c, false);
  return {unfused(c, chip),
          tiled(c.of, c.sizes, chip, false),
          tiled(c.of, c.sizes, chip, true),
          small_m(c.of, c.sizes, chip),
          small_k(c.of, c.sizes, chip),
          small_n(c.of, c.sizes, chip)};
}

}  // namespace onepass::choice
