// A line with `linear`: the two lines it is made of, and how their gradients make its own.
#include "src/plan/contraction.h"

#include <algorithm>

#include "onepass/kernel/arguments.h"
#include "onepass/word/words.h"

namespace onepass::spec {
namespace {

line recomputing_words(const line& before) {
  const int kept = backward_reads(before).kept;
  if (kept < 0) return before;
  const auto is_it = [kept](const word& w) { return w.about->kind == word_kind::keep && w.ordinal == kept; };
  const auto at = std::find_if(before.words.begin(), before.words.end(), is_it) - before.words.begin();
  return slice(before, static_cast<int>(at) + 1, static_cast<int>(before.words.size()));
}

line with_keep_in_front(line of) {
  word keep{};
  keep.about = &onepass::word::keep::about;
  keep.ordinal = 0;
  for (word& w : of.words) w.ordinal += w.about->kind == word_kind::keep;
  of.words.insert(of.words.begin(), keep);
  of.result_types.insert(of.result_types.begin() + 1, result_type{});
  ++of.keeps;
  return of;
}

bool scales_columns(const descriptor& about) { return about.scales && about.operand == operand_kind::column; }
bool scales_by_number(const descriptor& about) { return about.scales && about.operand == operand_kind::none; }

contraction::affine_norm norm_of(const line& before) {
  contraction::affine_norm norm{false, false, -1, -1};
  if (before.first_row() != 0) return norm;
  const descriptor& row = *before.words[0].about;
  std::size_t at = 1;
  const auto is = [&](bool (*property)(const descriptor&)) {
    return at < before.words.size() && property(*before.words[at].about);
  };
  norm.centres = row.centres;
  if (is(scales_columns) && before.words[at].parameters.empty()) norm.scale = before.words[at++].operand;
  if (is(is_bias)) norm.bias = before.words[at++].operand;
  norm.is_one = row.normalises && at == before.words.size();
  return norm;
}

// A gate does if its activation does, too.
bool maps_zero_to_zero(const word& w) {
  return w.about->maps_zero_to_zero && (!w.activation || w.activation->maps_zero_to_zero);
}

}  // namespace

contraction::contraction(const line& of)
    : before(slice(of, 0, of.linear)),
      behind(slice(of, of.linear + 1, static_cast<int>(of.words.size()))),
      behind_keeping(with_keep_in_front(behind)),
      recompute(recomputing_words(before)),
      scores(of.scores()),
      weight(before.operands),
      norm(norm_of(before)) {}

reads backward_reads(const contraction& of) {
  const reads before = backward_reads(of.before), behind = backward_reads(of.behind);
  reads result = backward_reads(of.before, true);
  result.result = false;
  const bool recomputes = (of.scores || gives_numbers(of)) && behind.x;  // backward recomputes what is contracted
  result.x_for_weight = result.x && !before.x && !before.result && !recomputes;
  result.product = behind.x && !recomputes;
  result.statistics = before.statistics || behind.statistics;
  result.result_behind = behind.result;
  if (behind.kept >= 0) result.kept_behind = of.before.keeps + behind.kept;
  result.operands_for_weight.resize(before.operands.size() + 1 + behind.operands.size());
  for (std::size_t i = 0; i < before.operands.size(); ++i)
    result.operands_for_weight[i] = result.operands[i] && !before.operands[i] && !before.result && !recomputes;
  result.operands.push_back(true);
  result.operands.insert(result.operands.end(), behind.operands.begin(), behind.operands.end());
  return result;
}

std::string why_not_small_n(const contraction& line, int64 features) {
  if (features > kMostSmallN) return "it is for at most " + std::to_string(kMostSmallN) + " features";
  if (line.weight + features > kMaxOperands)
    return "operands before 'linear' and features are more than " + std::to_string(kMaxOperands);
  return "";
}

bool gives_numbers(const contraction& of) { return !of.scores && of.behind.result(0).is_number(); }

std::string why_not_chunked(const contraction& of) {
  if (!gives_numbers(of)) return "it is for endings behind 'linear', which give one number a row";
  const auto results = std::uint64_t{1} << of.behind.results();
  if (of.behind.numbers() != results - 1) return "a row behind 'linear' is kept, so that all rows must be there";
  const auto counts_rows = [](const word& w) { return w.about->kind == word_kind::dropout || w.about->is_causal; };
  const auto found = std::find_if(of.behind.words.begin(), of.behind.words.end(), counts_rows);
  return found == of.behind.words.end() ? "" : std::string("'") + found->about->name + "' counts all rows";
}

contraction_gradients plan_gradients(const contraction& of, dtype x, const std::vector<operand_facts>& operands,
                                     std::uint64_t wanted) {
  const auto weight = static_cast<std::size_t>(of.weight);
  const std::vector<operand_facts> facts_before(operands.begin(), operands.begin() + of.weight),
      facts_behind(operands.begin() + of.weight + 1, operands.end());
  contraction_gradients plan;
  plan.wants_before = wanted & ((std::uint64_t{2} << of.weight) - 1);
  plan.wants_input = plan.wants_before != 0;
  plan.wants_weight = (wanted >> (of.weight + 1) & 1) != 0;
  plan.wants_behind = (wanted >> (of.weight + 2) << 1) | std::uint64_t{plan.wants_input || plan.wants_weight};
  plan.before = plan_gradients(of.before, x, facts_before, plan.wants_before);
  plan.behind = plan_gradients(of.behind, operands[weight].type, facts_behind, plan.wants_behind);

  gradients& all = plan.all;
  const auto& sources = plan.before.inputs;
  plan.gives_input = std::find(sources.begin(), sources.end(), kUpstream) != sources.end();
  if (plan.gives_input) all.outputs.push_back({0, x, false});
  const int first_before = static_cast<int>(all.outputs.size());
  for (const int source : sources)
    all.inputs.push_back(source == kUnwanted ? kUnwanted : source == kUpstream ? 0 : first_before + source);
  all.outputs.insert(all.outputs.end(), plan.before.outputs.begin(), plan.before.outputs.end());
  all.inputs.push_back(plan.wants_weight ? static_cast<int>(all.outputs.size()) : kUnwanted);
  if (plan.wants_weight) all.outputs.push_back({of.weight + 1, operands[weight].type, false});
  for (std::size_t i = 1; i < plan.behind.inputs.size(); ++i) {
    const int source = plan.behind.inputs[i];
    all.inputs.push_back(source);
    if (source < 0) continue;
    auto& kept = plan.kept_outputs;
    const auto known = std::find(kept.begin(), kept.end(), source);
    all.inputs.back() = static_cast<int>(all.outputs.size()) - static_cast<int>(kept.end() - known);
    if (known != kept.end()) continue;
    kept.push_back(source);
    gradient_output output = plan.behind.outputs[static_cast<std::size_t>(source)];
    output.input = of.weight + 1 + static_cast<int>(i);
    all.outputs.push_back(output);
  }
  return plan;
}

bool is_one_bias(const line& of) { return of.words.size() == 1 && is_bias(*of.words[0].about); }

bool has_softmax(const line& of) {
  return of.rowwise() && of.words[static_cast<std::size_t>(of.first_row())].about->is_softmax;
}

bool is_causal(const line& of) {
  if (!has_softmax(of)) return false;
  const auto leaves_infinity = [](const descriptor& about) {
    return about.adds || is_mask(about) || about.kind == word_kind::keep || about.kind == word_kind::rounding;
  };
  int last = of.first_row() - 1;
  while (last >= 0 && leaves_infinity(*of.words[static_cast<std::size_t>(last)].about)) --last;
  return last >= 0 && of.words[static_cast<std::size_t>(last)].about->is_causal;
}

bool maps_zero_to_zero(const line& of) {
  return std::all_of(of.words.begin() + of.first_row() + 1, of.words.end(),
                     [](const word& w) { return maps_zero_to_zero(w); });
}

bool is_linear(const line& of) {
  return std::all_of(of.words.begin() + of.first_row() + 1, of.words.end(),
                     [](const word& w) { return w.about->is_linear; });
}

std::optional<double> softmax_scale(const line& of) {
  if (!has_softmax(of) || of.first_row() + 1 != static_cast<int>(of.words.size())) return {};
  double scale = 1;
  for (int i = 0; i < of.first_row(); ++i) {
    const word& w = of.words[static_cast<std::size_t>(i)];
    const bool adds = w.about->adds && w.about->operand == operand_kind::tensor;
    if (scales_by_number(*w.about)) scale *= w.parameters[0];
    else if (!adds && w.about->kind != word_kind::mask) return {};
  }
  return scale;
}

std::vector<int> leading_masks(const line& of) {
  std::vector<int> masks;
  for (const word& w : of.words) {
    if (is_mask(*w.about)) masks.push_back(w.operand);
    else if (!scales_by_number(*w.about) || !(static_cast<float>(w.parameters[0]) > 0)) break;
  }
  return masks;
}

}  // namespace onepass::spec
