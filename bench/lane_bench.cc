// Nanoseconds a number of each lane function, conversion and random number, in level-one cache, on every SIMD target
// that this CPU has. One register an iteration, as kernels run them.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/lane_bench.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <benchmark/benchmark.h>

#include <memory>
#include <string>
#include <vector>

#include "onepass/lane/cpu.h"
#include "onepass/lane/math.h"
#include "onepass/lane/random.h"

#ifndef ONEPASS_LANE_BENCH_ONCE
#define ONEPASS_LANE_BENCH_ONCE
namespace onepass {
constexpr int64 kNumbers = 4096;

// Input and output as any storage type; the input is spread over [-8, 8].
struct buffers {
  alignas(64) char from[kNumbers * 8], to[kNumbers * 8];
};
}  // namespace onepass
#endif

ONEPASS_BEGIN

template <class T, class F>
void each_register(benchmark::State& state, dtype type, const F& f) {
  using L = vec<T>;
  const auto b = std::make_unique<buffers>();
  for (int64 c = 0; c < kNumbers; c += lanes<L>()) {
    store(b->from, type, c, fma(iota<L>(static_cast<T>(c)), L(T(16.0 / kNumbers)), L(T(-8))));
  }
  for (auto _ : state) {
    for (int64 c = 0; c < kNumbers; c += lanes<L>()) store(b->to, type, c, f(load<L>(b->from, type, c)));
    benchmark::DoNotOptimize(b->to);
    benchmark::ClobberMemory();
  }
  state.counters["ns/number"] = benchmark::Counter(static_cast<double>(state.iterations() * kNumbers) * 1e-9,
                                                   benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}

template <class T>
void random_numbers(benchmark::State& state) {
  using L = vec<T>;
  const auto b = std::make_unique<buffers>();
  const int64 seed_and_offset[2] = {1234567, 89};
  random_source random;
  random.reset(seed_and_offset, 0, kNumbers);
  int64 row = 0;
  for (auto _ : state) {
    random.set_row(row++);
    for (int64 c = 0; c < kNumbers; c += lanes<L>()) store(b->to, dtype::f32, c, random.template next<L>(c));
    benchmark::ClobberMemory();
  }
  state.counters["ns/number"] = benchmark::Counter(static_cast<double>(state.iterations() * kNumbers) * 1e-9,
                                                   benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}

template <class T, class F>
void add(const std::string& name, dtype type, const F& f) {
  const std::string full = name + "/" + hwy::TargetName(HWY_TARGET);
  benchmark::RegisterBenchmark(full.c_str(), [=](benchmark::State& s) { each_register<T>(s, type, f); });
}

template <class T>
void add_functions(const std::string& suffix, dtype type) {
  using L = vec<T>;
  add<T>("copy" + suffix, type, [](L x) ONEPASS_LAMBDA { return x; });
  add<T>("exp" + suffix, type, [](L x) ONEPASS_LAMBDA { return exp(x); });
  add<T>("sigmoid" + suffix, type, [](L x) ONEPASS_LAMBDA { return sigmoid(x); });
  add<T>("tanh" + suffix, type, [](L x) ONEPASS_LAMBDA { return tanh(x); });
  add<T>("normal_cdf" + suffix, type, [](L x) ONEPASS_LAMBDA { return normal_cdf(x); });
  add<T>("erf" + suffix, type, [](L x) ONEPASS_LAMBDA { return erf(x); });
  add<T>("expm1" + suffix, type, [](L x) ONEPASS_LAMBDA { return expm1(x); });
  add<T>("log1p" + suffix, type, [](L x) ONEPASS_LAMBDA { return log1p(x); });
  add<T>("rsqrt" + suffix, type, [](L x) ONEPASS_LAMBDA { return rsqrt(x); });
}

void add_all() {
  add_functions<float>("_f32", dtype::f32);
  add_functions<double>("_f64", dtype::f64);
  add<float>("copy_bf16", dtype::bf16, [](vec<float> x) ONEPASS_LAMBDA { return x; });
  add<float>("copy_f16", dtype::f16, [](vec<float> x) ONEPASS_LAMBDA { return x; });
  add<float>("normal_cdf_bf16", dtype::bf16, [](vec<float> x) ONEPASS_LAMBDA { return normal_cdf(x); });
  const std::string name = std::string("random_f32/") + hwy::TargetName(HWY_TARGET);
  benchmark::RegisterBenchmark(name.c_str(), random_numbers<float>);
}

ONEPASS_END

#if HWY_ONCE
namespace onepass {
HWY_EXPORT(add_all);
}
int main(int argc, char** argv) {
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    hwy::GetChosenTarget().Update(target);
    using namespace onepass;
    HWY_DYNAMIC_DISPATCH(add_all)();
  }
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}
#endif
