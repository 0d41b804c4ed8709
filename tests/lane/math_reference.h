// What lane functions are compared with, and where.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

namespace onepass::test {

enum class function {
  exp,
  sigmoid,
  expm1,
  log1p,
  tanh,
  erf,
  normal_cdf,
  normal_density,
  rsqrt,
  gelu,
  sqrt,
  sin,
  cos,
  log,
  cubed,  // pow(x, p) with p = 3, -3, 2.5 and -1/8
  power_minus_3,
  power_2_5,
  power_minus_eighth
};

// In a type wider than the one tested: double for float, long double for double.
template <class W>
W reference(function f, W x) {
  constexpr W kSqrtHalf = static_cast<W>(0.70710678118654752440084436210484904L);
  switch (f) {
    case function::exp: return std::exp(x);
    case function::sigmoid: return 1 / (1 + std::exp(-x));
    case function::expm1: return std::expm1(x);
    case function::log1p: return std::log1p(x);
    case function::tanh: return std::tanh(x);
    case function::erf: return std::erf(x);
    case function::normal_cdf: return std::erfc(-x * kSqrtHalf) / 2;
    case function::normal_density: return std::exp(-x * x / 2) * 0.398942280401432677939946L;
    case function::rsqrt: return 1 / std::sqrt(x);
    case function::sqrt: return std::sqrt(x);
    case function::sin: return std::sin(x);
    case function::cos: return std::cos(x);
    case function::log: return std::log(x);
    case function::cubed: return x * x * x;
    case function::power_minus_3: return std::pow(x, W(-3));
    case function::power_2_5: return std::pow(x, W(2.5));
    case function::power_minus_eighth: return std::pow(x, W(-0.125));
    case function::gelu: return x * std::erfc(-x * kSqrtHalf) / 2;
  }
  return 0;
}

// Arguments near which something changes: reductions, clamps, limits of results.
inline constexpr double kEdges[] = {0.0,        1e-44,  1.2e-38,   0.25, 0.34657359, 0.5,    0.6,      0.69314718,
                                    0.84852814, 1.0,    1.0397208, 9.0,  10.0,       13.2,   13.25,    14.0,
                                    16.6,       17.3,   18.0,      20.0, 44.0,       86.9,   87.33654, 87.6,
                                    88.0,       88.37,  88.722839, 89.0, 103.28,     104.0,  709.0,    709.7827,
                                    710.0,      745.13, 1e4,       1e30, 1.27e38,    2.55e38};

template <class T>
std::vector<T> near_edges() {
  std::vector<T> x;
  for (const double edge : kEdges) {
    T up = static_cast<T>(edge), down = up;
    for (int i = 0; i < 2000; ++i) {
      for (const T v : {up, down}) {
        x.push_back(v);
        x.push_back(-v);
      }
      up = std::nextafter(up, std::numeric_limits<T>::infinity());
      down = std::nextafter(down, -std::numeric_limits<T>::infinity());
    }
  }
  return x;
}

}  // namespace onepass::test
