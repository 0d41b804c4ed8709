// What compute-sanitizer takes for wrong though it is right, in two small kernels (docs/measured-facts.md, Sanitizers).
// "Sanitizers").
//
//   nvcc -std=c++17 -lineinfo -gencode=arch=compute_90a,code=sm_90a -o facts tools/sanitizer_facts.cu
//   compute-sanitizer ./facts copy 0                    a bulk copy to the block itself: "not located in remote CTA"
//   compute-sanitizer ./facts copy 1                    the same to the next block of the cluster: clean
//   compute-sanitizer --tool racecheck ./facts tell 0   a warp writes, meets, one lane arrives: reported as a race
//   compute-sanitizer --tool racecheck ./facts tell 1   every lane arrives: clean
//
// The program says whether the numbers were right; they are in all four.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

__device__ uint32_t address(const void* at) { return static_cast<uint32_t>(__cvta_generic_to_shared(at)); }
__device__ uint32_t in_block(uint32_t at, int rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
  return there;
}
__device__ void open_mailbox(uint64_t* box, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(box)), "r"(arrivals) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ void arrive(uint64_t* box) {
  asm volatile("{ .reg .b64 s; mbarrier.arrive.shared::cta.b64 s, [%0]; }" ::"r"(address(box)) : "memory");
}
__device__ void wait_for_mail(uint64_t* box, uint32_t phase) {
  uint32_t done = 0;
  while (done == 0)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(address(box)), "r"(phase)
                 : "memory");
}
__device__ void meet_in_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

constexpr int kBytes = 2304, kPlace = 4096, kDynamic = 8192, kCluster = 2;

// Each block's first numbers go to kPlace in the block `further` in its cluster.
__global__ void __cluster_dims__(kCluster, 1, 1) copy(int further, unsigned* wrong) {
  extern __shared__ __align__(1024) char dynamic[];
  __shared__ uint64_t box;
  const int rank = static_cast<int>(blockIdx.x) % kCluster, to = (rank + further) % kCluster,
            from = (rank + kCluster - further) % kCluster;
  auto *own = reinterpret_cast<uint32_t*>(dynamic), *told = reinterpret_cast<uint32_t*>(dynamic + kPlace);
  for (unsigned i = threadIdx.x; i < kBytes / 4; i += blockDim.x) own[i] = 1000000 * rank + i, told[i] = 0xffffffff;
  if (threadIdx.x == 0) {
    open_mailbox(&box, 1);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(&box)), "r"(kBytes) : "memory");
  }
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  meet_in_cluster();
  if (threadIdx.x == 0)
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     in_block(address(told), to)),
                 "r"(address(own)), "r"(kBytes), "r"(in_block(address(&box), to))
                 : "memory");
  wait_for_mail(&box, 0);
  for (unsigned i = threadIdx.x; i < kBytes / 4; i += blockDim.x)
    if (told[i] != 1000000u * from + i) atomicAdd(wrong, 1u);
  meet_in_cluster();
}

// In a ring of one place: a warp writes to it, another one reads. all: every lane says so itself.
__global__ void tell(int all, unsigned* wrong) {
  __shared__ uint64_t full, empty;
  __shared__ uint32_t place[32];
  const unsigned lane = threadIdx.x % 32;
  if (threadIdx.x == 0) open_mailbox(&full, all ? 32 : 1), open_mailbox(&empty, all ? 32 : 1);
  __syncthreads();
  for (uint32_t i = 0; i < 6; ++i) {
    const bool writes = threadIdx.x < 32;
    wait_for_mail(writes ? &empty : &full, writes ? (i & 1) ^ 1 : i & 1);
    if (writes) place[lane] = 100 * i + lane;
    else if (place[(lane + 5) % 32] != 100 * i + (lane + 5) % 32) atomicAdd(wrong, 1u);
    __syncwarp();
    if (all || lane == 0) arrive(writes ? &full : &empty);
  }
}

int main(int count, char** given) {
  if (count != 3) return 2;
  unsigned *wrong = nullptr, found = 0;
  cudaMalloc(&wrong, sizeof found);
  cudaMemset(wrong, 0, sizeof found);
  if (std::strcmp(given[1], "copy") == 0) copy<<<2 * kCluster, 128, kDynamic>>>(std::atoi(given[2]), wrong);
  else tell<<<2, 64>>>(std::atoi(given[2]), wrong);
  const cudaError_t status = cudaMemcpy(&found, wrong, sizeof found, cudaMemcpyDeviceToHost);
  std::printf("%s %s: %s, %u numbers wrong\n", given[1], given[2], cudaGetErrorString(status), found);
  return status != cudaSuccess || found != 0;
}
