// Kernels on a device, through CUDA's driver API, which is looked up at run time: nothing here links against CUDA.
#pragma once

#include <string>

#include "onepass/lane/device/tensor_map.h"

namespace onepass::cuda {

struct kernel {
  void* function;                  // CUfunction
  void* context;                   // the device's primary CUcontext: autograd's threads may have none current
  int registers = 0, spilled = 0;  // of a thread: how many, and bytes that they had no room for
};

struct device_facts {
  int sm_count;
  int shared_per_block;     // bytes that a block may ask for
  int arch;                 // 90 for compute capability 9.0
  std::string arch_name;    // "sm_90a"
  int cluster;              // blocks of a cluster, at most
  double bytes_per_second;  // that a large copy moves, about
  // Of a kernel's parameters: 4096, where the driver is older than CUDA 12.1.
  int parameter_bytes = 32764;
};

const device_facts& facts(int device);
// The same for a chip that is not here, to compile for it ahead of time. Throws for a name it does not know.
device_facts facts_of(const std::string& arch_name);
// Of either, as "cuda:0" or "sm_90a". Throws std::invalid_argument.
device_facts facts_named(const std::string& chip);

// The kernel `name` of a source: from memory, else from the cache on disk, else built. The reference stays valid.
// Throws where it would have to be loaded while `stream` is being captured in a CUDA graph.
const kernel& load(const std::string& source, const char* name, int device, void* stream, const std::string& label);

// Into the cache on disk only; no device is needed. False where it was there already.
bool build(const std::string& source, const std::string& arch_name, const std::string& label);

struct extent {
  unsigned x, y;
};

// Starts blocks of threads. `behind`: the kernel waits by itself for the one before it in the stream
// (wait_for_kernel_before), so that its blocks may begin while that one's last still run (compute capability 9).
void launch(const kernel&, extent grid, extent block, unsigned shared_bytes, bool behind, void* stream,
            const void* parameters);

// A matrix of 16-bit elements in global memory, of which TMA loads tiles of so many rows and columns. Compute
// capability 9.
struct matrix_facts {
  const void* data;
  bool is_bf16;
  long long rows, columns, stride;  // stride: of a row, in numbers, a multiple of 8
  unsigned tile_rows, tile_columns;
};
tensor_map describe_matrix(const kernel&, const matrix_facts&);  // for that kernel
// Likewise of five dimensions, the innermost first, whose numbers are neighbours; strides of the others, in numbers.
struct tensor_facts {
  const void* data;
  bool is_bf16;
  long long sizes[5], strides[4];
  unsigned tile[5];
};
tensor_map describe_tensor(const kernel&, const tensor_facts&);

// Blocks of a cluster that every chip with clusters has room for.
inline constexpr int kPortableCluster = 8;
// How many clusters of so many blocks the device runs at a time.
int active_clusters(const kernel&, int blocks, unsigned threads, unsigned shared_bytes);

}  // namespace onepass::cuda
