// Backward of lines that begin with `scores` and end in softmax in one kernel: where it serves, and its launch.
#include "src/cuda/score_gradients.h"

#include <algorithm>
#include <bit>

#include "src/cuda/known_kernels.h"
#include "src/cuda/linear.h"
#include "src/cuda/packed_arguments.h"
#include "src/cuda/source.h"
#include "src/cuda/tuning.h"

namespace onepass::cuda {
namespace {

constexpr score_gradients_tuning kTuned{};
constexpr int kThreads = 3 * kGroupThreads, kStages = 2, kWarps = 8, kPartRows = kGroupRows + 8;  // as in the skeleton

int tile_of(int64 depth) { return kTuned.keys / panels_of(depth); }
int cluster_of(int64 depth, int64 keys) {
  return std::max(2, static_cast<int>(std::bit_ceil(static_cast<uint64>(ceil_div(keys, tile_of(depth))))));
}

// Of so many blocks, how many clusters run at a time: the SMs that share a crossbar are not always sixteen.
int clusters_at_a_time(int cluster) {
  int count = 0;
  for (const int of : kTuned.sms) count += of / cluster;
  return count;
}

}  // namespace

std::string why_not_score_gradients(const score_sizes& of, dtype type, const device_facts& chip) {
  if (chip.arch != 90) return "its kernel is for compute capability 9.0";
  if (type != dtype::bf16 && type != dtype::f16) return "its kernel is for bfloat16 and float16";
  if (of.depth % kTileLanes != 0 || of.keys % kTileLanes != 0) return "rows must be multiples of 8 numbers";
  if (of.depth > kTuned.depth) return "it is for rows of at most " + std::to_string(kTuned.depth) + " numbers";
  const int cluster = cluster_of(of.depth, of.keys);
  if (cluster > std::min(chip.cluster, kTuned.cluster)) return "a cluster has no room for a row";
  const auto turns = static_cast<double>(ceil_div(of.batches, clusters_at_a_time(cluster))),
             strips = static_cast<double>(of.group * ceil_div(of.rows, kGroupRows)),
             weights = static_cast<double>(of.batches * of.group * of.rows * of.keys);
  const double strip = panels_of(of.depth) == 1 ? kTuned.strip : kTuned.strip_of_deep;
  if (turns * (kTuned.start + strips * strip) > kTuned.three_launches + weights * kTuned.weight)
    return "softmax's kernel and two products are faster";
  return "";
}

bool fits(const score_gradients_call& call) {
  return fits(call.queries) && fits(call.keys) && fits(call.weights) && fits(call.gradients);
}

score_gradients_plan plan_score_gradients(const score_gradients_call& call) {
  const int panels = panels_of(call.queries.depth), tile = tile_of(call.queries.depth),
            cluster = cluster_of(call.queries.depth, call.keys.rows);
  const int strip = tile / 64 * kPanelBytes, queries = panels * kPanelBytes, keys = tile / 64 * queries,
            sums = kGroupRows * (panels * 64 + 8) * 4, products = cluster * kPartRows * 4;
  return {.tile = tile,
          .cluster = cluster,
          .grid = static_cast<unsigned>(call.queries.outer * call.queries.inner * cluster),
          .threads = kThreads,
          .shared_bytes = static_cast<unsigned>(1024 + kStages * (2 * strip + queries) + keys + 2 * (sums + products))};
}

std::string source(const score_gradients_call& call, const score_gradients_plan& p) {
  return "#include \"onepass/skeleton/score_gradients.cuda.h\"\nONEPASS_BEGIN\nstruct config {\n" +
         type_field("kX", call.type) + number_field("kPanels", panels_of(call.queries.depth)) +
         number_field("kTile", p.tile) + number_field("kCluster", p.cluster) +
         "};\nextern \"C\" __global__ void __launch_bounds__(" + std::to_string(p.threads) + ", 1) " +
         "__cluster_dims__(" + std::to_string(p.cluster) + ", 1, 1) " + kKernelName +
         "(const __grid_constant__ score_gradient_arguments a) {\n  gradients_of_scores<config>(a);\n}\nONEPASS_END\n";
}

bool launch_score_gradients(const score_gradients_call& call, int device, void* stream) {
  const score_gradients_plan p = plan_score_gradients(call);
  static known_kernels known;
  const kernel_key key(device, call.type, p.tile, p.cluster);
  const kernel& built = known.find_or_build(key, [&]() -> const kernel& {
    return load(source(call, p), kKernelName, device, stream,
                facts(device).arch_name + " score gradients " + name_of(call.type));
  });
  if (p.cluster > kPortableCluster && active_clusters(built, p.cluster, p.threads, p.shared_bytes) == 0) return false;
  struct alignas(tensor_map) score_gradient_arguments {
    tensor_map queries, keys, weights, gradients;
    batch_steps step_queries, step_keys, step_weights, step_gradients;
    int inner, group, rows, columns;
    void *rows_gradient, *keys_gradient;
    int64 depth;
    float factor;
  };
  const auto map = [&](const batched_rows& of) { return map_of_rows(built, of, call.type == dtype::bf16); };
  const score_gradient_arguments a{map(call.queries),
                                   map(call.keys),
                                   map(call.weights),
                                   map(call.gradients),
                                   batch_steps(call.queries),
                                   batch_steps(call.keys),
                                   batch_steps(call.weights),
                                   batch_steps(call.gradients),
                                   static_cast<int>(call.queries.inner),
                                   static_cast<int>(call.queries.group),
                                   static_cast<int>(call.queries.rows),
                                   static_cast<int>(call.keys.rows),
                                   call.to_queries,
                                   call.to_keys,
                                   call.queries.depth,
                                   call.factor};
  launch(built, {p.grid, 1}, {p.threads, 1}, p.shared_bytes, true, stream, &a);
  return true;
}

}  // namespace onepass::cuda
