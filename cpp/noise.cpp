#include "noise.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace csv_decode {
namespace {

#include "noise.inl"

// log(x) of a positive normal number, within 4 ulp: x = m 2^e with m in [sqrt(1/2), sqrt(2)), s = (m - 1) / (m + 1).
double log_fixed(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  double e = static_cast<double>(static_cast<int64_t>(bits >> 52) - 1023);
  bits = (bits & 0x000fffffffffffffu) | 0x3ff0000000000000u;
  double m;
  std::memcpy(&m, &bits, sizeof m);
  if (m > 0x1.6a09e667f3bcdp+0) {
    m = m * 0.5;
    e = e + 1.0;
  }
  const double s = (m - 1.0) / (m + 1.0), z = s * s;
  double p = 0.0;
  for (int k = 10; k >= 1; --k) p = (p + 1.0 / (2 * k + 1)) * z;
  const double tail = (s + s) * p + e * 0x1.a39ef35793c76p-33;
  return e * 0x1.62e42fee00000p-1 + ((s + s) + tail);
}

// The smallest float32 that is not below x.
float above(double x) {
  const float f = static_cast<float>(x);
  return static_cast<double>(f) < x ? std::nextafter(f, std::numeric_limits<float>::infinity()) : f;
}

}  // namespace

double gumbel(const NoiseKey& key, int64_t token) {
  const uint32_t block = static_cast<uint32_t>(token / 4);
  const int word = static_cast<int>(token % 4);
  const uint64_t high = philox(key, block, 0).word[word], low = philox(key, block, 1).word[word];
  const uint64_t r = (high << 20) | (low >> 12);
  const double u = static_cast<double>(2 * r + 1) * 0x1p-53;  // odd multiples of 2^-53: exact, neither 0 nor 1
  return -log_fixed(-log_fixed(u));
}

float raised(double temperature) { return above(temperature * (1 + 0x1p-20)); }

float noise_above(const Race& race, int64_t token, float bound) {
  const double noise = race.temperature * gumbel(race.key, token);
  return std::min(bound, above(noise + std::fabs(noise) * 0x1p-40));
}

}  // namespace csv_decode
