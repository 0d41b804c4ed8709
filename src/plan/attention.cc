// A line with `scores` and `values`: the line that makes what `values` takes, and how its gradients make the whole's.
#include "src/plan/attention.h"

#include <algorithm>

namespace onepass::spec {
namespace {

bool keeps_weights(const line& of) {
  return of.words[static_cast<std::size_t>(of.values) - 1].about->kind == word_kind::keep;
}

}  // namespace

attention::attention(const line& of)
    : keeps_weights(spec::keeps_weights(of)), scores(slice(of, 0, of.values - keeps_weights)), values(of.operands - 1) {
  if (of.how == strategy::unfused) scores.how = of.how;
}

reads backward_reads(const attention& of) {
  reads result;
  result.x = true;
  result.result = true;  // with its gradient it gives the sum that softmax's gradient needs
  result.statistics = of.scores.rowwise();
  if (of.keeps_weights) result.kept_behind = of.scores.keeps;
  result.operands.assign(static_cast<std::size_t>(of.values) + 1, true);
  result.operands_for_weight.assign(result.operands.size(), false);
  return result;
}

attention_gradients plan_gradients(const attention& of, dtype x, const std::vector<operand_facts>& operands,
                                   std::uint64_t wanted) {
  const std::uint64_t values = std::uint64_t{2} << of.values;
  attention_gradients plan;
  plan.wants_scores = wanted & (values - 1);
  plan.wants_values = (wanted & values) != 0;
  gradients& all = plan.all;
  all = plan_gradients(of.scores, x, {operands.begin(), operands.end() - 1}, plan.wants_scores);
  const auto upstream = std::find(all.inputs.begin(), all.inputs.end(), kUpstream);
  plan.gives_weights = upstream != all.inputs.end();
  if (plan.gives_weights) {
    all.outputs.push_back({static_cast<int>(upstream - all.inputs.begin()), operands[0].type, false});
    std::replace(all.inputs.begin(), all.inputs.end(), kUpstream, static_cast<int>(all.outputs.size()) - 1);
  }
  all.inputs.push_back(plan.wants_values ? static_cast<int>(all.outputs.size()) : kUnwanted);
  if (plan.wants_values) all.outputs.push_back({of.values + 1, operands.back().type, false});
  return plan;
}

}  // namespace onepass::spec
