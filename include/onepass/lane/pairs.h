// What functions give that share most of their work, on every lane.
#pragma once

namespace onepass {

// tanh(x), and 1 - tanh|x|, of which its slope is made: of one exponential and one division.
template <class L>
struct tanh_pair {
  L value, rest;
};

// sigmoid(x), and 1 - sigmoid(x).
template <class L>
struct logistic_pair {
  L value, rest;
};

// The normal distribution function, and its derivative: of one exponential.
template <class L>
struct normal_pair {
  L cdf, density;
};

}  // namespace onepass
