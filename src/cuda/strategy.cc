// Which way a line with `linear` takes on CUDA: what each way moves, and how long it takes by measured rates.
#include "src/cuda/strategy.h"

#include <algorithm>

#include "src/cuda/attention/forward_sm90.h"
#include "src/cuda/attention/probabilities_sm90.h"
#include "src/cuda/linear/gemm_sm90.h"
#include "src/cuda/linear/small_k.h"
#include "src/cuda/attention/forward_sm80.h"
#include "src/cuda/linear/small_m.h"
#include "src/cuda/linear/small_n.h"
#include "src/cuda/linear/tuning.h"
#include "src/cuda/tuning.h"

namespace onepass::cuda {

using spec::linear_case;
using spec::prediction;

namespace {

constexpr linear_speed kSpeed{};
constexpr attention_speed kAttention{};

// Tensors of the line's size that it reads beside what enters it, or writes beside its result.
int64 other_tensors(const spec::line& line) {
  const auto is_tensor = [](const spec::word& w) { return w.about->operand == operand_kind::tensor; };
  return line.keeps + std::count_if(line.words.begin(), line.words.end(), is_tensor);
}

int flops_of(const spec::line& line) {
  int flops = 0;
  for (const spec::word& w : line.words) flops += w.about->flops_forward;
  return flops;
}

double seconds_for(int64 bytes, const device_facts& chip) { return static_cast<double>(bytes) / chip.bytes_per_second; }

prediction unfused(const spec::contraction& of, const linear_case& c, const device_facts& chip) {
  const int64 x = c.x_bytes(), y = c.result_bytes(), matrix = c.matrix_bytes();
  const bool short_numbers = size_of(c.type) == 2;
  prediction p{spec::strategy::unfused, x + matrix + y, 0, ""};
  const double flops = 2.0 * static_cast<double>(c.rows * c.columns) * static_cast<double>(c.depth);
  p.seconds =
      kSpeed.call + std::max(flops / (short_numbers ? kSpeed.flops : kSpeed.flops_wide), seconds_for(p.bytes, chip));
  const auto pass = [&](int64 bytes) {
    p.bytes += bytes;
    p.seconds += kSpeed.launch + seconds_for(bytes, chip);
  };
  if (!of.before.words.empty()) pass((2 + other_tensors(of.before)) * x);
  if (!of.behind.words.empty() && !spec::is_one_bias(of.behind)) pass((2 + other_tensors(of.behind)) * y);
  return p;
}

std::string why_not_short(const linear_case& c) {
  if (c.type != dtype::bf16 && c.type != dtype::f16) return "its kernel is for bfloat16 and float16";
  if (c.depth % kTileLanes != 0 || c.columns % kTileLanes != 0) return "rows must be multiples of 8 numbers";
  return "";
}

std::string why_not_tiled(const linear_case& c, const device_facts& chip) {
  return chip.arch != 90 ? "its kernel is for compute capability 9.0" : why_not_short(c);
}

std::string why_not_deferred(const spec::contraction& of) {
  return of.norm.is_one ? "" : "only a norm, with scale and bias or without, can be deferred";
}

// In one kernel, with a norm deferred or no words before `linear`.
prediction tiled(const spec::contraction& of, const linear_case& c, const device_facts& chip, bool defers) {
  const int64 x = c.x_bytes(), y = c.result_bytes(), matrix = c.matrix_bytes();
  prediction p{defers ? spec::strategy::deferred : spec::strategy::tiled, x + y + matrix};
  p.why_not = why_not_tiled(c, chip);
  if (p.why_not.empty() && defers) p.why_not = why_not_deferred(of);
  else if (p.why_not.empty() && !of.before.words.empty())
    p.why_not = "nothing may stand before 'linear' (a norm there: 'deferred')";
  p.bytes += (defers ? 2 * matrix : 0) + (other_tensors(of.behind) + c.saves_product) * y;
  if (!p.why_not.empty()) return p;
  const tile_plan tiles = plan_tiles(c.rows, c.columns, defers, flops_of(of.behind), chip);
  const auto turns = static_cast<double>(tiles.turns), columns = turns * tiles.tile.columns,
             depth = static_cast<double>(c.depth);
  double products = columns * depth * kSpeed.tile_column;
  double before = 0, beside = columns * kSpeed.finish_column;  // the kernel's other work
  if (defers) {
    before = kSpeed.launch + seconds_for(2 * matrix, chip);
    products += columns * kSpeed.norm_column;
    if (needs_statistics(c.columns)) p.bytes += x, before += kSpeed.launch + seconds_for(x, chip);
    else beside += turns * (depth * kSpeed.moments + kSpeed.moments_turn);
  }
  p.seconds = kSpeed.call + before + std::max({products, beside, seconds_for(p.bytes, chip)});
  return p;
}

// In one kernel whose warps multiply: everything crosses memory once.
prediction by_warps(spec::strategy how, const spec::contraction& of, const linear_case& c, const std::string& why_not) {
  const int64 x = c.x_bytes(), y = c.result_bytes();
  prediction p{how, x + y + c.matrix_bytes()};
  p.bytes += other_tensors(of.before) * x + (other_tensors(of.behind) + c.saves_product) * y;
  p.why_not = why_not_short(c);
  if (p.why_not.empty()) p.why_not = why_not;
  return p;
}

// Its blocks make all rows and share the matrix.
prediction streamed(const spec::contraction& of, const linear_case& c, const device_facts& chip) {
  prediction p = by_warps(spec::strategy::streamed, of, c, why_not_streamed(c.rows, c.depth, chip));
  if (!p.why_not.empty() || chip.arch != 90) return p;  // other chips have not been measured
  const streamed_rows way = take_rows(c.rows, c.depth, chip);
  const auto numbers = static_cast<double>(ceil_div(c.rows, way.at_once) * way.numbers);
  const double rate = std::min(kSpeed.streamed_bytes, way.steps_ahead * kSpeed.streamed_ahead);
  p.seconds = kSpeed.streamed_call + numbers * kSpeed.streamed_number + static_cast<double>(p.bytes) / rate;
  return p;
}

// Its blocks keep the matrix and share the rows.
prediction resident(const spec::contraction& of, const linear_case& c, const device_facts& chip) {
  prediction p = by_warps(spec::strategy::resident, of, c, why_not_resident(c.depth, c.columns, chip));
  if (!p.why_not.empty() || chip.arch != 90) return p;  // other chips have not been measured
  const auto numbers = static_cast<double>(c.rows * c.depth), products = numbers * static_cast<double>(c.columns);
  p.seconds = kSpeed.resident_call + std::max(numbers * kSpeed.resident_number + products * kSpeed.resident_product,
                                              seconds_for(p.bytes, chip));
  return p;
}

// Time of so many scores, of batches that blocks of so many rows share.
double seconds_of_scores(const linear_case& c, int64 block, double each, double each_block) {
  const int64 batches = std::max<int64>(c.matrices, 1);
  const auto blocks = static_cast<double>(batches * ceil_div(ceil_div(c.rows, batches), block));
  return blocks * (each_block + each * static_cast<double>(block * c.columns));
}

// In one kernel: by a cluster, by tiles, or by warps, the first that can.
double seconds_of_scores(const spec::contraction& of, const linear_case& c, const device_facts& chip) {
  const request behind(of.behind, false);
  const int64 matrices = std::max<int64>(c.matrices, 1), tensors = other_tensors(of.behind);
  const auto each = [&](double score, double score_depth, double score_tensor) {
    return score + score_depth * static_cast<double>(c.depth) + score_tensor * static_cast<double>(tensors);
  };
  if (!why_not_attention(of.behind, c.depth, 0, c.columns, c.type, chip).empty())
    return seconds_of_scores(c, rows_of_block(c.depth),
                             each(kAttention.score, kAttention.score_depth, kAttention.score_tensor), 0);
  if (why_not_held(behind, c.depth, c.columns, spec::is_causal(of.behind), chip, c.key_masks).empty())
    return seconds_of_held(behind, matrices, c.rows / matrices, c.depth, c.columns, tensors, chip, c.key_masks);
  return seconds_of_scores(c, rows_of_attention(c.depth, 0),
                           each(kAttention.tile_score, kAttention.tile_score_depth, kAttention.tile_score_tensor),
                           kAttention.tile_block);
}

// Its threads contract the rows that they have.
prediction dots(const spec::contraction& of, const linear_case& c, const device_facts& chip) {
  const int64 x = c.x_bytes(), y = c.result_bytes();
  prediction p{spec::strategy::dots, x + y + c.matrix_bytes()};
  p.bytes += other_tensors(of.before) * x + (other_tensors(of.behind) + c.saves_product) * y;
  p.why_not = spec::why_not_dots(of, c.columns);
  if (p.why_not.empty() && c.depth > kMostDotsColumns)
    p.why_not = "it is for rows of at most " + std::to_string(kMostDotsColumns) + " numbers";
  if (!p.why_not.empty()) return p;
  const auto numbers = static_cast<double>(c.rows * c.depth), products = numbers * static_cast<double>(c.columns);
  p.seconds = kSpeed.dots_call + std::max(seconds_for(p.bytes, chip), products * kSpeed.dots_product);
  return p;
}

// Scores stay in registers; keys pass by twice, or once where a cluster holds a row.
prediction scores(const spec::contraction& of, const linear_case& c, const device_facts& chip) {
  prediction p{.how = spec::strategy::resident};
  p.bytes = c.x_bytes() + c.matrix_bytes() + (1 + other_tensors(of.behind)) * c.result_bytes();
  p.why_not = why_not_scores(of, c.depth, c.type, chip);
  if (!p.why_not.empty() || chip.arch != 90) return p;  // other chips have not been measured
  p.seconds = kSpeed.launch + std::max(seconds_of_scores(of, c, chip), seconds_for(p.bytes, chip));
  return p;
}

}  // namespace

std::vector<prediction> predict(const spec::contraction& of, const linear_case& c, const device_facts& chip) {
  if (of.scores) return {unfused(of, c, chip), scores(of, c, chip)};
  return {unfused(of, c, chip),  tiled(of, c, chip, false), tiled(of, c, chip, true),
          streamed(of, c, chip), resident(of, c, chip),     dots(of, c, chip)};
}

std::vector<prediction> predict_attention(const spec::contraction& of, const linear_case& c, const device_facts& chip) {
  std::vector<prediction> all{best(predict(of, c, chip)), {.how = spec::strategy::streamed}};
  prediction &written = all[0], &streamed = all[1];
  const int64 rest = c.matrix_bytes() + c.x_bytes();  // the values and the result
  written.how = spec::strategy::unfused;
  written.bytes += c.result_bytes() + rest;
  written.seconds += kSpeed.call + seconds_for(c.result_bytes() + rest, chip);
  streamed.bytes = c.x_bytes() + c.matrix_bytes() + rest + other_tensors(of.behind) * c.result_bytes();
  const auto depth = static_cast<double>(c.depth), tensors = static_cast<double>(other_tensors(of.behind));
  if (why_not_attention(of.behind, c.depth, c.depth, c.columns, c.type, chip).empty()) {
    const double each = kAttention.attended + kAttention.attended_depth * depth + kAttention.attended_tensor * tensors;
    streamed.seconds = kSpeed.launch + seconds_of_scores(c, rows_of_attention(c.depth, c.depth), each, 0);
    return all;
  }
  streamed.why_not = why_not_warp_attention(of, c.depth, c.depth, c.type, chip);
  if (!streamed.why_not.empty() || chip.arch != 90) return all;  // other chips have not been measured
  // Of more numbers threads have half as many rows, for which a key is read as often.
  const int shares = c.depth > kScoresTuning.depth_of_four ? 2 : 1;
  const double each = shares * (kAttention.warp_attended + kAttention.warp_attended_depth * depth) +
                      kAttention.warp_attended_tensor * tensors;
  streamed.seconds = kSpeed.launch + seconds_of_scores(c, rows_of_block(c.depth, c.depth), each, 0);
  return all;
}

const prediction& best(const std::vector<prediction>& all) {
  return *std::min_element(all.begin(), all.end(),
                           [](const prediction& a, const prediction& b) { return a.seconds < b.seconds; });
}

}  // namespace onepass::cuda
