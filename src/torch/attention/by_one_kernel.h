// The choice between one kernel for all of a call and other ways.
#pragma once

#include <string>

#include "src/plan/strategy.h"
#include "src/torch/call.h"
#include "src/torch/check.h"

namespace onepass::binding {

// What `launch` gives, unless the tensors or `why_not()` give a reason; an error with the reason, where the line names
// the kernel.
template <class WhyNot, class Launch>
std::optional<std::vector<Tensor>> by_one_kernel(const forward_call& call, const Tensor& keys, const WhyNot& why_not,
                                                 const Launch& launch) {
  const spec::strategy named = call.line.line.how;
  if (named == spec::strategy::unfused || named == spec::strategy::panels) return {};
  std::string reason;
  if (!device_of(call.x).is_cuda()) reason = "its kernel is for CUDA";
  else if (dtype_of(call.x) != dtype_of(keys)) reason = "x and the keys must have one dtype";
  else if (call.x.numel() == 0 || keys.numel() == 0) reason = "there is nothing to compute";
  else reason = why_not();
  if (reason.empty()) {
    if (std::optional<std::vector<Tensor>> results = launch()) return results;
    reason = "rows must begin at multiples of 16 bytes";
  }
  ONEPASS_CHECK(named == spec::strategy::automatic, "onepass: 'scores(",
                std::string(spec::kStrategies[static_cast<std::size_t>(named)]), ")' cannot take this call: ", reason);
  return {};
}

}  // namespace onepass::binding
