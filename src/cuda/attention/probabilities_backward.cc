// Backward of lines that begin with `scores` and end in softmax in one kernel: where it serves, and its launch.
#include "src/cuda/attention/probabilities_backward.h"

#include <algorithm>
#include <bit>

#include "src/cuda/runtime/known_kernels.h"
#include "src/cuda/linear/gemm_sm90.h"
#include "src/cuda/runtime/packed_arguments.h"
#include "src/cuda/runtime/source.h"
#include "src/cuda/attention/tuning.h"

namespace onepass::cuda {
namespace {

constexpr score_gradients_tuning kTuned{};
constexpr unsigned kPartThreads = 256;

// Few keys have smaller blocks, and more strips on their way to them.
int tile_of(int64 depth, int64 keys) {
  return keys <= kTuned.few_keys ? kTuned.few_keys : kTuned.keys / panels_of(depth);
}
int cluster_of(int64 depth, int64 keys) {
  return static_cast<int>(std::bit_ceil(static_cast<uint64>(ceil_div(keys, tile_of(depth, keys)))));
}

// Of so many blocks, how many clusters run at a time: the SMs that share a crossbar are not always sixteen.
int clusters_at_a_time(int cluster) {
  int count = 0;
  for (const int of : kTuned.sms) count += of / cluster;
  return count;
}

int64 strips_of_batch(const score_sizes& of) { return of.group * ceil_div(of.rows, kWarpgroupRows); }
score_sizes sizes_of(const score_gradients_call& call) {
  return {call.queries.outer * call.queries.inner, call.queries.group, call.queries.rows, call.queries.depth,
          call.keys.rows};
}
double seconds_of(const score_sizes& of, const shared_clusters& with) {
  const double parts = with.parts == 0 ? 0.0 : kTuned.second_launch + static_cast<double>(with.parts) * kTuned.part;
  const int panels = panels_of(of.depth);
  const bool sixteen = cluster_of(of.depth, of.keys) == kTuned.cluster, few = of.keys <= kTuned.few_keys;
  const double wide = sixteen ? kTuned.strip_of_sixteen : kTuned.strip_of_wide,
               narrow = few ? kTuned.strip_of_few : kTuned.strip, strip = panels > 1 ? wide : narrow,
               few_keys = few ? kTuned.few_keys_of_batch * static_cast<double>(panels * of.keys) : 0.0;
  return kTuned.start + static_cast<double>(ceil_div(of.batches * strips_of_batch(of), with.count)) * strip +
         static_cast<double>(ceil_div(of.batches, with.count)) * few_keys + parts;
}

// That memory takes for so many bytes of each weight, and for queries, keys and their gradients.
double seconds_of_memory(const score_sizes& of, double weight_bytes, const device_facts& chip) {
  const int64 rows = of.group * of.rows;
  return static_cast<double>(of.batches) *
         (static_cast<double>(rows * of.keys) * weight_bytes + static_cast<double>((rows + of.keys) * of.depth) * 4) /
         chip.bytes_per_second;
}

}  // namespace

std::string why_not_score_gradients(const score_sizes& of, dtype type, const device_facts& chip) {
  if (chip.arch != 90) return "its kernel is for compute capability 9.0";
  if (type != dtype::bf16 && type != dtype::f16) return "its kernel is for bfloat16 and float16";
  if (of.depth % kTileLanes != 0 || of.keys % kTileLanes != 0) return "rows must be multiples of 8 numbers";
  if (of.depth > kTuned.depth) return "it is for rows of at most " + std::to_string(kTuned.depth) + " numbers";
  if (cluster_of(of.depth, of.keys) > std::min(chip.cluster, kTuned.cluster)) return "a cluster has no room for a row";
  return "";
}

// Of a weight one kernel reads 2 numbers, it and its gradient; three read and write 5.
double seconds_of_score_gradients(const score_sizes& of, const device_facts& chip) {
  const int room = clusters_at_a_time(cluster_of(of.depth, of.keys));
  return std::max(seconds_of(of, share_strips(of, room)),
                  kTuned.start + seconds_of_memory(of, 4, chip) / kTuned.share_of_copy);
}
double seconds_of_softmax_and_products(const score_sizes& of, const device_facts& chip) {
  return kTuned.three_launches + seconds_of_memory(of, 10, chip);
}

bool fits(const score_gradients_call& call) {
  return fits(call.queries) && fits(call.keys) && fits(call.weights) && fits(call.gradients);
}

score_gradients_plan plan_score_gradients(const score_gradients_call& call) {
  const int panels = panels_of(call.queries.depth), tile = tile_of(call.queries.depth, call.keys.rows),
            cluster = cluster_of(call.queries.depth, call.keys.rows);
  const probabilities_backward_shape shape{panels, tile, cluster, cluster == 1 && tile <= 128 ? 3 : 2};
  return {.tile = tile,
          .cluster = cluster,
          .stages = shape.stages,
          .threads = shape.kThreads,
          .shared_bytes = static_cast<unsigned>(shape.shared_bytes())};
}

// Evenly, or where that is no faster a batch for each, so that none is shared.
shared_clusters share_strips(const score_sizes& of, int room) {
  const int64 strips = strips_of_batch(of);
  const auto with = [&](int64 count) {
    const bool shares = of.batches % count != 0;
    return shared_clusters{static_cast<int>(count), shares ? 2 * count * of.keys * of.depth : 0};
  };
  const shared_clusters even = with(std::clamp<int64>(room, 1, of.batches * strips)), own = with(of.batches);
  return of.batches <= room && seconds_of(of, own) <= seconds_of(of, even) ? own : even;
}

std::string source(const score_gradients_call& call, const score_gradients_plan& p) {
  return "#include \"onepass/kernel/attention/probabilities_backward_sm90.cuda.h\"\nONEPASS_BEGIN\nstruct config {\n" +
         type_field("kX", call.type) + number_field("kAtoms", panels_of(call.queries.depth)) +
         number_field("kTile", p.tile) + number_field("kCluster", p.cluster) + number_field("kStages", p.stages) +
         "};\n" +
         kernel_text("probabilities_backward_sm90", "config", bounds(static_cast<int>(p.threads), 1, p.cluster),
                     "probabilities_backward_arguments") +
         "ONEPASS_END\n";
}

std::string key_parts_source(dtype type) {
  return "#include \"onepass/kernel/attention/probabilities_backward_sm90.cuda.h\"\nONEPASS_BEGIN\n" +
         kernel_text("add_key_gradients", std::string("dtype::") + name_of(type), bounds(kPartThreads),
                     "probabilities_backward_arguments") +
         "ONEPASS_END\n";
}

bool launch_score_gradients(const score_gradients_call& call, const std::function<void*(int64 count)>& room_for,
                            int device, void* stream) {
  const score_gradients_plan p = plan_score_gradients(call);
  const std::string label = facts(device).arch_name + " score gradients " + name_of(call.type);
  static known_kernels known;
  const kernel& built =
      known.find_or_build(kernel_key(device, call.type, panels_of(call.queries.depth), p.tile, p.cluster, p.stages),
                          [&]() -> const kernel& { return load(source(call, p), device, stream, label); });
  const int room = active_clusters(built, p.cluster, p.threads, p.shared_bytes);
  if (room == 0) return false;
  const score_sizes sizes = sizes_of(call);
  const shared_clusters clusters = share_strips(sizes, room);
  const auto map = [&](const batched_rows& of) { return map_of_rows(built, of, call.type == dtype::bf16); };
  const probabilities_backward_arguments a{
      .queries = map(call.queries),
      .keys = map(call.keys),
      .weights = map(call.weights),
      .gradients = map(call.gradients),
      .step_queries = steps_of(call.queries),
      .step_keys = steps_of(call.keys),
      .step_weights = steps_of(call.weights),
      .step_gradients = steps_of(call.gradients),
      .batches = static_cast<int>(sizes.batches),
      .inner = static_cast<int>(call.queries.inner),
      .group = static_cast<int>(sizes.group),
      .rows = static_cast<int>(sizes.rows),
      .columns = static_cast<int>(sizes.keys),
      .clusters = clusters.count,
      .rows_gradient = call.to_queries,
      .keys_gradient = call.to_keys,
      .key_parts = clusters.parts == 0 ? nullptr : static_cast<float*>(room_for(clusters.parts)),
      .depth = sizes.depth,
      .factor = call.factor};
  launch(built, {static_cast<unsigned>(clusters.count * p.cluster), 1}, {p.threads, 1}, p.shared_bytes, true, stream,
         &a);
  if (clusters.parts == 0) return true;
  const kernel& adds = known.find_or_build(kernel_key(device, call.type), [&]() -> const kernel& {
    return load(key_parts_source(call.type), device, stream, label + ", parts");
  });
  const int64 quads = sizes.keys * sizes.depth / 4;
  launch(adds, {static_cast<unsigned>(sizes.batches), static_cast<unsigned>(ceil_div(quads, kPartThreads))},
         {kPartThreads, 1}, 0, true, stream, &a);
  return true;
}

}  // namespace onepass::cuda
