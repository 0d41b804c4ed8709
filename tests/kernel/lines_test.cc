// Lines without `linear` on the device, forward and backward, beside the CPU in float64.
#include <array>

#include "onepass/core.h"
#include "src/cpu/row/common_lines.h"
#include "src/cuda/row/group.h"
#include "src/cuda/row/launch.h"
#include "src/line/defined.h"
#include "tests/kernel/line_call.h"

namespace onepass::cuda {
namespace {

using EmulatedLists = Emulated;

class EmulatedLines : public Emulated, public testing::WithParamInterface<line_case> {};

TEST_P(EmulatedLines, AreTheCpus) {
  const auto& [text, x, column, of] = GetParam();
  line_call(text, x, column, of).expect_right();
}

constexpr line_case kCases[] = {
    {"gelu", dtype::bf16, dtype::bf16, {37, 128}},
    {"bias | gelu_tanh", dtype::f32, dtype::f32, {20, 96}},
    {"gate(silu)", dtype::f16, dtype::f16, {10, 200}},
    {"bias | dropout(0.1) | add", dtype::bf16, dtype::f32, {30, 264}},
    {"layer_norm | scale | bias", dtype::f32, dtype::f32, {70, 512}},
    {"layer_norm | scale | bias", dtype::bf16, dtype::bf16, {9, 1000}},
    {"bias | dropout(0.1) | add | keep | rms_norm | scale", dtype::bf16, dtype::bf16, {33, 768}},
    {"mul(1) | mask | softmax", dtype::f32, dtype::f32, {12, 77}},
    {"softmax", dtype::bf16, dtype::bf16, {5, 16384}},
    {"softmax", dtype::bf16, dtype::bf16, {2, 70001}},
    {"layer_norm | scale | bias", dtype::bf16, dtype::bf16, {3, 40000}},
    {"rms_norm | scale", dtype::bf16, dtype::bf16, {2, 600000}},
};
INSTANTIATE_TEST_SUITE_P(Kinds, EmulatedLines, testing::ValuesIn(kCases), [](const auto& of) {
  std::string name = of.param.line + std::string("_") + std::to_string(of.param.of.columns);
  std::erase_if(name, [](char c) { return std::isalnum(static_cast<unsigned char>(c)) == 0; });
  return name;
});

TEST_F(EmulatedAnyLines, LeaveWhatForwardMade) {
  for (const line_case& of : {line_case{"layer_norm | scale | bias", dtype::f32, dtype::f32, {6, 33}},
                              line_case{"layer_norm | scale | bias | gelu", dtype::bf16, dtype::bf16, {20, 512}},
                              line_case{"rms_norm | scale", dtype::f16, dtype::f16, {1, 20000}},
                              line_case{"bias | gelu", dtype::f32, dtype::f32, {6, 33}}})
    line_call(of.line, of.x, of.column, of.of).expect_right(true);
}

// Rows whose deviation is two units in the last place of their mean: as many threads share one as it is long.
TEST_F(EmulatedAnyLines, OfASmallDeviationAreTheCpus) {
  for (const sizes of :
       {sizes{9, 64}, sizes{5, 512}, sizes{3, 1001}, sizes{2, 8192}, sizes{1, 40000}, sizes{1, 300000}})
    line_call("layer_norm | scale | bias", dtype::f32, dtype::f32, of, {}, 1048576.0f).expect_right();
}

// A lane within a channel, over several of them, and of one; rows that a warp, a block and a cluster hold. Gradients
// are added up for units of 32 to 256 columns, or not.
TEST_F(EmulatedAnyLines, ByChannelsAreTheCpus) {
  const char* const norm = "layer_norm | scale(channels) | bias(channels) | silu";
  for (const auto& [of, channels] : {std::pair{sizes{9, 64}, int64{4}},
                                     {{6, 98}, 2},
                                     {{5, 147}, 49},
                                     {{4, 77}, 77},
                                     {{4, 77}, 1},
                                     {{40, 96}, 3},
                                     {{9, 256}, 4},
                                     {{70, 512}, 2},
                                     {{3, 4096}, 16},
                                     {{1, 20480}, 10}})
    line_call(norm, dtype::bf16, dtype::f32, of, {}, 0, false, channels).expect_right();
  for (const char* const words : {"scale(1, channels) | add | gelu", "bias(channels) | keep | rms_norm | scale",
                                  "scale(channels) | bias(channels)", "bias(channels) | softmax | scale(channels)"})
    for (const int64 channels : {7, 42, 3})
      line_call(words, dtype::f32, dtype::f32, {60, 672}, {1, 3}, 0, false, channels).expect_right();
}

// Held in registers from the first to the last, by threads of a warp, of a block and of a cluster; or in parts.
TEST_F(EmulatedAnyLines, OfSeveralRowWordsAreTheCpus) {
  const char* const residual = "rms_norm | scale | add | keep | rms_norm | scale";
  const char* const mixed =
      "gelu | layer_norm | scale | bias | dropout(0.2) | softmax | mul(8) | layer_norm | gate(silu)";
  for (const line_case& of :
       {line_case{residual, dtype::bf16, dtype::bf16, {9, 64}},
        line_case{residual, dtype::bf16, dtype::f32, {20, 1000}},
        line_case{residual, dtype::f32, dtype::f32, {3, 4096}},
        line_case{residual, dtype::bf16, dtype::bf16, {2, 40000}}, line_case{mixed, dtype::f32, dtype::f32, {7, 77}},
        line_case{mixed, dtype::f16, dtype::f16, {3, 2050}},
        line_case{"softmax | rms_norm(1e-12)", dtype::bf16, dtype::bf16, {2, 16384}},
        line_case{residual, dtype::bf16, dtype::bf16, {2, 600000}},
        line_case{mixed, dtype::f32, dtype::f32, {1, 300001}}})
    line_call(of.line, of.x, of.column, of.of).expect_right();
  line_call(residual, dtype::bf16, dtype::bf16, {5, 256}).expect_right(true);
  line_call(residual, dtype::f32, dtype::f32, {1, 300000}).expect_right(true);
}

// A value kept in float32 beside 16 bits, to which a residual of float32 was added.
TEST_F(EmulatedAnyLines, ThatKeepFloat32AreTheCpus) {
  const char* const residual = "add | keep(float32) | rms_norm | scale";
  for (const line_case& of :
       {line_case{residual, dtype::bf16, dtype::bf16, {9, 64}}, line_case{residual, dtype::f16, dtype::f32, {20, 1001}},
        line_case{residual, dtype::bf16, dtype::bf16, {2, 40000}},
        line_case{residual, dtype::bf16, dtype::bf16, {2, 600000}},
        line_case{residual, dtype::f32, dtype::f32, {3, 96}},
        line_case{"add | keep(float32) | gelu", dtype::bf16, dtype::bf16, {7, 77}},
        line_case{"add | keep(float32) | rms_norm | scale | keep | logsumexp", dtype::bf16, dtype::bf16, {5, 200}},
        line_case{"rms_norm | scale | add | keep(float32) | layer_norm", dtype::bf16, dtype::bf16, {6, 1000}}})
    line_call(of.line, of.x, of.column, of.of).expect_right();
  line_call(residual, dtype::bf16, dtype::bf16, {5, 75}, {.offset = 1, .gap = 3}).expect_right();
}

// Codes of norms' results, beside what is kept; their values are compared.
TEST_F(EmulatedAnyLines, ThatGiveCodesAreTheCpus) {
  const std::string norm = "times | add | keep | layer_norm | scale | bias | quantize(fp8)";
  for (const line_case& of : {line_case{norm.c_str(), dtype::bf16, dtype::bf16, {9, 64}},
                              line_case{norm.c_str(), dtype::f32, dtype::f32, {5, 77}},
                              line_case{norm.c_str(), dtype::f16, dtype::f32, {3, 5000}},
                              line_case{"quantize(fp8)", dtype::bf16, dtype::bf16, {4, 1001}},
                              line_case{"quantize(fp8)", dtype::f32, dtype::f32, {2, 40000}},
                              line_case{"rms_norm | quantize(fp8)", dtype::bf16, dtype::bf16, {1, 600000}},
                              line_case{"rope | quantize(fp8)", dtype::bf16, dtype::bf16, {5, 128}},
                              line_case{"rms_norm | scale | rope | quantize(fp8)", dtype::f32, dtype::f32, {3, 260}},
                              line_case{"rope(16) | keep | quantize(fp8)", dtype::f16, dtype::f16, {7, 40}}})
    line_call(of.line, of.x, of.column, of.of).expect_codes(0x1p-4);
  line_call("quantize(fp8)", dtype::bf16, dtype::bf16, {5, 75}, {.offset = 1, .gap = 3}).expect_codes(0x1p-4);
  line_call("quantize(fp8e5m2)", dtype::bf16, dtype::bf16, {9, 64}).expect_codes(0x1p-3);
  line_call("quantize(int8)", dtype::bf16, dtype::bf16, {9, 64}).expect_codes(0);
}

// In tiles, by threads of a warp, a block and a cluster, and in parts; lanes of 32 bytes; rows that do not begin at 16.
TEST_F(EmulatedAnyLines, ThatGiveCodesOfGroupsAreTheCpus) {
  const char* const gated = "silu | times | quantize(fp8, 128)";
  const char* const norm = "add | keep | rms_norm | scale | quantize(fp8, 128)";
  const char* const long_lanes = "dropout(0.5) | add | keep | layer_norm | scale | quantize(fp8, 256)";
  for (const line_case& of :
       {line_case{gated, dtype::bf16, dtype::bf16, {9, 384}}, line_case{gated, dtype::f32, dtype::f32, {5, 128}},
        line_case{gated, dtype::f16, dtype::f16, {300, 256}}, line_case{gated, dtype::f32, dtype::f32, {3, 4480}},
        line_case{"quantize(fp8, 16)", dtype::bf16, dtype::bf16, {7, 48}},
        line_case{"quantize(fp8, 32)", dtype::f32, dtype::f32, {1, 20000}},
        line_case{"quantize(fp8, 256)", dtype::f32, dtype::f32, {6, 1280}},
        line_case{norm, dtype::bf16, dtype::bf16, {9, 128}}, line_case{norm, dtype::bf16, dtype::bf16, {17, 1152}},
        line_case{norm, dtype::f32, dtype::f32, {9, 128}}, line_case{norm, dtype::f32, dtype::bf16, {3, 7168}},
        line_case{norm, dtype::bf16, dtype::bf16, {2, 40960}}, line_case{norm, dtype::bf16, dtype::bf16, {1, 600064}},
        line_case{long_lanes, dtype::f32, dtype::f32, {9, 768}},
        line_case{long_lanes, dtype::f32, dtype::f32, {2, 40960}},
        line_case{long_lanes, dtype::f32, dtype::f32, {1, 300032}},
        line_case{
            "rms_norm | scale | add | keep | layer_norm | quantize(fp8, 64)", dtype::f16, dtype::f32, {5, 192}}}) {
    SCOPED_TRACE(of.line + std::string(", ") + std::to_string(of.of.rows) + " x " + std::to_string(of.of.columns));
    line_call(of.line, of.x, of.column, of.of).expect_codes(0x1p-4);
  }
  for (const char* const line : {gated, norm})
    for (const memory& lies : {memory{1, 3}, memory{2, 6}, memory{4, 12}, memory{0, 1}}) {
      line_call(line, dtype::bf16, dtype::bf16, {5, 256}, lies).expect_codes(0x1p-4);
      line_call(line, dtype::f32, dtype::f32, {5, 256}, lies).expect_codes(0x1p-4);
    }
  line_call(norm, dtype::bf16, dtype::bf16, {2, 40960}, {1, 3}).expect_codes(0x1p-4);
  line_call(long_lanes, dtype::f32, dtype::f32, {5, 512}, {1, 3}).expect_codes(0x1p-4);
  line_call("scale | quantize(fp8e5m2, 128)", dtype::bf16, dtype::bf16, {9, 256}).expect_codes(0x1p-3);
  line_call("rms_norm | quantize(int8, 64)", dtype::bf16, dtype::bf16, {9, 256}).expect_codes(0);
}

// By threads of a warp, of a block and of a cluster; or in parts. Of l2_norm's rows some are shorter than its number.
TEST_F(EmulatedAnyLines, OfLogSoftmaxAndLengthsAreTheCpus) {
  const char* const both = "times | l2_norm | scale | add | keep | log_softmax | gated(silu)";
  for (const line_case& of :
       {line_case{"log_softmax", dtype::bf16, dtype::bf16, {9, 64}},
        line_case{"sub | mask | log_softmax", dtype::f32, dtype::f32, {12, 77}},
        line_case{"log_softmax", dtype::bf16, dtype::bf16, {5, 16384}},
        line_case{"bias | log_softmax", dtype::f32, dtype::f32, {2, 40000}},
        line_case{"tanh | log_softmax", dtype::bf16, dtype::bf16, {2, 600000}},
        line_case{"l2_norm(8) | scale", dtype::bf16, dtype::f32, {33, 72}},
        line_case{"l2_norm", dtype::f16, dtype::f16, {3, 1001}},
        line_case{"l2_norm | scale", dtype::f32, dtype::f32, {2, 20000}},
        line_case{"l2_norm(1e3)", dtype::f32, dtype::f32, {2, 300000}},
        line_case{both, dtype::f32, dtype::f32, {7, 200}}, line_case{both, dtype::bf16, dtype::bf16, {3, 5000}},
        line_case{both, dtype::f32, dtype::f32, {1, 300001}}})
    line_call(of.line, of.x, of.column, of.of).expect_right();
}

// All but `pow`, whose PTX calls a function: the emulator has no calls.
TEST_F(EmulatedAnyLines, OfFunctionsAreTheCpus) {
  const char* const functions = "clamp(-1, 1.5) | exp | sqrt | gate(abs) | neg | softcap(2) | square";
  for (const dtype x : {dtype::f32, dtype::bf16, dtype::f16}) {
    line_call("round | sub | times | gated(clamp(-1, 2)) | round", x, x, {9, 200}).expect_right();
    line_call("sigmoid | log | neg | sqrt", x, x, {10, 96}).expect_right();
  }
  line_call(functions, dtype::f32, dtype::f32, {20, 96}).expect_right();
}

// Of one and of two sums, by threads of a warp, of a block and of a cluster; or in parts.
TEST_F(EmulatedAnyLines, OfUsersRowWordsAreTheCpus) {
  spec::define({.name = "own_norm",
                .kind = spec::defined_kind::row,
                .parameters = {"eps"},
                .sums = 2,
                .source =
                    "template <class L> static L sum(L x, scalar eps) { return x; }\n"
                    "template <class L> static L second_sum(L x, scalar eps) { return x * x; }\n"
                    "template <class L> static L forward(L x, scalar sum, scalar second, scalar n, scalar eps) {\n"
                    "  const L mean = sum / n;\n"
                    "  return (x - mean) * rsqrt(second / n - mean * mean + eps);\n}"});
  spec::define({.name = "own_length",
                .kind = spec::defined_kind::ending,
                .sums = 1,
                .source = "template <class L> static L sum(L x) { return x * x; }\n"
                          "static scalar number(scalar sum, scalar n) { return sqrt(sum); }"});
  const char* const both = "gelu | add | keep | own_norm(0.1) | scale | rms_norm(0.1) | own_norm(0.5) | bias";
  const char* const numbers = "bias | own_length | logsumexp";
  for (const line_case& of :
       {line_case{both, dtype::f32, dtype::f32, {9, 64}}, line_case{both, dtype::bf16, dtype::bf16, {5, 1000}},
        line_case{both, dtype::f32, dtype::f32, {2, 20000}}, line_case{both, dtype::f32, dtype::f32, {1, 300001}},
        line_case{"own_norm(0.1) | scale", dtype::bf16, dtype::bf16, {20, 4096}},
        line_case{"own_norm(0.1) | scale", dtype::bf16, dtype::bf16, {2, 65536}},
        line_case{numbers, dtype::f32, dtype::f32, {7, 77}}, line_case{numbers, dtype::bf16, dtype::bf16, {3, 8192}},
        line_case{"own_norm(0.1) | keep | own_length", dtype::f32, dtype::f32, {2, 2050}},
        line_case{numbers, dtype::f32, dtype::f32, {1, 600000}}})
    line_call(of.line, of.x, of.column, of.of).expect_right();
  line_call("own_norm(0.1) | scale", dtype::f32, dtype::f32, {5, 256}).expect_right(true);
  spec::undefine("own_norm"), spec::undefine("own_length");
}

// A gradient times one number, in its place; where that is 1 the kernel ends at once.
TEST_F(EmulatedAnyLines, ThatMultiplyInPlaceByOneNumber) {
  for (const dtype type : {dtype::bf16, dtype::f32}) {
    for (const float factor : {1.0f, -2.5f}) {
      constexpr sizes kOf{37, 264};
      const std::vector<float> numbers = drawn(static_cast<std::size_t>(kOf.rows * kOf.columns), type, 5);
      const device_tensor dy(numbers, type), by(std::vector<float>{factor}, dtype::f32);
      call c = call_of(spec::parse("times"), true, type, type, kOf.rows, kOf.columns);
      c.r.in_place = true, c.r.wants_tensor = 0, c.r.operand[0] = dtype::f32;
      arguments a{};
      set_rows(a, kOf.rows);
      a.columns = kOf.columns, a.matrix_rows = kOf.rows;
      a.y = a.dx = {dy.data(), {0, 0, 0, kOf.columns}, type, 1};
      a.operand[0] = {by.data(), {}, dtype::f32, 0};
      const std::vector<plan> plans = prepare(c.r, a, 0, nullptr);
      ASSERT_EQ(plans.front().with.one_factor, 1u);
      launch(c.r, plans, a, 0, nullptr);
      std::vector<double> right(numbers.begin(), numbers.end());
      for (double& number : right) number *= factor;
      EXPECT_LT(distance(dy.host(), right), type == dtype::f32 ? 1e-7 : 4e-3) << factor;
      request more = c.r;  // of `times | linear`: what else is written does not depend on the factor's being 1
      more.wants_recompute = true;
      EXPECT_EQ(describe(more, a).one_factor, 0u);
      more.wants_recompute = false, more.wants_tensor = 1;
      EXPECT_EQ(describe(more, a).one_factor, 0u);
      a.operand[0].stride[3] = 1;  // a number a row is no such number
      EXPECT_EQ(describe(c.r, a).one_factor, 0u);
    }
  }
}

// By threads of a warp, of a block and of a cluster, or in parts; whole rows and their first numbers, pairs half of
// what is turned apart and neighbours, tables of numbers and of pairs.
TEST_F(EmulatedAnyLines, WithRopeAreTheCpus) {
  const char* const norm = "rms_norm(1e-6) | scale | rope";
  const char* const first = "rms_norm(1e-6) | scale | rope(32)";
  const char* const mixed = "bias | layer_norm | dropout(0.2) | rope(16, interleaved) | keep | rms_norm | gate(silu)";
  for (const line_case& of :
       {line_case{norm, dtype::bf16, dtype::bf16, {40, 128}}, line_case{norm, dtype::f32, dtype::f32, {9, 64}},
        line_case{norm, dtype::bf16, dtype::f32, {20, 80}}, line_case{norm, dtype::f16, dtype::f16, {7, 34}},
        line_case{norm, dtype::bf16, dtype::bf16, {3, 8192}}, line_case{norm, dtype::f32, dtype::f32, {2, 40000}},
        line_case{norm, dtype::bf16, dtype::bf16, {2, 600000}}, line_case{first, dtype::bf16, dtype::bf16, {40, 128}},
        line_case{first, dtype::f32, dtype::f32, {9, 36}}, line_case{first, dtype::f32, dtype::f32, {1, 300000}},
        line_case{mixed, dtype::f32, dtype::f32, {7, 48}}, line_case{mixed, dtype::bf16, dtype::bf16, {3, 256}},
        line_case{mixed, dtype::bf16, dtype::bf16, {2, 16384}},
        line_case{"scale | rope", dtype::bf16, dtype::bf16, {40, 128}},
        line_case{"scale | rope(12) | silu", dtype::f32, dtype::f32, {300, 20}},
        line_case{"dropout(0.3) | rope | causal | softmax", dtype::bf16, dtype::bf16, {5, 96}},
        line_case{"rope(interleaved)", dtype::f16, dtype::f16, {6, 6}},
        line_case{"bias | rope(64, interleaved) | keep", dtype::bf16, dtype::bf16, {11, 128}}}) {
    SCOPED_TRACE(of.line);
    line_call(of.line, of.x, of.column, of.of).expect_right();
    line_call(of.line, of.x, of.column, of.of, {4, 12}, 0, true).expect_right();
  }
  line_call(norm, dtype::bf16, dtype::bf16, {9, 128}, {1, 3}).expect_right();
  line_call(norm, dtype::bf16, dtype::bf16, {9, 128}, {2, 6}, 0, true).expect_right(true);
}

// Tensors of one list.
TEST_F(EmulatedLists, ShareALaunch) {
  std::vector<std::unique_ptr<line_call>> calls;
  std::vector<arguments> all;
  for (const sizes of : {sizes{5, 72}, sizes{40, 72}, sizes{2, 72}})
    calls.push_back(std::make_unique<line_call>("layer_norm | scale | bias", dtype::bf16, dtype::bf16, of));
  for (const auto& call : calls) all.push_back(call->begin_forward());
  std::vector<member> members;
  for (arguments& a : all) members.push_back({&a, false});
  const request r = calls.front()->forward_request();
  const std::vector<batch> shared = batches(r, members, 0, nullptr);
  ASSERT_EQ(shared.size(), 1u);
  launch(r, shared.front(), members, 0, nullptr);
  for (const auto& call : calls) call->expect_found();
}

// Queries and keys.
TEST_F(EmulatedLists, WithRopeShareALaunch) {
  std::vector<std::unique_ptr<line_call>> calls;
  std::vector<arguments> all;
  for (const sizes of : {sizes{40, 128}, sizes{8, 128}})
    calls.push_back(std::make_unique<line_call>("rms_norm(1e-6) | scale(1) | rope", dtype::bf16, dtype::bf16, of,
                                                memory{}, 0.0f, true));
  for (const auto& call : calls) all.push_back(call->begin_forward());
  std::vector<member> members;
  for (arguments& a : all) members.push_back({&a, false});
  const request r = calls.front()->forward_request();
  const std::vector<batch> shared = batches(r, members, 0, nullptr);
  ASSERT_EQ(shared.size(), 1u);
  launch(r, shared.front(), members, 0, nullptr);
  for (const auto& call : calls) call->expect_found();
}

// Rows that begin at 16 bytes and end within a lane: short ones, of a block, in clusters, read in steps and in parts.
TEST_F(EmulatedAnyLines, OfPaddedRowsAreTheCpus) {
  for (const line_case& of :
       {line_case{"gelu", dtype::bf16, dtype::bf16, {9, 77}},
        line_case{"bias | gate(silu)", dtype::f32, dtype::f32, {40, 70}},
        line_case{"bias | dropout(0.1) | add | keep | rms_norm(1e-3) | scale", dtype::f16, dtype::f32, {7, 333}},
        line_case{"layer_norm | scale | bias", dtype::bf16, dtype::bf16, {9, 4099}},
        line_case{"mul(0.125) | mask | softmax", dtype::bf16, dtype::bf16, {5, 1001}},
        line_case{"layer_norm | scale", dtype::bf16, dtype::bf16, {3, 40001}},
        line_case{"cross_entropy(0.1, 0.01)", dtype::bf16, dtype::bf16, {5, 3001}},
        line_case{"bias | softcap(3) | cross_entropy", dtype::bf16, dtype::bf16, {3, 50257}},
        line_case{"bias | logprob | entropy", dtype::f32, dtype::f32, {2, 30522}},
        line_case{"cross_entropy", dtype::f16, dtype::f16, {2, 600001}},
        line_case{"kl_div", dtype::bf16, dtype::bf16, {5, 999}},
        line_case{"log_softmax", dtype::f32, dtype::f32, {1, 300001}}}) {
    SCOPED_TRACE(of.line + std::string(", ") + std::to_string(of.of.rows) + " x " + std::to_string(of.of.columns));
    line_call(of.line, of.x, of.column, of.of, padded(of.of.columns, of.x)).expect_right();
  }
}

// Any of the common lines, of any size and layout; EMULATED_LINES says how many.
TEST_F(EmulatedAnyLines, AreTheCpus) {
  const char* const asked = std::getenv("EMULATED_LINES");
  std::mt19937 random(asked ? std::random_device()() : 0);
  const std::vector<std::string>& all = cpu::common_lines();
  for (int n = asked ? std::atoi(asked) : 12; n > 0; --n) {
    const std::string& text = all[random() % all.size()];
    const dtype x = std::array{dtype::f32, dtype::bf16, dtype::f16}[random() % 3];
    const dtype column = random() % 4 == 0 ? dtype::f32 : x;
    const bool is_long = random() % 8 == 0;
    int64 columns = 1 + static_cast<int64>(random() % (is_long ? 20000 : 1500));
    if (random() % 2 == 0) columns = (columns + 7) / 8 * 8;
    if (text.find("rope") != std::string::npos) columns += columns % 2;
    const sizes of{1 + static_cast<int64>(random() % (is_long ? 4 : 40)), columns};
    memory lies{static_cast<int64>(random() % 3 == 0 ? random() % 9 : 0),
                static_cast<int64>(random() % 3 == 0 ? random() % 20 : 0), random() % 2 == 0};
    if (random() % 4 == 0) lies = padded(columns, x);
    SCOPED_TRACE(text + ", " + std::to_string(of.rows) + " x " + std::to_string(of.columns) + ", dtypes " +
                 std::to_string(static_cast<int>(x)) + " and " + std::to_string(static_cast<int>(column)) +
                 ", offset " + std::to_string(lies.offset) + ", gap " + std::to_string(lies.gap));
    line_call(text, x, column, of, lies).expect_right();
  }
}

}  // namespace
}  // namespace onepass::cuda
