// Launcher of probabilities' backward: when it can take a call, its predicted time, plan, source and launch.
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

constexpr probabilities_backward_tuning kTuned{};
constexpr unsigned kReduceThreads = 256;

// Few keys have smaller blocks, with more row tiles in flight.
int tile_of(int64 head_dim, int64 keys) {
  return keys <= kTuned.few_keys ? kTuned.few_keys : kTuned.keys / atoms_of(head_dim);
}
int cluster_of(int64 head_dim, int64 keys) {
  return static_cast<int>(std::bit_ceil(static_cast<uint64>(ceil_div(keys, tile_of(head_dim, keys)))));
}

// Clusters of `cluster` blocks that run at a time: a GPC does not always have sixteen SMs.
int clusters_at_a_time(int cluster) {
  int count = 0;
  for (const int of : kTuned.sms) count += of / cluster;
  return count;
}

int64 row_tiles_of_batch(const probabilities_sizes& of) { return of.query_heads * ceil_div(of.rows, kWarpgroupRows); }
probabilities_sizes sizes_of(const probabilities_backward_call& call) {
  return {call.queries.outer * call.queries.inner, call.queries.query_heads, call.queries.rows, call.queries.head_dim,
          call.keys.rows};
}
double seconds_of(const probabilities_sizes& of, const cluster_schedule& with) {
  const double partial_elements = with.partial_elements == 0
                                      ? 0.0
                                      : kTuned.second_launch + static_cast<double>(with.partial_elements) * kTuned.part;
  const int atoms = atoms_of(of.head_dim);
  const bool sixteen = cluster_of(of.head_dim, of.keys) == kTuned.cluster, few = of.keys <= kTuned.few_keys;
  const double wide = sixteen ? kTuned.row_tile_of_sixteen_blocks : kTuned.row_tile_of_large_head_dim,
               narrow = few ? kTuned.row_tile_of_few_keys : kTuned.row_tile, row_tile = atoms > 1 ? wide : narrow,
               few_keys = few ? kTuned.few_keys_of_batch * static_cast<double>(atoms * of.keys) : 0.0;
  return kTuned.start + static_cast<double>(ceil_div(of.batches * row_tiles_of_batch(of), with.count)) * row_tile +
         static_cast<double>(ceil_div(of.batches, with.count)) * few_keys + partial_elements;
}

// Time to move `weight_bytes` for each probability, and queries, keys and their gradients.
double seconds_of_memory(const probabilities_sizes& of, double weight_bytes, const device_facts& chip) {
  const int64 rows = of.query_heads * of.rows;
  return static_cast<double>(of.batches) *
         (static_cast<double>(rows * of.keys) * weight_bytes +
          static_cast<double>((rows + of.keys) * of.head_dim) * 4) /
         chip.bytes_per_second;
}

}  // namespace

std::string why_not_probabilities_backward(const probabilities_sizes& of, dtype type, const device_facts& chip) {
  if (chip.arch != 90) return "its kernel is for compute capability 9.0";
  if (type != dtype::bf16 && type != dtype::f16) return "its kernel is for bfloat16 and float16";
  if (of.head_dim % kTileLanes != 0 || of.keys % kTileLanes != 0)
    return "head_dim and the number of keys must be multiples of 8";
  if (of.head_dim > kTuned.head_dim) return "it is for a head_dim of at most " + std::to_string(kTuned.head_dim);
  if (cluster_of(of.head_dim, of.keys) > std::min(chip.cluster, kTuned.cluster))
    return "a cluster has no room for a row";
  return "";
}

// The one kernel reads 2 elements of 2 bytes for each probability; the three kernels move 5.
double seconds_of_probabilities_backward(const probabilities_sizes& of, const device_facts& chip) {
  const int room = clusters_at_a_time(cluster_of(of.head_dim, of.keys));
  return std::max(seconds_of(of, schedule_row_tiles(of, room)),
                  kTuned.start + seconds_of_memory(of, 4, chip) / kTuned.share_of_copy);
}
double seconds_of_softmax_and_products(const probabilities_sizes& of, const device_facts& chip) {
  return kTuned.three_launches + seconds_of_memory(of, 10, chip);
}

bool fits(const probabilities_backward_call& call) {
  return fits(call.queries) && fits(call.keys) && fits(call.probabilities) && fits(call.grad_probabilities);
}

probabilities_backward_plan plan_probabilities_backward(const probabilities_backward_call& call) {
  const int atoms = atoms_of(call.queries.head_dim), tile = tile_of(call.queries.head_dim, call.keys.rows),
            cluster = cluster_of(call.queries.head_dim, call.keys.rows);
  const probabilities_backward_shape shape{atoms, tile, cluster, cluster == 1 && tile <= 128 ? 3 : 2};
  return {.tile = tile,
          .cluster = cluster,
          .stages = shape.stages,
          .threads = shape.kThreads,
          .shared_bytes = static_cast<unsigned>(shape.shared_bytes())};
}

// Even shares, or one batch for each cluster where that is no slower, so that no batch is shared.
cluster_schedule schedule_row_tiles(const probabilities_sizes& of, int room) {
  const int64 row_tiles = row_tiles_of_batch(of);
  const auto with = [&](int64 count) {
    const bool shares = of.batches % count != 0;
    return cluster_schedule{static_cast<int>(count), shares ? 2 * count * of.keys * of.head_dim : 0};
  };
  const cluster_schedule even = with(std::clamp<int64>(room, 1, of.batches * row_tiles)), own = with(of.batches);
  return of.batches <= room && seconds_of(of, own) <= seconds_of(of, even) ? own : even;
}

std::string source(const probabilities_backward_call& call, const probabilities_backward_plan& p) {
  return "#include \"onepass/kernel/attention/probabilities_backward_sm90.cuda.h\"\nONEPASS_BEGIN\nstruct config {\n" +
         type_field("kX", call.type) + number_field("kAtoms", atoms_of(call.queries.head_dim)) +
         number_field("kTile", p.tile) + number_field("kCluster", p.cluster) + number_field("kStages", p.stages) +
         "};\n" +
         kernel_text("probabilities_backward_sm90", "config", bounds(static_cast<int>(p.threads), 1, p.cluster),
                     "probabilities_backward_arguments") +
         "ONEPASS_END\n";
}

std::string reduce_dk_source(dtype type) {
  return "#include \"onepass/kernel/attention/probabilities_backward_sm90.cuda.h\"\nONEPASS_BEGIN\n" +
         kernel_text("probabilities_backward_reduce_dk", std::string("dtype::") + name_of(type), bounds(kReduceThreads),
                     "probabilities_backward_arguments") +
         "ONEPASS_END\n";
}

bool launch_probabilities_backward(const probabilities_backward_call& call,
                                   const std::function<void*(int64 count)>& room_for, int device, void* stream) {
  const probabilities_backward_plan p = plan_probabilities_backward(call);
  const std::string label = facts(device).arch_name + " probabilities backward " + name_of(call.type);
  static known_kernels known;
  const kernel& built =
      known.find_or_build(kernel_key(device, call.type, atoms_of(call.queries.head_dim), p.tile, p.cluster, p.stages),
                          [&]() -> const kernel& { return load(source(call, p), device, stream, label); });
  const int room = active_clusters(built, p.cluster, p.threads, p.shared_bytes);
  if (room == 0) return false;
  const probabilities_sizes sizes = sizes_of(call);
  const cluster_schedule clusters = schedule_row_tiles(sizes, room);
  const auto map = [&](const batched_rows& of) { return map_of_rows(built, of, call.type == dtype::bf16); };
  const probabilities_backward_arguments a{
      .queries = map(call.queries),
      .keys = map(call.keys),
      .probabilities = map(call.probabilities),
      .grad_probabilities = map(call.grad_probabilities),
      .step_queries = steps_of(call.queries),
      .step_keys = steps_of(call.keys),
      .step_probabilities = steps_of(call.probabilities),
      .step_grad_probabilities = steps_of(call.grad_probabilities),
      .batches = static_cast<int>(sizes.batches),
      .inner = static_cast<int>(call.queries.inner),
      .query_heads = static_cast<int>(sizes.query_heads),
      .rows = static_cast<int>(sizes.rows),
      .columns = static_cast<int>(sizes.keys),
      .clusters = clusters.count,
      .grad_queries = call.grad_queries,
      .grad_keys = call.grad_keys,
      .partial_grad_keys =
          clusters.partial_elements == 0 ? nullptr : static_cast<float*>(room_for(clusters.partial_elements)),
      .head_dim = sizes.head_dim,
      .factor = call.factor};
  launch(built, {static_cast<unsigned>(clusters.count * p.cluster), 1}, {p.threads, 1}, p.shared_bytes, true, stream,
         &a);
  if (clusters.partial_elements == 0) return true;
  const kernel& adds = known.find_or_build(kernel_key(device, call.type), [&]() -> const kernel& {
    return load(reduce_dk_source(call.type), device, stream, label + ", dK");
  });
  const int64 quads = sizes.keys * sizes.head_dim / 4;
  launch(adds, {static_cast<unsigned>(sizes.batches), static_cast<unsigned>(ceil_div(quads, kReduceThreads))},
         {kReduceThreads, 1}, 0, true, stream, &a);
  return true;
}

}  // namespace onepass::cuda
