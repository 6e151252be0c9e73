// Counter-based noise of the sampling race: Philox4x32-10 (Salmon et al., SC 2011) keyed by seed, position and stream.
// Token i takes word i % 4 of block i / 4. Counter word 3 is 0 for the upper 32 bits of its random number, 1 for the rest.
// noise.py has the definition in numpy, and the proof that `noise_upper` is an upper bound.

struct Counter {
  uint32_t word[4];
};

inline Counter philox(const NoiseKey& key, uint32_t block, uint32_t part) {
  uint32_t c0 = block, c1 = key.position, c2 = key.stream, c3 = part;
  uint32_t k0 = key.seed[0], k1 = key.seed[1];
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0, p1 = uint64_t{0xCD9E8D57u} * c2;
    const uint32_t next0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    const uint32_t next2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    c0 = next0;
    c2 = next2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// extra[i] >= temperature * gumbel(first + i) for n tokens; first is a multiple of 4. From the upper half alone: with
// y = 1 - u, -log(u) >= y, and -log2(y) is at most the chord of its exponent's interval, which is what the bits of y say.
inline void noise_upper(const NoiseKey& key, float temperature, int64_t first, int64_t n, float* extra) {
  constexpr int kBlocks = 16;
  for (int64_t at = 0; at < n; at += 4 * kBlocks) {
    uint32_t c[4][kBlocks];
    const uint32_t block = static_cast<uint32_t>((first + at) / 4);
    for (int b = 0; b < kBlocks; ++b) {
      c[0][b] = block + static_cast<uint32_t>(b);
      c[1][b] = key.position;
      c[2][b] = key.stream;
      c[3][b] = 0;
    }
    uint32_t k0 = key.seed[0], k1 = key.seed[1];
    for (int round = 0; round < 10; ++round) {
      for (int b = 0; b < kBlocks; ++b) {
        const uint64_t p0 = uint64_t{0xD2511F53u} * c[0][b], p1 = uint64_t{0xCD9E8D57u} * c[2][b];
        c[0][b] = static_cast<uint32_t>(p1 >> 32) ^ c[1][b] ^ k0;
        c[2][b] = static_cast<uint32_t>(p0 >> 32) ^ c[3][b] ^ k1;
        c[1][b] = static_cast<uint32_t>(p1);
        c[3][b] = static_cast<uint32_t>(p0);
      }
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    float out[4 * kBlocks];
    for (int w = 0; w < 4; ++w)
      for (int b = 0; b < kBlocks; ++b) {
        const int32_t whole = static_cast<int32_t>(~c[w][b] >> 1);
        const float y = whole ? static_cast<float>(whole) : 0x1p-22f;
        int32_t bits;
        __builtin_memcpy(&bits, &y, sizeof bits);
        const float log = static_cast<float>((158 << 23) - bits) * 0x1.62e430p-24f + 0x1p-16f;
        out[4 * b + w] = log * temperature;
      }
    const int64_t some = n - at < 4 * kBlocks ? n - at : 4 * kBlocks;
    for (int64_t i = 0; i < some; ++i) extra[at + i] = out[i];
  }
}

// out[i] >= upper[i] + extra[i], extra finite; -infinity and NaN stay.
inline void add_upper(const float* upper, const float* extra, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) {
    const float size = __builtin_fabsf(upper[i]);
    const float slack = ((size < 0x1p126f ? size : 0x1p126f) + __builtin_fabsf(extra[i])) * 0x1p-22f;
    out[i] = (upper[i] + extra[i]) + slack;
  }
}

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
