// Counter-based noise of the sampling race: Philox4x32-10 (Salmon et al., SC 2011) keyed by seed, position and stream.
// Token i takes word i % 4 of block i / 4. Counter word 3 is 0 for the upper 32 bits of its random number, 1 for the rest.
// noise.py has the definition in numpy, and the proof that `noise_upper` is an upper bound.

// Words of 32 bits, one or more side by side in lanes of 64: the product of two fills its lane.
inline uint64_t product(uint64_t a, uint32_t b) { return a * b; }
inline uint64_t upper_half(uint64_t a) { return a >> 32; }
inline uint64_t lower_half(uint64_t a) { return a & 0xffffffffu; }
inline uint64_t flip(uint64_t a, uint64_t b, uint32_t c) { return a ^ b ^ c; }

#if defined(CSV_DECODE_WORDS) && CSV_DECODE_WORDS == 512
using Words = __m512i;
inline Words words_of(uint64_t a) { return _mm512_set1_epi64(static_cast<int64_t>(a)); }
inline Words words_at(const uint64_t* p) { return _mm512_loadu_si512(p); }
inline void put_words(Words a, uint64_t* p) { _mm512_storeu_si512(p, a); }
inline Words product(Words a, uint32_t b) { return _mm512_mul_epu32(a, words_of(b)); }
inline Words upper_half(Words a) { return _mm512_srli_epi64(a, 32); }
inline Words lower_half(Words a) { return _mm512_and_si512(a, words_of(0xffffffffu)); }
inline Words flip(Words a, Words b, uint32_t c) { return _mm512_ternarylogic_epi64(a, b, words_of(c), 0x96); }
#elif defined(CSV_DECODE_WORDS)
using Words = __m256i;
inline Words words_of(uint64_t a) { return _mm256_set1_epi64x(static_cast<int64_t>(a)); }
inline Words words_at(const uint64_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline void put_words(Words a, uint64_t* p) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a); }
inline Words product(Words a, uint32_t b) { return _mm256_mul_epu32(a, words_of(b)); }
inline Words upper_half(Words a) { return _mm256_srli_epi64(a, 32); }
inline Words lower_half(Words a) { return _mm256_and_si256(a, words_of(0xffffffffu)); }
inline Words flip(Words a, Words b, uint32_t c) { return _mm256_xor_si256(_mm256_xor_si256(a, b), words_of(c)); }
#else
using Words = uint64_t;
inline Words words_of(uint64_t a) { return a; }
inline Words words_at(const uint64_t* p) { return *p; }
inline void put_words(Words a, uint64_t* p) { *p = a; }
#endif

// The ten rounds, for N counters (or vectors of them) at once.
template <typename T, int N>
inline void philox_rounds(const NoiseKey& key, T (*c)[N]) {
  uint32_t k0 = key.seed[0], k1 = key.seed[1];
  for (int round = 0; round < 10; ++round) {
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) {
      const T p0 = product(c[0][i], 0xD2511F53u), p1 = product(c[2][i], 0xCD9E8D57u);
      c[0][i] = flip(upper_half(p1), c[1][i], k0);
      c[2][i] = flip(upper_half(p0), c[3][i], k1);
      c[1][i] = lower_half(p1);
      c[3][i] = lower_half(p0);
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

struct Counter {
  uint64_t word[4];
};

inline Counter philox(const NoiseKey& key, uint32_t block, uint32_t part) {
  uint64_t c[4][1] = {{block}, {key.position}, {key.stream}, {part}};
  philox_rounds<uint64_t, 1>(key, c);
  return {{c[0][0], c[1][0], c[2][0], c[3][0]}};
}

// extra[i] >= temperature * gumbel(first + i) for n tokens; first is a multiple of 4. From the upper half alone: with
// y = 1 - u, -log(u) >= y, and -log2(y) is at most the chord of its exponent's interval, which is what the bits of y say.
inline void noise_upper(const NoiseKey& key, float temperature, int64_t first, int64_t n, float* extra) {
  constexpr int kLanes = sizeof(Words) / sizeof(uint64_t), kChains = 4, kBlocks = kLanes * kChains;
  for (int64_t at = 0; at < n; at += 4 * kBlocks) {
    const uint32_t block = static_cast<uint32_t>((first + at) / 4);
    uint64_t blocks[kBlocks], word[4][kBlocks];
    for (int b = 0; b < kBlocks; ++b) blocks[b] = static_cast<uint32_t>(block + static_cast<uint32_t>(b));
    Words c[4][kChains];
    for (int i = 0; i < kChains; ++i) {
      c[0][i] = words_at(blocks + i * kLanes);
      c[1][i] = words_of(key.position);
      c[2][i] = words_of(key.stream);
      c[3][i] = words_of(0);
    }
    philox_rounds<Words, kChains>(key, c);
    for (int w = 0; w < 4; ++w)
      for (int i = 0; i < kChains; ++i) put_words(c[w][i], word[w] + i * kLanes);
    uint32_t bits_of[4 * kBlocks];
    for (int b = 0; b < kBlocks; ++b)
      for (int w = 0; w < 4; ++w) bits_of[4 * b + w] = static_cast<uint32_t>(word[w][b]);
    float out[4 * kBlocks];
    for (int i = 0; i < 4 * kBlocks; ++i) {
      const int32_t whole = static_cast<int32_t>(~bits_of[i] >> 1);
      const float y = whole ? static_cast<float>(whole) : 0x1p-22f;
      int32_t bits;
      __builtin_memcpy(&bits, &y, sizeof bits);
      const float log = static_cast<float>((158 << 23) - bits) * 0x1.62e430p-24f + 0x1p-16f;
      out[i] = log * temperature;
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
