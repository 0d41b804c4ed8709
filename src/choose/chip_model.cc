// Predicts rates for other chips from those measured on the H200.
#include "src/choose/chip_model.h"

#include <algorithm>
#include <iterator>

#include "src/cuda/linear/tuning.h"

namespace onepass::choice {
namespace {

// Rates of one SM from the vendor's data sheets: its clock, and flops a clock of `mma` and of the library's GEMM (both
// in 16 bits with float32 sums), and of float32. A chip between two compute capabilities is as the lower one.
struct sm_rates {
  int arch;
  double hertz, of_warps, of_library, of_floats;
};
constexpr sm_rates kRates[] = {{80, 1.41e9, 2048, 2048, 128},   // A100
                               {86, 1.80e9, 1024, 1024, 256},   // RTX A6000
                               {89, 2.52e9, 512, 512, 256},     // RTX 4090
                               {90, 1.755e9, 2560, 4096, 256},  // H200
                               {100, 1.85e9, 2048, 8192, 256},  // B200; its mma rate is a guess
                               {120, 2.41e9, 512, 512, 256}};   // RTX 5090
constexpr int kMeasuredArch = 90, kMeasuredSms = 132;
constexpr double kReached = .8;  // share of the data sheet's flops that the library's GEMM reaches on the H200
constexpr double kMargin = 1.25;

const sm_rates& rates_of(int arch) {
  const auto above = std::upper_bound(std::begin(kRates), std::end(kRates), arch,
                                      [](int value, const sm_rates& r) { return value < r.arch; });
  return above == std::begin(kRates) ? *above : *std::prev(above);
}

}  // namespace

chip_model model_of(const cuda::device_facts& chip) {
  constexpr cuda::linear_speed kMeasured{};
  chip_model m{.flops = kMeasured.flops, .flops_wide = kMeasured.flops_wide};
  if (chip.arch == kMeasuredArch) return m;
  const sm_rates &here = rates_of(chip.arch), &there = rates_of(kMeasuredArch);
  m.margin = kMargin, m.measured = false;
  const double sms = double{kMeasuredSms} / chip.sm_count, all = chip.sm_count * here.hertz * kReached;
  m.clock = there.hertz / here.hertz;
  m.issue = m.clock * sms;
  m.mma = m.issue * there.of_warps / here.of_warps;
  m.in_flight = sms;
  m.flops = all * here.of_library;
  m.flops_wide = all * here.of_floats;
  return m;
}

}  // namespace onepass::choice
