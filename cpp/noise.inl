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
