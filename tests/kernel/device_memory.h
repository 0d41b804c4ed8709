// Tensors of numbers on the device, through CUDA's driver, which tests have an emulator for (tests/emulator).
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "onepass/lane/types.h"
#include "src/cuda/runtime/driver.h"
#include "tests/cuda/nvrtc_fixture.h"

namespace onepass::cuda {

// Kernels run: in an emulator where there is no device. The lines beside which they are right are compiled for the CPU
// at first use, without optimisation.
class Emulated : public Nvrtc {
 protected:
  void SetUp() override {
    setenv("ONEPASS_CXX", ONEPASS_SOURCE_DIR "/tests/python/quick-compiler", 0);
    Nvrtc::SetUp();
  }
};

template <class... Parameters>
void call_driver(const char* name, Parameters... parameters) {
  facts(0);  // opens it
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  const auto found = reinterpret_cast<int (*)(Parameters...)>(dlsym(driver, name));
  if (found == nullptr || found(parameters...) != 0) throw std::runtime_error(std::string(name) + " failed");
}

inline std::uint16_t to_bits(float x, dtype type) {
  if (type == dtype::f16) return std::bit_cast<std::uint16_t>(static_cast<_Float16>(x));
  const auto bits = std::bit_cast<std::uint32_t>(x);
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float from_bits(std::uint16_t bits, dtype type) {
  if (type == dtype::f16) return static_cast<float>(std::bit_cast<_Float16>(bits));
  return std::bit_cast<float>(std::uint32_t{bits} << 16);
}

inline double from_code(uint8 code, dtype type) {
  if (type == dtype::i8) return static_cast<int8>(code);
  const int mantissa = type == dtype::f8e4m3 ? 3 : 2, bias = type == dtype::f8e4m3 ? 7 : 15;
  const int exponent = (code & 127) >> mantissa, low = code & ((1 << mantissa) - 1);
  const double value = std::ldexp(low + (exponent > 0 ? 1 << mantissa : 0), std::max(exponent, 1) - bias - mantissa);
  return (code & 128) != 0 ? -value : value;
}

// Numbers as a dtype has them; host() is what the device has.
class device_tensor {
 public:
  device_tensor(std::size_t count, dtype type) : count_(count), type_(type) {
    call_driver("cuMemAlloc_v2", &at_, bytes());
  }
  device_tensor(const std::vector<float>& numbers, dtype type) : device_tensor(numbers.size(), type) {
    std::vector<char> raw(bytes());
    for (std::size_t i = 0; i < count_; ++i) {
      if (type == dtype::f32) std::memcpy(&raw[4 * i], &numbers[i], 4);
      else if (type == dtype::boolean) raw[i] = numbers[i] != 0.0f;
      else if (const std::uint16_t bits = to_bits(numbers[i], type); true) std::memcpy(&raw[2 * i], &bits, 2);
    }
    call_driver("cuMemcpyHtoD_v2", at_, static_cast<const void*>(raw.data()), bytes());
  }
  explicit device_tensor(const std::vector<int64>& integers) : device_tensor(integers.size(), dtype::i64) {
    call_driver("cuMemcpyHtoD_v2", at_, static_cast<const void*>(integers.data()), bytes());
  }
  template <std::size_t N>
  explicit device_tensor(const int64 (&words)[N]) : device_tensor(2 * N, dtype::f32) {
    call_driver("cuMemcpyHtoD_v2", at_, static_cast<const void*>(words), bytes());
  }
  ~device_tensor() { call_driver("cuMemFree_v2", at_); }
  device_tensor(const device_tensor&) = delete;
  device_tensor& operator=(const device_tensor&) = delete;

  void* data() const { return reinterpret_cast<void*>(at_); }
  std::vector<double> host() const {
    std::vector<char> raw(bytes());
    call_driver("cuCtxSynchronize");
    call_driver("cuMemcpyDtoH_v2", static_cast<void*>(raw.data()), at_, bytes());
    std::vector<double> numbers(count_);
    for (std::size_t i = 0; i < count_; ++i) {
      float wide;
      std::uint16_t narrow;
      if (is_code(type_)) numbers[i] = from_code(static_cast<uint8>(raw[i]), type_);
      else if (type_ == dtype::f32) std::memcpy(&wide, &raw[4 * i], 4), numbers[i] = wide;
      else std::memcpy(&narrow, &raw[2 * i], 2), numbers[i] = from_bits(narrow, type_);
    }
    return numbers;
  }

 private:
  std::size_t bytes() const { return count_ * static_cast<std::size_t>(size_of(type_)); }
  std::size_t count_;
  dtype type_;
  unsigned long long at_ = 0;
};

// Drawn from a normal distribution, as a dtype has them.
inline std::vector<float> drawn(std::size_t count, dtype type, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> numbers(count);
  for (float& x : numbers) x = type == dtype::f32 ? normal(random) : from_bits(to_bits(normal(random), type), type);
  return numbers;
}

// |found - expected| over |expected|, as vectors.
inline double distance(const std::vector<double>& found, const std::vector<double>& expected) {
  double apart = 0, all = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    apart += (found[i] - expected[i]) * (found[i] - expected[i]);
    all += expected[i] * expected[i];
  }
  return std::sqrt(apart / (all > 0 ? all : 1.0));
}

}  // namespace onepass::cuda
