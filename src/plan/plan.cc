// A line's plan: backward's reads, gradient sources, type text, bytes and flops.
#include "src/plan/plan.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "src/plan/attention.h"

namespace onepass::spec {
namespace {

bool is_keep(const word& w) { return w.about->kind == word_kind::keep; }

// The words of one chain: [begin, end).
struct segment {
  int begin, end;
};

// Before the first row word.
segment entry_segment(const line& of) {
  return {0, of.rowwise() ? of.first_row() : static_cast<int>(of.words.size()) - of.features};
}
// Behind a row word, to the next or the line's end.
segment segment_behind(const line& of, std::size_t row_word) {
  const bool is_last = row_word + 1 == of.row_words.size();
  return {of.row_words[row_word] + 1, is_last ? static_cast<int>(of.words.size()) : of.row_words[row_word + 1]};
}
segment features_segment(const line& of) {
  const int end = static_cast<int>(of.words.size());
  return {end - of.features, end};
}

// Mirrors chain<>::needs_input: whether backward of words [at, end) reads the value that enters them.
bool needs_input(const line& of, int at, int end, int resume) {
  if (at == end) return false;
  return of.words[static_cast<std::size_t>(at)].about->backward_needs_input ||
         (at != resume && needs_input(of, at + 1, end, resume));
}

// The word at which backward resumes; -1: it starts at x. It is a row word at the line's end whose gradient needs
// only its result, or else the last keep before the row word, if a word behind that keep needs a value. No word before
// the point may need one. Backward knows x's dtype from the result's gradient, from x, or from what it resumes at.
int resume_point(const line& of) {
  const segment entry = entry_segment(of);
  const bool ends = of.row_words.size() == 1 && of.first_row() + 1 == static_cast<int>(of.words.size());
  if (ends && of.words[static_cast<std::size_t>(of.first_row())].about->backward_from_result &&
      !needs_input(of, 0, entry.end, -1)) {
    return of.first_row();
  }
  int resume = -1;
  const bool has_gradient_like_x = !of.result(0).is_number();
  for (int i = 0; i < entry.end; ++i) {
    const word& w = of.words[static_cast<std::size_t>(i)];
    if (w.about->backward_needs_input) break;
    if (is_keep(w) && (w.stored == dtype::none || has_gradient_like_x)) resume = i;
  }
  const bool used = of.rowwise() || needs_input(of, resume + 1, entry.end, -1);
  return used ? resume : -1;
}

std::string type_of(const descriptor& about) {
  return about.defined[0] != '\0' ? about.defined : std::string("word::") + about.name;
}

bool takes_number(const word& w) { return w.about->with_number[0] != '\0' && !w.parameters.empty(); }

std::string stage_name(const word& w, std::uint64_t boolean_masks, bool resumes) {
  if (resumes) return "word::resume";
  if (is_mask(*w.about)) return (boolean_masks >> w.operand & 1) ? "word::mask_boolean" : "word::mask_additive";
  if (w.activation) return std::string("word::") + w.about->name + "<" + type_of(*w.activation) + ">";
  if (takes_number(w)) return std::string("word::") + w.about->with_number;
  if (w.about->gives_codes)
    return type_of(*w.about) + "<dtype::" + name_of(w.stored) + (w.group > 0 ? ", " + std::to_string(w.group) : "") +
           ">";
  return type_of(*w.about);
}

std::string chain_text(const line& of, segment part, std::uint64_t boolean_masks, int resume) {
  std::string text = "chain<";
  for (int i = part.begin; i < part.end; ++i) {
    const word& w = of.words[static_cast<std::size_t>(i)];
    if (i > part.begin) text += ", ";
    text += "placed<" + stage_name(w, boolean_masks, i == resume) + ", " + std::to_string(w.operand) + ", " +
            std::to_string(w.parameter_slot) + ", " + std::to_string(w.ordinal) + ">";
  }
  return text + ">";
}

// The groups of rows whose sums a kernel takes: those that serve most operands. Sums over larger groups are taken of
// them; operands that have other dimensions get a gradient of x's shape, which the caller sums.
std::uint64_t groups_for(const line& of, const std::vector<operand_facts>& operands, std::uint64_t wanted) {
  std::vector<std::uint64_t> some;
  for (int i = 0; i < of.operands; ++i) {
    const operand_facts& facts = operands[static_cast<std::size_t>(i)];
    if ((wanted >> (i + 1) & 1) != 0 && facts.summed && facts.type != dtype::boolean) some.push_back(facts.has);
  }
  const auto served = [&](std::uint64_t has) {
    return std::count_if(some.begin(), some.end(), [has](std::uint64_t own) { return (own & ~has) == 0; });
  };
  const auto best = std::max_element(some.begin(), some.end(),
                                     [&](std::uint64_t a, std::uint64_t b) { return served(a) < served(b); });
  return best == some.end() ? 0 : *best;
}

}  // namespace

reads backward_reads(const line& of, bool recomputes) {
  if (of.values >= 0) return backward_reads(attention(of));
  if (of.linear >= 0) return backward_reads(contraction(of));
  if (of.gives_codes()) {
    reads of_part = backward_reads(differentiable_part(of));
    of_part.operands.resize(static_cast<std::size_t>(of.operands));
    return of_part;
  }
  reads result;
  const int resume = resume_point(of);
  result.result = resume >= 0 && resume == of.first_row();
  if (resume >= 0 && !result.result) result.kept = of.words[static_cast<std::size_t>(resume)].ordinal;
  result.statistics = of.statistics(dtype::f32) > 0 && !result.result;
  result.operands.resize(static_cast<std::size_t>(of.operands));
  const segment entry = entry_segment(of);
  // Behind x or the kept value, what stands before the last row word is recomputed.
  const int recomputed_to = of.rowwise() ? of.last_row() : of.features > 0 ? entry.end : 0;
  if (recomputes) result.x = result.kept < 0;
  else result.x = of.by_rows() ? resume < 0 : needs_input(of, 0, entry.end, resume);
  for (int i = 0; i < static_cast<int>(of.words.size()); ++i) {
    const word& w = of.words[static_cast<std::size_t>(i)];
    if (w.operand < 0) continue;
    const int end = of.by_rows() && i < recomputed_to ? recomputed_to : static_cast<int>(of.words.size());
    const bool recomputed = (recomputes && (result.result || i > resume)) || (i < recomputed_to && i > resume) ||
                            needs_input(of, i + 1, end, resume);
    for (int k = 0; k < w.about->operands; ++k)
      result.operands[static_cast<std::size_t>(w.operand) + static_cast<std::size_t>(k)] =
          recomputed || w.about->backward_needs_operand;
  }
  return result;
}

std::vector<operand_facts> operand_facts_of(const std::int64_t* types, std::size_t count) {
  std::vector<operand_facts> facts;
  facts.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    facts.push_back({static_cast<dtype>(types[i] % kBroadcast), types[i] / kBroadcast % 2 != 0,
                     types[i] / kSummed % 2 != 0, static_cast<std::uint64_t>(types[i] % kUnit / kHas),
                     1 << (types[i] / kUnit)});
  }
  return facts;
}

gradients plan_gradients(const line& of, dtype x, const std::vector<operand_facts>& operands, std::uint64_t wanted) {
  if (of.values >= 0) return plan_gradients(attention(of), x, operands, wanted).all;
  if (of.linear >= 0) return plan_gradients(contraction(of), x, operands, wanted).all;
  if (of.gives_codes()) {
    const line part = differentiable_part(of);
    gradients plan;
    if (!part.words.empty()) plan = plan_gradients(part, x, operands, wanted);
    plan.inputs.resize(static_cast<std::size_t>(of.operands) + 1, kUnwanted);
    return plan;
  }
  const int words = static_cast<int>(of.words.size());
  // Two points of the line have the same gradient when every word between them passes it on.
  std::vector<int> same_as(static_cast<std::size_t>(words) + 1, words);
  for (int i = words - 1; i >= 0; --i) {
    const auto at = static_cast<std::size_t>(i);
    same_as[at] = of.words[at].about->passes_gradient ? same_as[at + 1] : i;
  }
  gradients plan;
  plan.inputs.assign(static_cast<std::size_t>(of.operands) + 1, kUnwanted);
  std::vector<std::pair<int, int>> written;  // (point, output) of tensors in x's dtype and shape
  auto give = [&](int input, int point, dtype type, bool shareable) {
    int& source = plan.inputs[static_cast<std::size_t>(input)];
    if (shareable && point == words) {
      source = kUpstream;
      return;
    }
    for (const auto& [at, output] : written) {
      if (shareable && at == point) {
        source = output;
        return;
      }
    }
    source = static_cast<int>(plan.outputs.size());
    if (shareable) written.emplace_back(point, source);
    plan.outputs.push_back({input, type, false});
    if (input == 0) plan.wants_dx = true;
    else plan.wants_tensor |= std::uint64_t{1} << (input - 1);
  };
  if (wanted & 1) give(0, same_as[0], x, true);
  const std::uint64_t has = groups_for(of, operands, wanted);
  std::vector<gradient_output> columns;
  for (int i = 0; i < words; ++i) {
    const word& w = of.words[static_cast<std::size_t>(i)];
    const bool is_column = w.about->operand == operand_kind::column;
    if (!(is_column || w.about->operand == operand_kind::tensor) || !(wanted >> (w.operand + 1) & 1)) continue;
    if (is_rotary(w)) continue;  // positions have no gradient
    const operand_facts& facts = operands[static_cast<std::size_t>(w.operand)];
    if (facts.type == dtype::boolean) continue;
    if (facts.summed ? (facts.has & ~has) == 0 : is_column && !facts.broadcast) {
      const std::uint64_t own = facts.has == 0 ? 0 : has;
      // Of channels the columns' sums are added up still: until then they are the arithmetic's.
      const dtype type = w.about->by_channels ? result_dtype(x, dtype::f32) : facts.type;
      columns.push_back({w.operand + 1, type, true, facts.summed ? static_cast<std::int64_t>(own) : -1});
      plan.grouped |= std::uint64_t{own != 0} << w.operand;
      continue;
    }
    const bool shareable = w.about->operand_gradient_is_dy && facts.type == x && !facts.broadcast;
    give(w.operand + 1, same_as[static_cast<std::size_t>(i) + 1], facts.type, shareable);
  }
  constexpr int kMostBytes = 512;  // of the columns of a unit: those of the threads of a warp
  const auto by_channels = [&](const gradient_output& column) {
    return of.operand_word(column.input - 1).about->by_channels;
  };
  plan.unit = kMostBytes / size_of(x);
  for (const gradient_output& column : columns)
    if (by_channels(column)) plan.unit = std::min(plan.unit, operands[static_cast<std::size_t>(column.input) - 1].unit);
  if (std::none_of(columns.begin(), columns.end(), by_channels)) plan.unit = 1;
  for (gradient_output& column : columns) {
    if (by_channels(column)) column.unit = plan.unit;
    plan.inputs[static_cast<std::size_t>(column.input)] = static_cast<int>(plan.outputs.size());
    plan.outputs.push_back(column);
    plan.wants_column |= std::uint64_t{1} << (column.input - 1);
  }
  plan.has = plan.grouped == 0 ? 0 : has;
  return plan;
}

// torch.rms_norm without eps adds the epsilon of its arithmetic: float32's for 16-bit tensors too.
void fill_parameters(const line& of, dtype x, arguments& a) {
  const double epsilon =
      x == dtype::f64 ? std::numeric_limits<double>::epsilon() : std::numeric_limits<float>::epsilon();
  for (std::size_t i = 0; i < of.parameters.size(); ++i)
    a.parameter[i] = std::isnan(of.parameters[i]) ? epsilon : of.parameters[i];
}

// A row word's struct, with what it has to know of its place.
std::string row_type(const word& row) {
  const descriptor& about = *row.about;
  const std::string type = type_of(about);
  if (about.operand == operand_kind::target)
    return "word::with_target<" + type + ", " + std::to_string(row.operand) + ">";
  if (is_paired(about)) {
    return "word::with_row<" + type + ", " + std::to_string(row.operand) + ", " + std::to_string(row.parameter_slot) +
           ">";
  }
  if (about.gives_codes) return type + "<dtype::" + name_of(row.stored) + ", " + std::to_string(row.ordinal) + ">";
  if (about.defined[0] == '\0') return type;
  return "word::of_sums<" + type + ", " + std::to_string(std::max(row.parameter_slot, 0)) + ", " +
         std::to_string(row.parameters.size()) + ">";
}

std::string type_text(const line& of, std::uint64_t boolean_masks, bool backward) {
  if (backward && of.gives_codes()) return type_text(differentiable_part(of), boolean_masks, backward);
  const int resume = backward ? resume_point(of) : -1;
  std::string text = "line<" + chain_text(of, entry_segment(of), boolean_masks, resume);
  for (std::size_t i = 0; i < of.row_words.size(); ++i) {
    const word& row = of.words[static_cast<std::size_t>(of.row_words[i])];
    const std::string name = row_type(row);
    const std::string segment =
        (resume == of.row_words[i] ? "word::resumed<" + name + ">" : name) + ", " + std::to_string(row.parameter_slot) +
        ", " + chain_text(of, segment_behind(of, i), boolean_masks, resume) +
        (row.about->gives_number && !row.about->gives_codes && row.ordinal >= 0 ? ", " + std::to_string(row.ordinal)
                                                                                : "");
    text += i == 0 ? ", " + segment : ", segment<" + segment + ">";
  }
  if (!of.rowwise() && of.features > 0)
    text += ", word::whole, -1, " + chain_text(of, features_segment(of), boolean_masks, resume);
  return text + ">";
}

std::string structure(const line& of, std::uint64_t boolean_masks) {
  std::string text;
  int dropouts = 0;
  for (const word& w : of.words) {
    if (!text.empty()) text += '|';
    text += w.about->name + std::string(w.about->defined);
    // Behind `linear` the count of dropouts goes on, which the kernel's type knows.
    if (w.about->kind == word_kind::dropout && w.ordinal != dropouts++) text += "#" + std::to_string(w.ordinal);
    // The type is that of `keep`, but for where backward resumes.
    if (is_keep(w) && w.stored != dtype::none && of.result(0).is_number()) text += "(own)";
    if (w.about->gives_codes) text += std::string("(") + name_of(w.stored) + ")";
    if (w.group > 0) text += "(" + std::to_string(w.group) + ")";
    if (w.activation) text += std::string("(") + w.activation->name + w.activation->defined + ")";
    if (takes_number(w)) text += "(" + std::string(w.about->parameter) + ")";
    if (w.operand >= 0 && (boolean_masks >> w.operand & 1)) text += "(bool)";
  }
  return text;
}

cost estimate(const line& of, std::int64_t rows, std::int64_t columns, std::int64_t columns_behind, dtype x,
              std::int64_t matrices) {
  const std::int64_t element = size_of(x);
  const reads read = backward_reads(of);
  // Bytes of an operand or of its gradient, by the words' place in the line.
  const auto at = [&](int index) {
    const bool behind = of.linear >= 0 && index > of.linear && !(of.values >= 0 && index > of.values);
    return behind ? columns_behind : columns;
  };
  const auto bytes_of = [&](const word& w, int index) {
    const std::int64_t wide = at(index) * element;
    if (w.about->kind == word_kind::contraction) return columns * element * columns_behind * matrices;
    if (w.about->operand == operand_kind::target) return rows * size_of(dtype::i64);
    if (is_rotary(w)) return rows * of.turned(columns) * element;
    return w.about->operand == operand_kind::column ? wide : rows * at(index) * size_of(of.likely_type(w.operand, x));
  };
  const std::int64_t number_bytes = rows * (x == dtype::f64 ? 8 : 4);
  const std::int64_t x_bytes = rows * columns * element;
  const std::int64_t y_bytes = of.result(0).is_number()
                                   ? number_bytes
                                   : rows * at(static_cast<int>(of.words.size())) * size_of(of.result(0).type(x));
  const std::int64_t statistics = read.statistics ? of.statistics(x) * number_bytes : 0;
  cost total;
  total.forward.bytes = x_bytes + y_bytes + statistics;
  const std::int64_t resumed_bytes = read.kept >= 0 ? rows * columns * size_of(of.result(1 + read.kept).type(x))
                                     : read.result  ? x_bytes
                                                    : 0;
  total.saved_bytes = statistics + (read.x ? x_bytes : resumed_bytes);
  if (read.product || read.kept_behind >= 0 || read.result_behind) total.saved_bytes += y_bytes;
  if (read.product) total.forward.bytes += y_bytes;
  std::int64_t kept = 0;
  std::vector<std::int64_t> operand_bytes;
  for (int i = 0; i < static_cast<int>(of.words.size()); ++i) {
    const word& w = of.words[static_cast<std::size_t>(i)];
    for (int k = 0; w.operand >= 0 && k < w.about->operands; ++k) {
      operand_bytes.push_back(bytes_of(w, i));
      total.forward.bytes += operand_bytes.back();
      if (read.operands[static_cast<std::size_t>(w.operand) + static_cast<std::size_t>(k)])
        total.saved_bytes += operand_bytes.back();
    }
    if (is_keep(w)) kept += rows * at(i) * size_of(result_dtype(x, w.stored));
    if (w.about->gives_number && w.ordinal >= 0) kept += number_bytes;
    if (w.group > 0) kept += number_bytes * (columns / w.group);
    const bool contracts = w.about->kind == word_kind::contraction;
    const std::int64_t elements = contracts ? 2 * rows * columns * columns_behind : rows * at(i);
    total.forward.flops += w.about->flops_forward * elements;
    total.backward.flops += (w.about->flops_backward + (contracts ? 0 : w.about->flops_forward)) * elements;
  }
  total.forward.bytes += kept;
  const std::vector<operand_facts> facts(static_cast<std::size_t>(of.operands), operand_facts{x, false});
  const gradients gradient = plan_gradients(of, x, facts, ~std::uint64_t{0});
  if (of.gives_codes()) {  // which have no gradient
    total.backward = {}, total.saved_bytes = 0;
    const line part = differentiable_part(of);
    if (part.words.empty()) return total;
    const cost of_part = estimate(part, rows, columns, columns_behind, x, matrices);
    total.backward = {of_part.backward.bytes - x_bytes, of_part.backward.flops};
    total.saved_bytes = of_part.saved_bytes;
    return total;
  }
  total.backward.bytes = total.saved_bytes + y_bytes + kept;
  for (const gradient_output& output : gradient.outputs) {
    total.backward.bytes += output.input == 0 ? x_bytes : operand_bytes[static_cast<std::size_t>(output.input) - 1];
  }
  return total;
}

}  // namespace onepass::spec
