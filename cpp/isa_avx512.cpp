// AVX-512 (F, BW, VL, DQ), compiled twice: with VNNI, and without for the processors before it (isa_avx512bw.cpp).
// With it, vpdpbusd multiplies unsigned codes by signed state bytes and adds four products to an int32 lane without
// saturation, so the integer sums are exact. Without, vpmaddubsw adds two products to an int16 lane, and lanes are
// widened before they could saturate: see `kWiden`.
#if defined(CSV_DECODE_X86)
#include <immintrin.h>

#include "plane.hpp"

namespace csv_decode {
namespace {
#include "row_math.inl"
#define CSV_DECODE_WORDS 512
#include "noise.inl"
#include "sums.inl"

// Codes are fetched in the order of memory, one line for each line used, not in the order of use: a cold scan takes half
// the time, since the order of use jumps between the parts of a segment and between blocks.
constexpr int kPrefetchBytes = 8192;

// Field f of a word, or of the three words that hold fields of 3 bits.
template <int Bits>
__attribute__((always_inline)) inline __m512i field(const __m512i* w, int f) {
  if constexpr (Bits == 3) {
    const __m512i low = _mm512_and_si512(_mm512_srli_epi32(w[f / 4], 2 * (f % 4)), _mm512_set1_epi8(3));
    const __m512i high = f < 2 ? _mm512_slli_epi32(w[2], 2 - f) : _mm512_srli_epi32(w[2], f - 2);
    return _mm512_ternarylogic_epi32(low, high, _mm512_set1_epi8(4), 0xf8);  // low | (high & 4)
  }
  return _mm512_and_si512(f ? _mm512_srli_epi32(w[0], f * Bits) : w[0], _mm512_set1_epi8((1 << Bits) - 1));
}

#if defined(CSV_DECODE_NO_VNNI)
constexpr bool kVnni = false;
inline __m512i add_dot(__m512i acc, __m512i, __m512i) { return acc; }  // never called
#else
constexpr bool kVnni = true;
inline __m512i add_dot(__m512i acc, __m512i codes, __m512i state) { return _mm512_dpbusd_epi32(acc, codes, state); }
#endif
inline __m512i add_pairs(__m512i acc, __m512i codes, __m512i state) {
  return _mm512_add_epi16(acc, _mm512_maddubs_epi16(codes, state));
}
inline __m512i add_wide(__m512i acc, __m512i pairs) {
  return _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}
// Words (of three, for fields of 3 bits) whose pairs an int16 lane can hold: a pair is at most 2 * 128 * (2^bits - 1), and
// a word has 8 / bits of them (eight of 3 bits).
template <int Bits>
constexpr int kWiden = 32767 / (256 * ((1 << Bits) - 1) * (Bits == 3 ? 8 : 8 / Bits));

// Words of `Count` rows of state bytes side by side, so that one pointer serves all of them.
template <int Count>
void lay_out(const int8_t* const* bytes, int64_t slots, int32_t* to) {
  for (int64_t at = 0; at < slots; at += 4)
    for (int i = 0; i < Count; ++i) __builtin_memcpy(to++, bytes[i] + at, 4);
}

// Sums of S states and N blocks of 16 rows: lane r belongs to row r of its block. Few sums alone would wait for
// themselves, so they are then split in chains.
template <int S, int N, bool Low>
struct Sums {
  static constexpr int kChains = !kVnni || S * N >= 4 ? 1 : S * N > 1 || Low ? 2 : 4;
  __m512i hi[S][N][kChains], lo[Low ? S : 1][Low ? N : 1][kChains];

  Sums() {
    for (int s = 0; s < S; ++s)
      for (int n = 0; n < N; ++n)
        for (int c = 0; c < kChains; ++c) {
          hi[s][n][c] = _mm512_setzero_si512();
          if constexpr (Low) lo[s][n][c] = _mm512_setzero_si512();
        }
  }
  static __m512i whole(const __m512i* chains) {
    __m512i sum = chains[0];
    for (int c = 1; c < kChains; ++c) sum = _mm512_add_epi32(sum, chains[c]);
    return sum;
  }
};

// State words are broadcast, once for all blocks; codes are taken apart once for all states. The sums are copied to arrays
// of this function, which the compiler keeps in registers.
template <int Bits, int S, int N, bool Low>
__attribute__((always_inline)) inline void block_segment(const uint32_t* const* words, int count, const int32_t* states,
                                                         Sums<S, N, Low>* sums, const char** ahead) {
  constexpr int kFields = Bits == 3 ? 8 : 8 / Bits, kParts = Bits == 3 ? 3 : 1;
  constexpr int kChains = kVnni ? Sums<S, N, Low>::kChains : 1;
  const int part = count / kParts;
  const __m512i zero = _mm512_setzero_si512();
  __m512i hi[S][N][kChains], lo[S][N][kChains];
  auto each = [](auto&& work) {
#pragma GCC unroll 8
    for (int s = 0; s < S; ++s)
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
        for (int c = 0; c < kChains; ++c) work(s, n, c);
  };
  auto start = [&](int s, int n, int c) {
    hi[s][n][c] = kVnni ? sums->hi[s][n][c] : zero;
    if constexpr (Low) lo[s][n][c] = kVnni ? sums->lo[s][n][c] : zero;
  };
  auto finish = [&](int s, int n, int c) {
    sums->hi[s][n][c] = kVnni ? hi[s][n][c] : add_wide(sums->hi[s][n][c], hi[s][n][c]);
    if constexpr (Low) sums->lo[s][n][c] = kVnni ? lo[s][n][c] : add_wide(sums->lo[s][n][c], lo[s][n][c]);
  };
  each(start);
  int room = kWiden<Bits>;
  for (int t = 0; t < part; ++t) {
    __m512i w[N][kParts];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
      for (int i = 0; i < kParts; ++i) {
        const uint32_t* at = words[n] + static_cast<int64_t>(i * part + t) * kInterleave;
        w[n][i] = _mm512_loadu_si512(at);
        _mm_prefetch(*ahead, _MM_HINT_T0);
        *ahead += 64;
      }
#pragma GCC unroll 8
    for (int f = 0; f < kFields; ++f) {
      __m512i c[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) c[n] = field<Bits>(w[n], f);
      const int32_t* at = states + static_cast<int64_t>(f * part + t) * (Low ? 2 * S : S);
#pragma GCC unroll 8
      for (int s = 0; s < S; ++s) {
        const __m512i h = _mm512_set1_epi32(at[Low ? 2 * s : s]);
        const __m512i l = Low ? _mm512_set1_epi32(at[2 * s + 1]) : h;
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
          __m512i &a = hi[s][n][f % kChains], &b = lo[s][n][f % kChains];
          a = kVnni ? add_dot(a, c[n], h) : add_pairs(a, c[n], h);
          if constexpr (Low) b = kVnni ? add_dot(b, c[n], l) : add_pairs(b, c[n], l);
        }
      }
    }
    if constexpr (!kVnni) {
      if (--room == 0) {
        each(finish);
        each([&](int s, int n, int c) {
          hi[s][n][c] = zero;
          if constexpr (Low) lo[s][n][c] = zero;
        });
        room = kWiden<Bits>;
      }
    }
  }
  each(finish);
}

// The codes of N blocks against S states that lie side by side.
template <int S, int N, bool Low>
__attribute__((always_inline)) inline void block_sums(const Plane& p, int64_t block, const int32_t* states,
                                                      Sums<S, N, Low>* sums) {
  const uint32_t* words[N];
  for (int n = 0; n < N; ++n) words[n] = p.words + (block + n) * kInterleave * p.words_per_row + kInterleave;
  const char* ahead = reinterpret_cast<const char*>(p.words + block * kInterleave * p.words_per_row) + kPrefetchBytes;
  for (int i = 0; i < p.n_segments; ++i) {
    const int count = p.segments[i].words, bits = p.segments[i].bits;
    if (bits == 4)
      block_segment<4, S, N, Low>(words, count, states, sums, &ahead);
    else if (bits == 3)
      block_segment<3, S, N, Low>(words, count, states, sums, &ahead);
    else if (bits == 2)
      block_segment<2, S, N, Low>(words, count, states, sums, &ahead);
    else
      block_segment<1, S, N, Low>(words, count, states, sums, &ahead);
    for (int n = 0; n < N; ++n) words[n] += static_cast<int64_t>(count) * kInterleave;
    states += p.segments[i].slots() / 4 * (Low ? 2 * S : S);
  }
}

struct Bounds8 {
  __m256 centre, upper;
};

// `bound` of row_math.inl for eight rows.
inline Bounds8 bound8(const PlaneState& s, __m512d start, __m512d rho, __m256i radii, __m256i hi, __m256i lo) {
  const __m256i byte = _mm256_set1_epi32(255);
  __m512d dot =
      _mm512_add_pd(_mm512_mul_pd(_mm512_set1_pd(256.0), _mm512_cvtepi32_pd(hi)), _mm512_cvtepi32_pd(lo));
  __m512d along = _mm512_mul_pd(rho, _mm512_mul_pd(_mm512_set1_pd(s.half_scale),
                                                   _mm512_sub_pd(_mm512_add_pd(dot, dot), _mm512_set1_pd(s.offset))));
  __m512d r0 = _mm512_mul_pd(_mm512_cvtepi32_pd(_mm256_and_si256(radii, byte)), _mm512_set1_pd(s.norm[0]));
  __m512d r1 = _mm512_mul_pd(_mm512_cvtepi32_pd(_mm256_and_si256(_mm256_srli_epi32(radii, 8), byte)),
                             _mm512_set1_pd(s.norm[1]));
  __m512d r2 = _mm512_mul_pd(_mm512_cvtepi32_pd(_mm256_and_si256(_mm256_srli_epi32(radii, 16), byte)),
                             _mm512_set1_pd(s.norm[2]));
  __m512d r3 = _mm512_mul_pd(_mm512_cvtepi32_pd(_mm256_srli_epi32(radii, 24)), _mm512_set1_pd(s.norm[3]));
  __m512d radius = _mm512_mul_pd(
      rho, _mm512_add_pd(_mm512_set1_pd(s.constant), _mm512_add_pd(_mm512_add_pd(r0, r1), _mm512_add_pd(r2, r3))));
  __m512d mid = _mm512_add_pd(start, along);
  __m512d slack = _mm512_add_pd(_mm512_set1_pd(s.slack),
                                _mm512_mul_pd(_mm512_abs_pd(start), _mm512_set1_pd(s.start_slack)));
  __m512d top = _mm512_add_pd(_mm512_add_pd(mid, radius), slack);
  return {_mm512_cvtpd_ps(mid), _mm512_cvt_roundpd_ps(top, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC)};
}

inline __m512d bf16_to_double8(const uint16_t* p) {
  __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16);
  return _mm512_cvtps_pd(_mm256_castsi256_ps(bits));
}

// The float part of a block, from its integer sums. `centre` and `upper` are of the block.
inline void finish_block(const Plane& p, const PlaneState& s, int64_t block, __m512i sum_hi, __m512i sum_lo,
                         float* centre, float* upper) {
  const int64_t row0 = block * kInterleave;
  if (p.rows - row0 < kInterleave) {
    alignas(64) int32_t h[kInterleave], l[kInterleave];
    _mm512_store_si512(h, sum_hi);
    _mm512_store_si512(l, sum_lo);
    double dot[kInterleave];
    for (int r = 0; r < kInterleave; ++r) dot[r] = join(h[r], l[r]);
    bound_block(p, s, block, dot, centre, upper);
    return;
  }
  const __m512i radii = _mm512_loadu_si512(p.words + row0 * p.words_per_row);
  for (int half = 0; half < 2; ++half) {
    const int64_t row = row0 + half * 8;
    __m512d start = _mm512_set1_pd(s.base);
    if (p.bias) start = _mm512_add_pd(start, _mm512_cvtps_pd(_mm256_loadu_ps(p.bias + row)));
    const __m256i r = half ? _mm512_extracti64x4_epi64(radii, 1) : _mm512_castsi512_si256(radii);
    const __m256i h = half ? _mm512_extracti64x4_epi64(sum_hi, 1) : _mm512_castsi512_si256(sum_hi);
    const __m256i l = half ? _mm512_extracti64x4_epi64(sum_lo, 1) : _mm512_castsi512_si256(sum_lo);
    const Bounds8 out = bound8(s, start, bf16_to_double8(p.rho + row), r, h, l);
    _mm256_storeu_ps(centre + half * 8, out.centre);
    _mm256_storeu_ps(upper + half * 8, out.upper);
  }
}

template <int S, int N>
void screen_states(const Plane& p, const PlaneState* states, const int32_t* laid, int64_t block, float* centre,
                   float* upper, int64_t stride) {
  Sums<S, N, true> sums;
  block_sums<S, N>(p, block, laid, &sums);
  for (int s = 0; s < S; ++s)
    for (int n = 0; n < N; ++n) {
      const int64_t at = s * stride + n * kInterleave;
      finish_block(p, states[s], block + n, sums.whole(sums.hi[s][n]), sums.whole(sums.lo[s][n]), centre + at,
                   upper + at);
    }
}

int64_t slots_of(const Plane& p) {
  int64_t slots = 0;
  for (int i = 0; i < p.n_segments; ++i) slots += p.segments[i].slots();
  return slots;
}

// Memory that comes back by itself, without a template of the library: those might be shared with other units.
struct Memory {
  int32_t* words;
  explicit Memory(int64_t n) : words(static_cast<int32_t*>(__builtin_malloc(static_cast<size_t>(n) * 4 + 4))) {
    if (!words) __builtin_trap();
  }
  ~Memory() { __builtin_free(words); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
};

// Calls work(first state, how many) for groups of at most Most states, a power of two each; `how many` is a type.
template <int Count>
struct Group {
  static constexpr int value = Count;
};
template <int Most, typename Work>
inline void in_groups(int n_states, const Work& work) {
  int b = 0;
  if constexpr (Most >= 8)
    for (; b + 8 <= n_states; b += 8) work(b, Group<8>());
  if constexpr (Most >= 4)
    for (; b + 4 <= n_states; b += 4) work(b, Group<4>());
  if constexpr (Most >= 2)
    for (; b + 2 <= n_states; b += 2) work(b, Group<2>());
  for (; b < n_states; ++b) work(b, Group<1>());
}

// Blocks that one group of states has to itself, so that its words stay in the first-level cache.
constexpr int64_t kTile = 16;

// Calls work(block, how many) for the blocks [first, last), two at a time, `how many` a type.
template <typename Work>
inline void in_pairs(int64_t first, int64_t last, const Work& work) {
  for (; first + 2 <= last; first += 2) work(first, Group<2>());
  for (; first < last; ++first) work(first, Group<1>());
}

void screen(const Plane& p, const PlaneState* states, int n_states, const uint8_t* open, int64_t first, int64_t last,
            float* centre, float* upper, int64_t stride) {
  const int64_t slots = slots_of(p);
  const Memory laid(n_states * slots / 2);
  in_groups<4>(n_states, [&](int b, auto group) {
    constexpr int S = decltype(group)::value;
    const int8_t* bytes[2 * S];
    for (int s = 0; s < S; ++s) {
      bytes[2 * s] = states[b + s].hi;
      bytes[2 * s + 1] = states[b + s].lo;
    }
    lay_out<2 * S>(bytes, slots, laid.words + b * slots / 2);
  });
  for (int64_t tile = first; tile < last; tile += kTile) {
    const int64_t end = tile + kTile < last ? tile + kTile : last;
    in_groups<4>(n_states, [&](int b, auto group) {
      auto blocks = [&](int64_t block, auto count) {
        const int64_t at = b * stride + block * kInterleave;
        screen_states<decltype(group)::value, decltype(count)::value>(p, states + b, laid.words + b * slots / 2, block,
                                                                     centre + at, upper + at, stride);
      };
      if (!open) return in_pairs(tile, end, blocks);
      for (int64_t block = tile; block < end; ++block)
        if (!closed_block(p, open, block, n_states, centre, upper, stride)) blocks(block, Group<1>());
    });
  }
}

// What `sieve_upper` wants of 16 rows.
struct BlockFloats {
  __m512 rho, bias, radius[kGroups];
  bool biased;

  BlockFloats(const Plane& p, int64_t block, bool whole) : biased(p.bias) {
    if (!whole) return;
    const int64_t row0 = block * kInterleave;
    const __m512i radii = _mm512_loadu_si512(p.words + row0 * p.words_per_row), byte = _mm512_set1_epi32(255);
    rho = _mm512_castsi512_ps(_mm512_slli_epi32(
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p.rho + row0))), 16));
    for (int g = 0; g < kGroups; ++g)
      radius[g] = _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(radii, static_cast<unsigned>(8 * g)), byte));
    if (biased) {
      bias = _mm512_loadu_ps(p.bias + row0);
      bias = _mm512_add_ps(bias, _mm512_mul_ps(_mm512_abs_ps(bias), _mm512_set1_ps(0x1p-20f)));
    }
  }

  // `close_block`: the bounds, and whether they leave all rows out.
  bool close(const Sieve& s, __m512i hi, float* top) const {
    const __m512 r01 = _mm512_add_ps(_mm512_mul_ps(radius[0], _mm512_set1_ps(s.norm[0])),
                                     _mm512_mul_ps(radius[1], _mm512_set1_ps(s.norm[1])));
    const __m512 r23 = _mm512_add_ps(_mm512_mul_ps(radius[2], _mm512_set1_ps(s.norm[2])),
                                     _mm512_mul_ps(radius[3], _mm512_set1_ps(s.norm[3])));
    const __m512 inner =
        _mm512_add_ps(_mm512_mul_ps(_mm512_set1_ps(s.step), _mm512_cvtepi32_ps(hi)),
                      _mm512_add_ps(_mm512_add_ps(r01, r23), _mm512_set1_ps(s.constant)));
    __m512 start = _mm512_set1_ps(s.start);
    if (biased) start = _mm512_add_ps(start, bias);
    const __m512 upper = _mm512_add_ps(_mm512_mul_ps(rho, inner), start);
    const __mmask16 below = _mm512_cmp_ps_mask(upper, _mm512_set1_ps(s.bar), _CMP_LE_OQ);
    if (_mm512_mask_cmp_ps_mask(below, upper, _mm512_set1_ps(-__builtin_inff()), _CMP_GT_OQ) != 0xffff)
      return false;
    _mm512_storeu_ps(top, _mm512_max_ps(_mm512_loadu_ps(top), upper));
    return true;
  }
};

// `keep_rows`; 16 entries are stored, those behind the rows kept to be overwritten.
inline void keep16(const Plane& p, int64_t block, float bar, const float* centre, const float* upper, Sifted* out) {
  const int64_t row0 = block * kInterleave;
  const __mmask16 lanes = static_cast<__mmask16>((1u << rows_of_block(p, block)) - 1);
  const __m512 c = _mm512_loadu_ps(centre), u = _mm512_loadu_ps(upper);
  const __mmask16 kept = _mm512_mask_cmp_ps_mask(lanes, u, _mm512_set1_ps(bar), _CMP_NLE_UQ);
  const __m512i lane = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
  const float top = _mm512_mask_reduce_max_ps(static_cast<__mmask16>(lanes & ~kept), u);
  if (top > out->dropped) out->dropped = top;
  _mm512_storeu_ps(out->centre + out->n, _mm512_maskz_compress_ps(kept, c));
  _mm512_storeu_ps(out->upper + out->n, _mm512_maskz_compress_ps(kept, u));
  for (int half = 0; half < 2; ++half) {
    const __mmask8 some = static_cast<__mmask8>(kept >> (8 * half));
    const __m512i rows = _mm512_add_epi64(_mm512_set1_epi64(row0 + 8 * half), lane);
    _mm512_storeu_si512(out->rows + out->n, _mm512_maskz_compress_epi64(some, rows));
    out->n += __builtin_popcount(some);
  }
}

void sift(const Plane& p, const Sieve* sieves, int n_states, int64_t first, int64_t last, Sifted* out) {
  constexpr int kMost = kVnni ? 8 : 4;
  const int64_t slots = slots_of(p), words = slots / 4;
  const Memory high(n_states * words), low(n_states * words), tops(n_states * kInterleave);
  in_groups<kMost>(n_states, [&](int b, auto group) {
    constexpr int S = decltype(group)::value;
    const int8_t* bytes[S];
    for (int s = 0; s < S; ++s) bytes[s] = sieves[b + s].fine.hi;
    lay_out<S>(bytes, slots, high.words + b * words);
  });
  for (int b = 0; b < n_states; ++b) {
    lay_out<1>(&sieves[b].fine.lo, slots, low.words + b * words);
    _mm512_storeu_ps(tops.words + b * kInterleave, _mm512_set1_ps(out[b].dropped));
  }
  auto open = [&](int b, int64_t block, __m512i hi) {
    Sums<1, 1, false> lo;
    block_sums<1, 1>(p, block, low.words + b * words, &lo);
    float centre[kInterleave], upper[kInterleave];
    finish_block(p, sieves[b].fine, block, hi, lo.whole(lo.hi[0][0]), centre, upper);
    keep16(p, block, sieves[b].bar, centre, upper, out + b);
  };
  for (int64_t tile = first; tile < last; tile += kTile) {
    const int64_t end = tile + kTile < last ? tile + kTile : last;
    in_groups<kMost>(n_states, [&](int b, auto group) {
      in_pairs(tile, end, [&](int64_t block, auto count) {
        constexpr int S = decltype(group)::value, N = decltype(count)::value;
        Sums<S, N, false> sums;
        block_sums<S, N>(p, block, high.words + b * words, &sums);
        for (int n = 0; n < N; ++n) {
          const bool whole = rows_of_block(p, block + n) == kInterleave;
          const BlockFloats floats(p, block + n, whole);
          for (int s = 0; s < S; ++s) {
            const __m512i hi = sums.whole(sums.hi[s][n]);
            float* top = reinterpret_cast<float*>(tops.words) + (b + s) * kInterleave;
            if (!whole || !floats.close(sieves[b + s], hi, top)) open(b + s, block + n, hi);
          }
        }
      });
    });
  }
  for (int b = 0; b < n_states; ++b) {
    const float top = _mm512_reduce_max_ps(_mm512_loadu_ps(tops.words + b * kInterleave));
    if (top > out[b].dropped) out[b].dropped = top;
  }
}

// Rows one after another: lane t belongs to word t.
constexpr int kRows = 16;  // rows that share the state words while these are in registers

// 16 words of kRows rows against four (or fewer) of their fields. Two things set the pace here, not the memory: the state
// words are loaded once for all rows, and row words with plain loads, since masked loads that miss the cache stall
// (50 ns a row instead of 11, on Zen 5). A plain load may reach up to 15 words behind the row, where the state is zero;
// `Masked` is for the rows at the end of the plane.
template <bool Masked, int Bits, int First>
__attribute__((always_inline)) inline void rows_chunk(const uint32_t* const* words, int64_t at, __mmask16 lanes,
                                                      const int8_t* state, int64_t field, __m512i* acc) {
  constexpr int kFields = 8 / Bits < 4 ? 8 / Bits : 4;
  const __m512i mask = _mm512_set1_epi8((1 << Bits) - 1);
  __m512i h[kFields];
#pragma GCC unroll 4
  for (int f = 0; f < kFields; ++f) h[f] = _mm512_maskz_loadu_epi32(lanes, state + (First + f) * field);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    __m512i w = Masked ? _mm512_maskz_loadu_epi32(lanes, words[r] + at) : _mm512_loadu_si512(words[r] + at);
    __m512i pairs = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int f = 0; f < kFields; ++f) {
      __m512i c = _mm512_and_si512(First + f ? _mm512_srli_epi32(w, (First + f) * Bits) : w, mask);
      if constexpr (kVnni)
        acc[r] = add_dot(acc[r], c, h[f]);
      else
        pairs = add_pairs(pairs, c, h[f]);
    }
    if constexpr (!kVnni) acc[r] = add_wide(acc[r], pairs);
  }
}

// Partial sums of kRows rows, 16 lanes each, of the high or the low halves. A row that is one cache line is loaded whole,
// radius word and all, with zeros in the state for what is not of the segment: from behind the radius word each load
// would touch the next line too.
template <bool Masked, bool Low>
__attribute__((always_inline)) inline void rows_sums(const Plane& p, const PlaneState& s, const uint32_t* const* words,
                                                     __m512i* acc) {
  const bool line = p.words_per_row == 16;
  const int8_t* half = Low ? s.lo : s.hi;
  int64_t first = 1;
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) acc[r] = _mm512_setzero_si512();
  for (int k = 0; k < p.n_segments; ++k) {
    const int count = p.segments[k].words, bits = p.segments[k].bits;
    const int64_t field = static_cast<int64_t>(count) * 4;
    for (int t = 0; t < count; t += 16) {
      const int64_t before = line ? first : 0;  // lanes in front of the segment; then t is 0
      const __mmask16 lanes =
          count - t >= 16 ? 0xffff : static_cast<__mmask16>(((1u << (count - t)) - 1) << before);
      const int64_t at = first + t - before;
      const int8_t* h = half + (t - before) * 4;
      if (bits == 4) {
        rows_chunk<Masked, 4, 0>(words, at, lanes, h, field, acc);
      } else if (Low) {
        continue;
      } else if (bits == 2) {
        rows_chunk<Masked, 2, 0>(words, at, lanes, h, field, acc);
      } else {
        rows_chunk<Masked, 1, 0>(words, at, lanes, h, field, acc);
        rows_chunk<Masked, 1, 4>(words, at, lanes, h, field, acc);
      }
    }
    first += count;
    half += p.segments[k].slots();
  }
}

// Lane r of the result is the sum over the lanes of v[r]: four rounds of adding halves of pairs.
inline __m512i sum_each(const __m512i* v) {
  __m512i a[8], b[4], c[2];
  for (int i = 0; i < 8; ++i)  // rows i and i + 8: lanes of 256 bits
    a[i] = _mm512_add_epi32(_mm512_shuffle_i64x2(v[i], v[i + 8], 0x44), _mm512_shuffle_i64x2(v[i], v[i + 8], 0xee));
  for (int i = 0; i < 4; ++i)  // rows i, i + 4, i + 8, i + 12: lanes of 128 bits
    b[i] = _mm512_add_epi32(_mm512_shuffle_i64x2(a[i], a[i + 4], 0x88), _mm512_shuffle_i64x2(a[i], a[i + 4], 0xdd));
  for (int i = 0; i < 2; ++i)
    c[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(b[i], b[i + 2]), _mm512_unpackhi_epi32(b[i], b[i + 2]));
  __m512i d = _mm512_add_epi32(_mm512_unpacklo_epi32(c[0], c[1]), _mm512_unpackhi_epi32(c[0], c[1]));
  // 128-bit lane q of d holds rows {0, 1, 2, 3} + 4 * (order of the lanes above): put them in order
  return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15), d);
}

void refine(const Plane& p, const PlaneState& s, const int64_t* rows, const float* start, int64_t first, int64_t last,
            float* centre, float* upper) {
  bool low = false;  // whether a field is wide enough for 16-bit states
  for (int k = 0; k < p.n_segments; ++k) low = low || p.segments[k].bits > 2;
  const uint32_t* end = p.words + p.rows * p.words_per_row;
  Fetcher fetcher(p, rows, first, last);
  for (int64_t i = first; i < last; i += kRows) {
    fetcher.reach(i);
    const int n = last - i < kRows ? static_cast<int>(last - i) : kRows;
    __m512i sums[kRows];
    alignas(64) uint32_t radii[kRows];
    alignas(64) uint16_t rho[kRows];
    const uint32_t* words[kRows];
    bool inside = true;
    for (int r = 0; r < kRows; ++r) {
      const int64_t at = i + (r < n ? r : n - 1);  // at the end, the last row again
      const uint32_t* row = p.words + rows[at] * p.words_per_row;
      radii[r] = row[0];
      rho[r] = p.rho[rows[at]];
      words[r] = row;
      inside = inside && row + p.words_per_row + 15 <= end;
    }
    __m512i hi, lo = _mm512_setzero_si512();
    if (inside) {
      rows_sums<false, false>(p, s, words, sums);
      hi = sum_each(sums);
    } else {
      rows_sums<true, false>(p, s, words, sums);
      hi = sum_each(sums);
    }
    if (low) {
      rows_sums<true, true>(p, s, words, sums);
      lo = sum_each(sums);
    }
    for (int half = 0; half < 2; ++half) {
      const int64_t at = i + 8 * half;
      const int some = n - 8 * half;
      if (some <= 0) break;
      const __mmask8 lanes = some >= 8 ? 0xff : static_cast<__mmask8>((1u << some) - 1);
      __m512d begin = _mm512_cvtps_pd(_mm256_maskz_loadu_ps(lanes, start + at));
      __m256i r = _mm256_load_si256(reinterpret_cast<const __m256i*>(radii + 8 * half));
      __m256i h = half ? _mm512_extracti64x4_epi64(hi, 1) : _mm512_castsi512_si256(hi);
      __m256i l = half ? _mm512_extracti64x4_epi64(lo, 1) : _mm512_castsi512_si256(lo);
      Bounds8 out = bound8(s, begin, bf16_to_double8(rho + 8 * half), r, h, l);
      _mm256_mask_storeu_ps(centre + at, lanes, out.centre);
      _mm256_mask_storeu_ps(upper + at, lanes, out.upper);
    }
  }
}

inline __m512 load16(const float* p, __mmask16 lanes) { return _mm512_maskz_loadu_ps(lanes, p); }
inline __m512 load16(const float* p) { return _mm512_loadu_ps(p); }

struct Half {
  uint16_t bits;
};
struct Brain {
  uint16_t bits;
};
inline __m512 load16(const Half* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline __m512 load16(const Brain* p) {
  __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline __m512 load16(const Half* p, __mmask16 lanes) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes, p)); }
inline __m512 load16(const Brain* p, __mmask16 lanes) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, p)), 16));
}

// One row against S states, whose sums stand beside each other, so that the row is widened once.
template <int S, typename T>
inline void score_row(const T* row, int64_t width, const double* h, double* value, double* magnitude, int64_t stride) {
  __m512d sum[S][2], size[S][2];
  for (int s = 0; s < S; ++s) sum[s][0] = sum[s][1] = size[s][0] = size[s][1] = _mm512_setzero_pd();
  auto add = [&](__m512 w, const double* x, __mmask16 lanes) {
    const __m512d w0 = _mm512_cvtps_pd(_mm512_castps512_ps256(w)), w1 = _mm512_cvtps_pd(_mm512_extractf32x8_ps(w, 1));
#pragma GCC unroll 4
    for (int s = 0; s < S; ++s) {
      const double* at = x + s * width;
      const __m512d p0 = _mm512_mul_pd(w0, _mm512_maskz_loadu_pd(static_cast<__mmask8>(lanes), at));
      const __m512d p1 = _mm512_mul_pd(w1, _mm512_maskz_loadu_pd(static_cast<__mmask8>(lanes >> 8), at + 8));
      sum[s][0] = _mm512_add_pd(sum[s][0], p0);
      sum[s][1] = _mm512_add_pd(sum[s][1], p1);
      size[s][0] = _mm512_add_pd(size[s][0], _mm512_abs_pd(p0));
      size[s][1] = _mm512_add_pd(size[s][1], _mm512_abs_pd(p1));
    }
  };
  int64_t j = 0;
  for (; j + 16 <= width; j += 16) add(load16(row + j), h + j, 0xffff);
  if (j < width) {
    const __mmask16 lanes = static_cast<__mmask16>((1u << (width - j)) - 1);
    add(load16(row + j, lanes), h + j, lanes);
  }
  for (int s = 0; s < S; ++s) {
    alignas(64) double lane[16];
    _mm512_store_pd(lane, sum[s][0]);
    _mm512_store_pd(lane + 8, sum[s][1]);
    value[s * stride] = fold16(lane);
    _mm512_store_pd(lane, size[s][0]);
    _mm512_store_pd(lane + 8, size[s][1]);
    magnitude[s * stride] = fold16(lane);
  }
}

template <typename T>
void score_rows(const T* data, int64_t width, const int64_t* ids, int64_t first, int64_t last, const double* h,
                int n_states, double* value, double* magnitude, int64_t stride) {
  constexpr int64_t kRowTile = 16;  // rows that one group of states has to itself: both stay in the caches
  for (int64_t tile = first; tile < last; tile += kRowTile) {
    const int64_t end = tile + kRowTile < last ? tile + kRowTile : last;
    in_groups<4>(n_states, [&](int b, auto group) {
      for (int64_t i = tile; i < end; ++i) {
        if (b == 0 && i + 4 < last) {
          const char* next = reinterpret_cast<const char*>(data + (ids ? ids[i + 4] : i + 4) * width);
          for (int64_t at = 0; at < width * static_cast<int64_t>(sizeof(T)); at += 64)
            _mm_prefetch(next + at, _MM_HINT_T1);
        }
        const int64_t to = b * stride + i;
        score_row<decltype(group)::value>(data + (ids ? ids[i] : i) * width, width, h + b * width, value + to,
                                          magnitude + to, stride);
      }
    });
  }
}

void score(const Rows& rows, const int64_t* ids, int64_t first, int64_t last, const double* h, int n_states,
           double* value, double* magnitude, int64_t stride) {
  if (rows.type == RowType::float32)
    score_rows(static_cast<const float*>(rows.data), rows.width, ids, first, last, h, n_states, value, magnitude,
               stride);
  else if (rows.type == RowType::float16)
    score_rows(static_cast<const Half*>(rows.data), rows.width, ids, first, last, h, n_states, value, magnitude,
               stride);
  else if (rows.type == RowType::bfloat16)
    score_rows(static_cast<const Brain*>(rows.data), rows.width, ids, first, last, h, n_states, value, magnitude,
               stride);
  else
    score_packed(rows, ids, first, last, [&](const float* row, int64_t i) {
      score_rows(row, rows.width, nullptr, 0, 1, h, n_states, value + i, magnitude + i, stride);
    });
}

int64_t next_above(const float* values, int64_t first, int64_t last, float bar) {
  const __m512 limit = _mm512_set1_ps(bar);
  int64_t i = first;
  for (; i + 16 <= last; i += 16) {
    unsigned hit = _mm512_cmp_ps_mask(_mm512_loadu_ps(values + i), limit, _CMP_NLE_UQ);
    if (hit) return i + __builtin_ctz(hit);
  }
  return scalar_next_above(values, i, last, bar);
}

int64_t select(const float* values, int64_t first, int64_t last, float bar, int64_t* ids, float* dropped) {
  const __m512 limit = _mm512_set1_ps(bar);
  const __m512i lane = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
  __m512 top = _mm512_set1_ps(*dropped);
  int64_t i = first, n = 0;
  for (; i + 16 <= last; i += 16) {
    __m512 v = _mm512_loadu_ps(values + i);
    const unsigned hit = _mm512_cmp_ps_mask(v, limit, _CMP_NLE_UQ);
    top = _mm512_mask_max_ps(top, static_cast<__mmask16>(~hit), top, v);
    for (int half = 0; half < 2; ++half) {  // eight are stored, those behind the hits to be overwritten: n <= i - first
      const __mmask8 some = static_cast<__mmask8>(hit >> (8 * half));
      const __m512i index = _mm512_add_epi64(_mm512_set1_epi64(i + 8 * half), lane);
      _mm512_storeu_si512(ids + n, _mm512_maskz_compress_epi64(some, index));
      n += __builtin_popcount(some);
    }
  }
  *dropped = _mm512_reduce_max_ps(top);
  return n + scalar_select(values, i, last, bar, ids + n, dropped);
}

}  // namespace

#if defined(CSV_DECODE_NO_VNNI)
#define CSV_DECODE_TABLE avx512bw_kernels
#else
#define CSV_DECODE_TABLE avx512_kernels
#endif
const Kernels CSV_DECODE_TABLE = {screen, sift, refine, score, next_above, select, noise_upper, add_upper, mass_upper,
                                joint_terms};

}  // namespace csv_decode
#endif
