// The ways of lines with `scores` on CUDA, with `values` or without, forward and backward: the bytes that each moves,
// and its predicted time by measured rates.
#include <algorithm>

#include "src/choose/chip_model.h"
#include "src/choose/ways.h"
#include "src/cuda/attention/backward.h"
#include "src/cuda/attention/forward_sm80.h"
#include "src/cuda/attention/forward_sm90.h"
#include "src/cuda/attention/probabilities_backward.h"
#include "src/cuda/attention/probabilities_sm90.h"
#include "src/cuda/attention/tuning.h"

namespace onepass::choice {

using cuda::device_facts;

namespace {

constexpr const cuda::attention_speed& kSpeed = cuda::kAttentionSpeed;

int64 matrices_of(const sizes& c) { return std::max<int64>(c.matrices, 1); }
int64 value_bytes(const call& c) {
  return (c.sizes.matrices * c.sizes.columns + c.sizes.rows) * c.value_depth * size_of(c.sizes.type);
}

// Rates of one kernel: seconds of a score, of a score for each element of head_dim, and for each tensor beside it.
struct rates {
  double score, element, tensor;
  double each(const call& c) const {
    return score + element * static_cast<double>(c.sizes.depth) +
           tensor * static_cast<double>(other_tensors(c.of.behind));
  }
};

// Time of all scores, in blocks of `block` rows of one batch.
double seconds_of_scores(const sizes& c, int64 block, double each, double each_block = 0) {
  const int64 batches = matrices_of(c);
  const auto blocks = static_cast<double>(batches * cuda::ceil_div(cuda::ceil_div(c.rows, batches), block));
  return blocks * (each_block + each * static_cast<double>(block * c.columns));
}

// The same for kernels of warp-level mma, on any chip: mma and other instructions have rates of their own, and memory
// may be the limit. On chips that were not measured blocks come in waves, of as many as the chip has room for.
double seconds_by_warps(const call& c, int64 block, int blocks_per_sm, const rates& of, int64 bytes,
                        const device_facts& chip) {
  const chip_model on = model_of(chip);
  const rates here{of.score * on.issue, of.element * on.mma, of.tensor * on.issue};
  double seconds = seconds_of_scores(c.sizes, block, here.each(c));
  if (!on.measured) {
    const int64 batches = matrices_of(c.sizes),
                blocks = batches * std::max<int64>(cuda::ceil_div(c.sizes.rows / batches, block), 1),
                places = int64{chip.sm_count} * blocks_per_sm, waves = cuda::ceil_div(blocks, places);
    seconds *= static_cast<double>(waves * places) / static_cast<double>(blocks);
  }
  return on.margin * (kSpeed.launch + std::max(seconds, seconds_for(bytes, chip)));
}

// Takes the first kernel that serves, where several have one strategy; the fastest stands first.
void take_first(std::vector<way>& all, const call& c) {
  bool taken = false;
  for (way& w : all) {
    if (w.how == spec::strategy::unfused) continue;
    if (w.serves()) w.why_not = why_not_in_one_kernel(c, w);
    if (w.serves() && taken) w.why_not = "another kernel does it faster";
    taken = taken || w.serves();
  }
}

// Forward without values: scores stay in registers; keys are read twice, or once by register-resident softmax.
std::vector<way> ways_of_scores(const call& c, const device_facts& chip) {
  const sizes& s = c.sizes;
  const way base{.how = spec::strategy::two_pass,
                 .bytes = s.x_bytes() + s.matrix_bytes() + (1 + other_tensors(c.of.behind)) * s.result_bytes()};
  way cluster = base, tiles = base, warps = base;
  cluster.by = implementation::cluster, cluster.kernel = "probabilities_forward_sm90";
  tiles.by = implementation::tiles, tiles.kernel = "attention_forward_sm90";
  warps.by = implementation::warps, warps.kernel = "probabilities_forward_sm80";
  const auto with_memory = [&](double seconds) {
    return kSpeed.launch + std::max(seconds, seconds_for(base.bytes, chip));
  };

  tiles.why_not = cuda::why_not_forward_sm90(c.of.behind, s.depth, 0, s.columns, s.type, chip);
  cluster.why_not = tiles.why_not;
  if (tiles.serves()) {
    const rates of{kSpeed.score_sm90, kSpeed.score_sm90_element, kSpeed.score_sm90_tensor};
    tiles.seconds = with_memory(seconds_of_scores(s, cuda::block_rows_sm90(s.depth, 0), of.each(c), kSpeed.tile_block));
    const cuda::request behind(c.of.behind, false);
    cluster.why_not =
        cuda::why_not_probabilities_sm90(behind, s.depth, s.columns, spec::is_causal(c.of.behind), chip, s.key_masks);
    if (cluster.serves())
      cluster.seconds =
          with_memory(cuda::seconds_of_probabilities_sm90(behind, matrices_of(s), s.rows / matrices_of(s), s.depth,
                                                          s.columns, other_tensors(c.of.behind), chip, s.key_masks));
  }
  warps.why_not = cuda::why_not_probabilities_sm80(c.of, s.depth, s.type, chip);
  if (warps.serves()) {
    const rates of{kSpeed.score_sm80, kSpeed.score_sm80_element, kSpeed.score_sm80_tensor};
    warps.seconds = seconds_by_warps(c, cuda::block_rows_sm80(s.depth), cuda::kForwardSm80Tuning.blocks_per_sm, of,
                                     base.bytes, chip);
  }
  std::vector<way> all{unfused(c, chip), cluster, tiles, warps};
  take_first(all, c);
  return all;
}

const way& fastest(const std::vector<way>& all) {
  return *std::min_element(all.begin(), all.end(), [](const way& a, const way& b) {
    return a.serves() && (!b.serves() || a.seconds < b.seconds);
  });
}

// Corrects the library's time, which has `products` GEMMs: they are slower where rows of 16-bit scores do not begin at
// multiples of 16 bytes. The launches' part of the time stays.
double with_odd_rows(double seconds, int products, const sizes& s) {
  if (size_of(s.type) != 2 || s.columns % 8 == 0) return seconds;
  const double launches = std::min(seconds, products * kSpeed.product + kSpeed.launch);
  return launches + (seconds - launches) * kSpeed.odd_product;
}

// A way that writes something of the scores' size was never faster on the chip that was measured.
void rank(std::vector<way>& all, const device_facts& chip) {
  if (!model_of(chip).measured) return;
  for (way& w : all) w.rank = w.by == implementation::tiles ? 0 : w.by == implementation::warps ? 1 : 2;
}

// Forward with values.
std::vector<way> ways_of_values(const call& c, const device_facts& chip) {
  const sizes& s = c.sizes;
  call of_scores = c;
  of_scores.values = false, of_scores.named = spec::strategy::automatic, of_scores.unfit = 0;
  way library = fastest(ways_of_scores(of_scores, chip));
  library.how = spec::strategy::unfused, library.by = implementation::library, library.kernel = "";
  const int64 rest = s.result_bytes() + value_bytes(c);
  library.bytes += rest;
  library.seconds = with_odd_rows(library.seconds + kSpeed.product + seconds_for(rest, chip), 2, s);

  const way base{
      .how = spec::strategy::flash,
      .bytes = s.x_bytes() + s.matrix_bytes() + value_bytes(c) + other_tensors(c.of.behind) * s.result_bytes(),
      .why_not = c.gives_more ? "what is kept must be written" : ""};
  way tiles = base, warps = base;
  tiles.by = implementation::tiles, tiles.kernel = "attention_forward_sm90";
  warps.by = implementation::warps, warps.kernel = "attention_forward_sm80";
  if (base.serves()) {
    tiles.why_not = cuda::why_not_forward_sm90(c.of.behind, s.depth, c.value_depth, s.columns, s.type, chip);
    warps.why_not = cuda::why_not_attention_sm80(c.of, s.depth, c.value_depth, s.type, chip);
  }
  const rates by_tiles{kSpeed.attention_sm90, kSpeed.attention_sm90_element, kSpeed.attention_sm90_tensor};
  if (tiles.serves())
    tiles.seconds =
        kSpeed.launch + seconds_of_scores(s, cuda::block_rows_sm90(s.depth, c.value_depth), by_tiles.each(c));
  // For a large head_dim threads have half as many rows, so that keys are read twice as often.
  const int shares = std::max(s.depth, c.value_depth) > cuda::kForwardSm80Tuning.head_dim_of_four_rows ? 2 : 1;
  const rates by_warps{shares * kSpeed.attention_sm80, shares * kSpeed.attention_sm80_element,
                       kSpeed.attention_sm80_tensor};
  if (warps.serves())
    warps.seconds = seconds_by_warps(c, cuda::block_rows_sm80(s.depth, c.value_depth),
                                     cuda::kForwardSm80Tuning.blocks_with_values, by_warps, base.bytes, chip);
  std::vector<way> all{library, tiles, warps};
  rank(all, chip);
  return all;
}

// Backward without values: softmax's kernel and two GEMMs, or one kernel.
std::vector<way> gradient_ways_of_scores(const call& c, const device_facts& chip) {
  const sizes& s = c.sizes;
  const int64 matrices = matrices_of(s), query_heads = std::max<int64>(s.group, 1);
  const cuda::probabilities_sizes of{matrices, query_heads, s.rows / matrices / query_heads, s.depth, s.columns};
  const int64 inputs = 2 * (s.x_bytes() + s.matrix_bytes());
  way library{.how = spec::strategy::unfused, .bytes = inputs + 5 * s.result_bytes()},
      cluster{.how = spec::strategy::two_pass,
              .by = implementation::cluster,
              .bytes = inputs + 2 * s.result_bytes(),
              .kernel = "probabilities_backward_sm90"};
  if (c.gives_more) cluster.why_not = "it gives the gradients of queries and keys, both and no other";
  else if (!spec::softmax_scale(c.of.behind)) cluster.why_not = "it is for softmax behind words that scale or mask";
  else cluster.why_not = cuda::why_not_probabilities_backward(of, s.type, chip);
  library.seconds = cuda::seconds_of_softmax_and_products(of, chip);
  if (cluster.serves()) cluster.seconds = cuda::seconds_of_probabilities_backward(of, chip);
  return {library, cluster};
}

// Backward with values: recomputed probabilities and four GEMMs, or two kernels.
std::vector<way> gradient_ways_of_values(const call& c, const device_facts& chip) {
  const sizes& s = c.sizes;
  call recompute = c;
  recompute.values = recompute.backward = false, recompute.named = spec::strategy::automatic, recompute.unfit = 0;
  const way weights = fastest(ways_of_scores(recompute, chip));
  const int64 inputs = 2 * (s.x_bytes() + s.matrix_bytes() + value_bytes(c)), tensors = other_tensors(c.of.behind);
  way library{.how = spec::strategy::unfused, .bytes = weights.bytes + inputs + (7 + tensors) * s.result_bytes()};
  library.seconds = weights.seconds + 5 * kSpeed.product + seconds_for(library.bytes - weights.bytes, chip);
  library.seconds = with_odd_rows(library.seconds, 6, s);

  const way base{.how = spec::strategy::flash,
                 .bytes = 2 * inputs + 2 * tensors * s.result_bytes(),
                 .why_not = c.gives_more ? "the weights or their gradients must be written" : ""};
  way tiles = base, warps = base;
  tiles.by = implementation::tiles, tiles.kernel = "attention_backward_queries_sm90";
  warps.by = implementation::warps, warps.kernel = "attention_backward_queries_sm80";
  if (base.serves()) {
    tiles.why_not = cuda::why_not_forward_sm90(c.of.behind, s.depth, c.value_depth, s.columns, s.type, chip);
    if (tiles.serves()) tiles.why_not = cuda::why_not_backward_sm90(s.depth, c.value_depth);
    warps.why_not = cuda::why_not_backward_sm80(c.of, s.depth, c.value_depth, s.type, chip);
  }
  constexpr int kRows = 64, kBlocksPerSm = 2;  // of a block of either kernel; backward_sm80
  const rates by_tiles{kSpeed.backward_sm90, kSpeed.backward_sm90_element, kSpeed.backward_sm90_tensor},
      by_warps{kSpeed.backward_sm80, kSpeed.backward_sm80_element, kSpeed.backward_sm80_tensor};
  if (tiles.serves()) tiles.seconds = 2 * kSpeed.launch + seconds_of_scores(s, kRows, by_tiles.each(c));
  if (warps.serves())
    warps.seconds = kSpeed.launch + seconds_by_warps(c, kRows, kBlocksPerSm, by_warps, base.bytes, chip);
  std::vector<way> all{library, tiles, warps};
  rank(all, chip);
  return all;
}

}  // namespace

std::vector<way> attention_ways(const call& c, const device_facts& chip) {
  if (c.backward) return c.values ? gradient_ways_of_values(c, chip) : gradient_ways_of_scores(c, chip);
  return c.values ? ways_of_values(c, chip) : ways_of_scores(c, chip);
}

}  // namespace onepass::choice
