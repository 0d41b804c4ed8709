// Coefficients of the functions in math.h, lowest power first. Written by tools/minimax.py.
#pragma once

namespace onepass::coefficients {

// ln 2 = high + low; high has 15 significant bits, so that an exponent times high is exact.
constexpr float kLn2High_f32 = 0.69314575f, kLn2Low_f32 = 1.4286068e-06f;
// ln 2 = high + low; high has 32 significant bits, so that an exponent times high is exact.
constexpr double kLn2High_f64 = 0.6931471806019545, kLn2Low_f64 = -4.2009150726810846e-11;
// exp(r) - 1 = r + r² p(r) for |r| <= ln 2 / 2, relative error 1.4e-8.
constexpr float kExpNearest_f32[] = {0.49999997f, 0.16666539f, 0.041667756f, 0.008367124f, 0.0013835642f};
// The same, relative error 2.6e-17.
constexpr double kExpNearest_f64[] = {0.5000000000000006,     0.1666666666666631,     0.041666666666568146,
                                      0.008333333333626711,   0.0013888888934966135,  0.00019841269093675242,
                                      2.4801500823976964e-05, 2.7558053865968116e-06, 2.762788368467865e-07,
                                      2.4824764036489153e-08};
// exp(r) - 1 = r + r² p(r) for 0 <= r <= ln 2, relative error 1.4e-8.
constexpr float kExpBelow_f32[] = {0.5000009f, 0.16664769f, 0.04179486f, 0.007962555f, 0.0018604217f};
// The same, relative error 2.1e-17.
constexpr double kExpBelow_f64[] = {0.4999999999999951,     0.16666666666701668,    0.04166666665802134,
                                    0.00833333343865097,    0.0013888881544807338,  0.00019841585328739229,
                                    2.4792965326167054e-05, 2.7707216739523117e-06, 2.596149538107686e-07,
                                    3.437306243591963e-08};
// log(1 + f) = f + f² p(f) on [-1/4, 1/2], relative error 5.3e-9.
constexpr float kLog1p_f32[] = {-0.5f,       0.33333462f,  -0.25000194f, 0.1999037f,   -0.16642524f,
                                0.14475681f, -0.13211203f, 0.10595378f,  -0.046067815f};
// erf(x) = x + x p(x²) on [-0.6, 0.6], relative error 1.4e-8.
constexpr float kErf_f32[] = {0.12837915f, -0.37612444f, 0.11279932f, -0.026595686f, 0.0044361334f};
// tanh(x) = x + x³ p(x²) on [-0.7, 0.7], relative error 7.1e-10.
constexpr float kTanh_f32[] = {-0.33333325f, 0.13333f, -0.053922288f, 0.02157591f, -0.007891555f, 0.0019009875f};
// Φ(-t) = exp(-t²/2) p(t) / q(t) on [0, 13.3], relative error 1.4e-8; exact at 0.
constexpr float kTailNumerator_f32[] = {0.75f, 0.65250176f, 0.27126744f, 0.059762347f, 0.006003478f};
// q
constexpr float kTailDenominator_f32[] = {1.5f, 2.5018308f, 1.788701f, 0.69475675f, 0.14981371f, 0.015048256f};
// Φ(-t) = exp(-t²/2) s p(s) with s = 1 / (1 + 0.3 t) on [0, 13.3], relative error 7.3e-6.
constexpr float kShortTailSlope_f32 = 0.3f;
constexpr float kShortTail_f32[] = {0.1200998f, 0.113470644f, 0.14526904f, -0.018935202f, 0.21777406f, -0.07767471f};
// Φ(-t) = 2^p(t) on [0, 13], relative error 0.00014 up to 4, at most 32 times that behind.
constexpr float kTailExponent_f32[] = {-1.0002005f,   -1.1485988f,    -0.46413964f,   -0.04940057f,
                                       0.0067677004f, -0.0005907166f, 2.8765871e-05f, -5.8734184e-07f};
// 2^x on [-1/2, 1/2], relative error 2.6e-6.
constexpr float kShortExp2_f32[] = {0.9999993f, 0.69312143f, 0.24024591f, 0.055920944f, 0.009579422f};

}  // namespace onepass::coefficients
