// The closed table: lines compiled ahead of time for the CPU, and prebuilt for CUDA by `onepass cache build`.
#include "src/cpu/row/common_lines.h"

#include <algorithm>

#include "src/line/words.h"

namespace onepass::cpu {
namespace {

std::string join(std::string a, const std::string& b) {
  if (a.empty() || b.empty()) return a + b;
  return a + " | " + b;
}

}  // namespace

const std::vector<std::string>& frequent_lines() {
  static const std::vector<std::string> frequent = [] {
    std::vector<std::string> lines{"bias"};  // behind `linear`, in backward
    for (const std::string act : {"gelu", "gelu_tanh", "silu"})
      for (const std::string& line : {act, "bias | " + act, "gate(" + act + ")"}) lines.push_back(line);
    for (const char* line : {"relu",
                             "bias | relu",
                             "layer_norm",
                             "layer_norm | scale | bias",
                             "layer_norm | scale | bias | gelu",
                             "rms_norm",
                             "rms_norm | scale",
                             "add | keep | layer_norm | scale | bias",
                             "add | keep | rms_norm | scale",
                             "bias | add | keep | layer_norm | scale | bias",
                             "dropout(0.1) | add | keep | layer_norm | scale | bias",
                             "dropout(0.1) | add | keep | rms_norm | scale",
                             "bias | dropout(0.1) | add | keep | layer_norm | scale | bias",
                             "bias | dropout(0.1) | add | keep | rms_norm | scale",
                             "dropout(0.1) | add",
                             "bias | dropout(0.1) | add",
                             "gelu | dropout(0.1) | add",
                             "softmax",
                             "mask | softmax",
                             "causal | softmax",
                             "mul(1) | mask | softmax",
                             "mul(1) | mask | softmax | dropout(0.1)",
                             "mul(1) | causal | softmax | dropout(0.1)",
                             "rope",
                             "rms_norm | scale | rope",
                             "log_softmax",
                             "cross_entropy",
                             "logprob",
                             "logprob | entropy"})
      lines.emplace_back(line);
    return lines;
  }();
  return frequent;
}

const std::vector<std::string>& common_lines() {
  static const std::vector<std::string> all = [] {
    std::vector<std::string> lines;
    for (const descriptor* act : spec::activations()) {
      if (act->defined[0] != '\0') continue;  // compiled at first use
      const std::string name = act->name;
      lines.push_back(name);                  // an activation alone
      lines.push_back("bias | " + name);      // bias_act
      lines.push_back("gate(" + name + ")");  // gated
    }
    // layer_norm and rms_norm, with the activations that follow norms in models
    for (const std::string act : {"", "relu", "gelu", "gelu_tanh", "silu", "tanh"}) {
      for (const std::string affine : {"scale | bias", "scale", ""})
        lines.push_back(join(join("layer_norm", affine), act));
      for (const std::string affine : {"scale", ""}) lines.push_back(join(join("rms_norm", affine), act));
    }
    // residual blocks: (bias) (dropout) add keep norm affine, and the same without a norm
    for (const std::string before : {"", "bias", "dropout(0.1)", "bias | dropout(0.1)"}) {
      const std::string sum = join(before, "add | keep");
      for (const std::string norm :
           {"layer_norm | scale | bias", "layer_norm | scale", "layer_norm", "rms_norm | scale", "rms_norm"}) {
        lines.push_back(join(sum, norm));
      }
      lines.push_back(join(before, "add"));
      for (const std::string act : {"gelu", "gelu_tanh", "relu", "silu"}) {  // dropout_add after an activation
        const bool biased = before.starts_with("bias"), dropped = before.ends_with("dropout(0.1)");
        lines.push_back(join(biased ? "bias" : "", join(act, join(dropped ? "dropout(0.1)" : "", "add"))));
      }
    }
    // softmax: (mul) (mask | causal) softmax (dropout)
    for (const std::string factor : {"", "mul(1)"}) {
      for (const std::string masked : {"", "mask", "causal", "mask | causal"}) {
        for (const std::string dropped : {"", "dropout(0.1)"}) {
          lines.push_back(join(join(join(factor, masked), "softmax"), dropped));
        }
      }
    }
    lines.push_back("rope");
    for (const char* alone : {"log_softmax", "l2_norm"}) lines.push_back(alone);
    for (const char* loss : {"cross_entropy", "logprob", "logprob | entropy"}) lines.push_back(loss);
    for (const std::string weight : {"", "scale", "scale(1)"})  // qk_norm_rope
      lines.push_back(join(join("rms_norm", weight), "rope"));
    const std::vector<std::string>& first = frequent_lines();
    std::erase_if(lines, [&](const std::string& l) { return std::find(first.begin(), first.end(), l) != first.end(); });
    lines.insert(lines.begin(), first.begin(), first.end());
    return lines;
  }();
  return all;
}

}  // namespace onepass::cpu
