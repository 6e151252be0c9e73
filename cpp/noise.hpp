// The noise of a sampling race, exactly; noise.inl bounds it for many tokens at once. noise.py is the definition.
#pragma once
#include <cstdint>

#include "plane.hpp"

namespace csv_decode {

// The race of one state: keys are score + temperature * gumbel.
struct Race {
  NoiseKey key;
  double temperature;
};

// -log(-log(u)) in a fixed sequence of float64 operations.
double gumbel(const NoiseKey& key, int64_t token);

// The temperature to give to `Kernels::noise`.
float raised(double temperature);

// At least temperature * gumbel(key, token), and at most `bound`, which is known to be.
float noise_above(const Race& race, int64_t token, float bound);

}  // namespace csv_decode
