// What the emulator notices: kernels that are wrong.
#include "tests/kernel/device_memory.h"

namespace onepass::cuda {
namespace {

class EmulatorNotices : public Nvrtc {
 protected:
  // What a kernel of one block, with an array of so many numbers, fails with.
  static std::string failure(const std::string& body, int numbers = 32, unsigned shared_bytes = 0) {
    const device_tensor data(static_cast<std::size_t>(numbers), dtype::f32);
    const std::string text =
        "#include \"onepass/kernel/common/warpgroups.cuda.h\"\nONEPASS_BEGIN\n"
        "extern \"C\" __global__ void onepass_kernel(float* data) {\n"
        "  extern __shared__ __align__(1024) char dynamic[];\n  __shared__ uint64 box;\n" +
        body + "\n}\nONEPASS_END\n";
    void* const at = data.data();
    try {
      launch(load(text, "onepass_kernel", 0, nullptr, "test"), {1, 1}, {128, 1}, shared_bytes, false, nullptr, &at);
    } catch (const std::exception& e) {
      return e.what();
    }
    return "";
  }
};

TEST_F(EmulatorNotices, NothingWhereNothingIsWrong) {
  EXPECT_EQ(failure("if (threadIdx.x < 32) data[threadIdx.x] = 1.0f; __syncthreads();"), "");
}
TEST_F(EmulatorNotices, AccessesOutOfBounds) {
  EXPECT_NE(failure("data[threadIdx.x] = 1.0f;").find("outside of all memory"), std::string::npos);
  EXPECT_NE(failure("reinterpret_cast<float*>(dynamic)[threadIdx.x] = 1.0f;", 32, 500).find("outside of shared memory"),
            std::string::npos);
}
TEST_F(EmulatorNotices, ThreadsThatWaitForEver) {
  EXPECT_NE(failure("if (threadIdx.x < 64) __syncthreads();").find("nothing goes on"), std::string::npos);
  EXPECT_NE(failure("if (threadIdx.x == 0) init_mbarrier(&box, 2);\n__syncthreads();\n"
                    "if (threadIdx.x == 0) arrive(&box);\nwait_for_mbarrier(&box, 0);")
                .find("nothing goes on"),
            std::string::npos);
}
// A product of two tiles in shared memory, which threads write.
constexpr const char* kProduct =
    "const uint32 at = first_tile(dynamic);\n"
    "for (int i = threadIdx.x; i < 4096; i += 128) *reinterpret_cast<uint32*>(at_shared(dynamic, at + 4 * i)) = 0;\n"
    "{ FENCE }\n__syncthreads();\nfloat d[32] = {};\nbegin_wgmma();\n"
    "add_wgmma<dtype::bf16, 64>(d, tile_descriptor(at), tile_descriptor(at + 8192), true);\ncommit_wgmma();\n"
    "{ BEFORE }\nwait_for_wgmma<0>();\n"
    "if (threadIdx.x < 32) data[threadIdx.x] = d[0];";
std::string product(const std::string& fence, const std::string& before) {
  std::string text = kProduct;
  text.replace(text.find("FENCE"), 5, fence);
  return text.replace(text.find("BEFORE"), 6, before);
}

TEST_F(EmulatorNotices, ProductsThatReadTooEarlyOrTooLate) {
  const std::string fence = "fence_proxy_async_shared();",
                    store = "*reinterpret_cast<uint32*>(at_shared(dynamic, at + 4 * threadIdx.x)) = 1;";
  EXPECT_EQ(failure(product(fence, ""), 32, 20480), "");
  EXPECT_NE(failure(product("", ""), 32, 20480).find("before fence.proxy.async"), std::string::npos);
  EXPECT_NE(failure(product(fence, store), 32, 20480).find("what a product still reads"), std::string::npos);
}

TEST_F(EmulatorNotices, CopiesThatDoNotWaitForReads) {
  const auto twice = [](const std::string& fence) {
    return "if (threadIdx.x == 0) init_mbarrier(&box, 1);\n__syncthreads();\nfloat sum = 0;\n"
           "for (uint32 phase = 0; phase < 2; ++phase) {\n"
           "  if (threadIdx.x == 0) arrive_and_expect(&box, 16);\n"
           "  if (threadIdx.x == 0) bulk_load(shared_address(dynamic), data, 16, shared_address(&box));\n"
           "  wait_for_mbarrier(&box, phase);\n  sum += *reinterpret_cast<const float*>(dynamic);\n  " +
           fence + "\n  __syncthreads();\n}\nif (threadIdx.x < 32) data[threadIdx.x] = sum;";
  };
  EXPECT_EQ(failure(twice("fence_proxy_async_shared();"), 32, 16), "");
  EXPECT_NE(failure(twice(""), 32, 16).find("what a thread read"), std::string::npos);
}

TEST_F(EmulatorNotices, CopiesThatReadTooEarly) {
  const auto told = [](const std::string& fence) {
    return "if (threadIdx.x == 0) init_mbarrier(&box, 1);\nfloat* of = reinterpret_cast<float*>(dynamic);\n"
           "if (threadIdx.x < 4) of[threadIdx.x] = 1;\n" +
           fence +
           "\n__syncthreads();\nif (threadIdx.x == 0) {\n  arrive_and_expect(&box, 16);\n"
           "  bulk_send(shared_address(of + 4), shared_address(of), 16, shared_address(&box));\n}\n"
           "wait_for_mbarrier(&box, 0);\nif (threadIdx.x < 32) data[threadIdx.x] = of[4 + threadIdx.x % 4];";
  };
  EXPECT_EQ(failure(told("fence_proxy_async_shared();"), 32, 32), "");
  EXPECT_NE(failure(told(""), 32, 32).find("before fence.proxy.async"), std::string::npos);
}

}  // namespace
}  // namespace onepass::cuda
