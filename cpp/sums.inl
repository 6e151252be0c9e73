// Bounds of exponentials, row by row and of all rows together; docs/mathematics.md, section 10.

// Adds to bins[j] an upper bound of sum 2^(rate (upper_i - from)) over the rows whose exponent is in (-(j + 1) / 2, -j / 2];
// the first bin also takes all above, the last all below. Rows of -infinity count nothing. The bits of t + 127, read as a
// float, are (1 + f) 2^e >= 2^(e + f), since 2^f is convex; t is rounded up by more than its error.
inline void mass_upper(const float* upper, int64_t n, float from, float rate, double* bins) {
  constexpr int kStep = 64;
  for (int64_t at = 0; at < n; at += kStep) {
    float weight[kStep];
    int32_t bin[kStep];
    const int some = n - at < kStep ? static_cast<int>(n - at) : kStep;
    float u[kStep];
    for (int i = 0; i < kStep; ++i) u[i] = i < some ? upper[at + i] : -__builtin_inff();
    for (int i = 0; i < kStep; ++i) {
      float t = (u[i] - from) * rate;
      t += __builtin_fabsf(t) * 0x1p-20f + 0x1p-15f;
      const float floor = t > -63.75f ? t : -63.75f;  // NaN becomes -63.75 and is told below
      const float held = floor < 120.0f ? floor : 120.0f;
      const int32_t bits = static_cast<int32_t>((held + 127.0f) * 0x1p23f);
      float w;
      __builtin_memcpy(&w, &bits, sizeof w);
      w = t <= 120.0f ? w : __builtin_inff();
      weight[i] = u[i] == -__builtin_inff() ? 0.0f : w;
      const int32_t half = static_cast<int32_t>(held * -2.0f);
      bin[i] = half > 0 ? half : 0;
    }
    for (int i = 0; i < some; ++i) bins[bin[i]] += static_cast<double>(weight[i]);
  }
}

// 2^t for t in [-64, 120], within a factor 1 +- 2^-17: a polynomial for the fraction, the exponent's bits for the rest.
inline float exp2_near(float t) {
  const int32_t whole = static_cast<int32_t>(t + 128.0f) - 128;
  const float f = t - static_cast<float>(whole);
  const float p = (((0x1.bb7ccep-7f * f + 0x1.aa1402p-5f) * f + 0x1.ee7984p-3f) * f + 0x1.62d166p-1f) * f + 0x1.00002cp+0f;
  const int32_t bits = (whole + 127) << 23;
  float power;
  __builtin_memcpy(&power, &bits, sizeof power);
  return power * p;
}

// What the joint bound of many rows asks of each (docs/mathematics.md, section 10): with x = ln(2) rate,
//   high >= exp(x (upper - from)),
//   likely = exp(x (centre - from)) within a factor 1 +- 2^-12, never below 2^-64,
//   peak >= high / max(2, (x (upper - centre))^2).
// Rows whose upper bound is -infinity get zeros, those without a finite centre a peak of infinity.
inline void joint_terms(const float* centre, const float* upper, int64_t n, float from, float rate, float* high,
                        float* likely, float* peak) {
  constexpr int kStep = 64;  // in short loops without branches, which compilers turn into vectors
  const float infinity = __builtin_inff();
  for (int64_t at = 0; at < n; at += kStep) {
    const int some = n - at < kStep ? static_cast<int>(n - at) : kStep;
    float u[kStep], a[kStep], t[kStep], s[kStep], h[kStep], w[kStep], q[kStep];
    for (int i = 0; i < kStep; ++i) {
      u[i] = i < some ? upper[at + i] : -infinity;
      a[i] = i < some ? centre[at + i] : -infinity;
    }
    for (int i = 0; i < kStep; ++i) {
      const float x = (u[i] - from) * rate;
      t[i] = x + (__builtin_fabsf(x) * 0x1p-20f + 0x1p-15f);
      s[i] = (a[i] - from) * rate;
    }
    for (int i = 0; i < kStep; ++i) {  // NaN becomes -63.75 and is told below
      const float t_floor = t[i] > -63.75f ? t[i] : -63.75f, s_floor = s[i] > -63.75f ? s[i] : -63.75f;
      h[i] = t_floor < 120.0f ? t_floor : 120.0f;
      w[i] = s_floor < 120.0f ? s_floor : 120.0f;
    }
    for (int i = 0; i < kStep; ++i) h[i] = exp2_near(h[i]) * (1.0f + 0x1p-13f);
    for (int i = 0; i < kStep; ++i) w[i] = exp2_near(w[i]);
    for (int i = 0; i < kStep; ++i) h[i] = t[i] <= 120.0f ? h[i] : infinity;
    for (int i = 0; i < kStep; ++i) w[i] = s[i] <= 120.0f ? w[i] : infinity;
    for (int i = 0; i < kStep; ++i) {
      const float e = (u[i] - a[i]) * rate * 0x1.62e42cp-1f;  // below ln(2)
      const float square = e * e * (1.0f - 0x1p-18f);
      q[i] = h[i] * (1.0f + 0x1p-20f) / (square > 2.0f ? square : 2.0f);
    }
    for (int i = 0; i < kStep; ++i) q[i] = q[i] >= 0.0f ? q[i] : infinity;
    for (int i = 0; i < kStep; ++i) q[i] = __builtin_fabsf(a[i]) < 0x1p127f ? q[i] : infinity;
    for (int i = 0; i < some; ++i) {
      const bool gone = u[i] == -infinity;
      high[at + i] = gone ? 0.0f : h[i];
      likely[at + i] = gone ? 0.0f : w[i];
      peak[at + i] = gone ? 0.0f : q[i];
    }
  }
}
