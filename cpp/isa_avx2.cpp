// AVX2 with F16C. vpmaddubsw adds two products to an int16 and saturates: a code is at most 15 and a state byte at
// least -128, so a pair stays within 2 * 15 * 128 = 3840 and eight pairs within 30720 before they are widened.
#if defined(CSV_DECODE_X86)
#include <immintrin.h>

#include "plane.hpp"

namespace csv_decode {
namespace {
#include "row_math.inl"
#define CSV_DECODE_WORDS 256
#include "noise.inl"
#include "sums.inl"

constexpr int kPrefetchBytes = 8192;  // fetched in the order of memory, see isa_avx512.cpp

// Eight lanes of 4 code bytes times 4 state bytes, added to int32 lanes.
struct Sums {
  __m256i hi, lo;
};

template <int Bits, bool Low = true>
inline void accumulate(__m256i w, const __m256i* h, const __m256i* l, Sums* sums) {
  constexpr int kFields = 8 / Bits;
  const __m256i mask = _mm256_set1_epi8((1 << Bits) - 1);
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i a = _mm256_setzero_si256(), b = a;
#pragma GCC unroll 8
  for (int f = 0; f < kFields; ++f) {  // at most 8 pairs: no int16 overflow
    __m256i c = _mm256_and_si256(f ? _mm256_srli_epi32(w, f * Bits) : w, mask);
    a = _mm256_add_epi16(a, _mm256_maddubs_epi16(c, h[f]));
    if constexpr (Low) b = _mm256_add_epi16(b, _mm256_maddubs_epi16(c, l[f]));
  }
  sums->hi = _mm256_add_epi32(sums->hi, _mm256_madd_epi16(a, ones));
  if constexpr (Low) sums->lo = _mm256_add_epi32(sums->lo, _mm256_madd_epi16(b, ones));
}

// The eight fields of 3 bits of one word of each part.
template <bool Low>
inline void accumulate3(__m256i p, __m256i q, __m256i r, const __m256i* h, const __m256i* l, Sums* sums) {
  const __m256i three = _mm256_set1_epi8(3), four = _mm256_set1_epi8(4);
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i a = _mm256_setzero_si256(), b = a;
#pragma GCC unroll 8
  for (int f = 0; f < 8; ++f) {
    __m256i low = _mm256_and_si256(_mm256_srli_epi32(f < 4 ? p : q, 2 * (f % 4)), three);
    __m256i high = _mm256_and_si256(f < 2 ? _mm256_slli_epi32(r, 2 - f) : _mm256_srli_epi32(r, f - 2), four);
    __m256i c = _mm256_or_si256(low, high);
    a = _mm256_add_epi16(a, _mm256_maddubs_epi16(c, h[f]));
    if constexpr (Low) b = _mm256_add_epi16(b, _mm256_maddubs_epi16(c, l[f]));
  }
  sums->hi = _mm256_add_epi32(sums->hi, _mm256_madd_epi16(a, ones));
  if constexpr (Low) sums->lo = _mm256_add_epi32(sums->lo, _mm256_madd_epi16(b, ones));
}

template <int Bits, bool Low>
inline const uint32_t* block_segment(const uint32_t* words, int count, const int8_t* hi, const int8_t* lo, Sums* sums,
                                     const char** ahead) {
  constexpr int kFields = Bits == 3 ? 8 : 8 / Bits;
  const int part = Bits == 3 ? count / 3 : count;
  for (int t = 0; t < part; ++t) {
    __m256i h[kFields], l[kFields];
    for (int f = 0; f < kFields; ++f) {
      int32_t h32, l32;
      __builtin_memcpy(&h32, hi + (f * part + t) * 4, 4);
      h[f] = _mm256_set1_epi32(h32);
      if constexpr (Low) {
        __builtin_memcpy(&l32, lo + (f * part + t) * 4, 4);
        l[f] = _mm256_set1_epi32(l32);
      }
    }
    const uint32_t* at = words + static_cast<int64_t>(t) * kInterleave;
    const int64_t next = static_cast<int64_t>(part) * kInterleave;
    for (int i = 0; i < (Bits == 3 ? 3 : 1); ++i, *ahead += 64) _mm_prefetch(*ahead, _MM_HINT_T0);
    for (int half = 0; half < 2; ++half) {
      const __m256i* w = reinterpret_cast<const __m256i*>(at + 8 * half);
      if constexpr (Bits == 3) {
        const __m256i* q = reinterpret_cast<const __m256i*>(at + 8 * half + next);
        const __m256i* r = reinterpret_cast<const __m256i*>(at + 8 * half + 2 * next);
        accumulate3<Low>(_mm256_loadu_si256(w), _mm256_loadu_si256(q), _mm256_loadu_si256(r), h, l, sums + half);
      } else {
        accumulate<Bits, Low>(_mm256_loadu_si256(w), h, l, sums + half);
      }
    }
  }
  return words + static_cast<int64_t>(count) * kInterleave;
}

// Integer sums of a block, of the high bytes of a state and, with `Low`, of the low ones.
template <bool Low>
inline void block_sums(const Plane& p, const PlaneState& s, int64_t block, int32_t* h, int32_t* l) {
  const uint32_t* words = p.words + block * kInterleave * p.words_per_row + kInterleave;
  const char* ahead = reinterpret_cast<const char*>(words) + kPrefetchBytes;
  const int8_t *hi = s.hi, *lo = s.lo;
  __m256i zero = _mm256_setzero_si256();
  Sums sums[2] = {{zero, zero}, {zero, zero}};
  for (int i = 0; i < p.n_segments; ++i) {
    int count = p.segments[i].words, bits = p.segments[i].bits;
    if (bits == 4)
      words = block_segment<4, Low>(words, count, hi, lo, sums, &ahead);
    else if (bits == 3)
      words = block_segment<3, Low>(words, count, hi, lo, sums, &ahead);
    else if (bits == 2)
      words = block_segment<2, Low>(words, count, hi, lo, sums, &ahead);
    else
      words = block_segment<1, Low>(words, count, hi, lo, sums, &ahead);
    hi += p.segments[i].slots();
    lo += p.segments[i].slots();
  }
  for (int half = 0; half < 2; ++half) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(h + 8 * half), sums[half].hi);
    if constexpr (Low) _mm256_storeu_si256(reinterpret_cast<__m256i*>(l + 8 * half), sums[half].lo);
  }
}

inline void screen_block(const Plane& p, const PlaneState& s, int64_t block, float* centre, float* upper) {
  int32_t h[kInterleave], l[kInterleave];
  block_sums<true>(p, s, block, h, l);
  double dot[kInterleave];
  for (int r = 0; r < kInterleave; ++r) dot[r] = join(h[r], l[r]);
  bound_block(p, s, block, dot, centre, upper);
}

void screen(const Plane& p, const PlaneState* states, int n_states, const uint8_t* open, int64_t first, int64_t last,
            float* centre, float* upper, int64_t stride) {
  for (int64_t block = first; block < last; ++block) {
    if (closed_block(p, open, block, n_states, centre, upper, stride)) continue;
    for (int b = 0; b < n_states; ++b) {
      const int64_t at = b * stride + block * kInterleave;
      screen_block(p, states[b], block, centre + at, upper + at);
    }
  }
}

void sift(const Plane& p, const Sieve* sieves, int n_states, int64_t first, int64_t last, Sifted* out) {
  for (int64_t block = first; block < last; ++block) {
    const int64_t n = rows_of_block(p, block);
    for (int b = 0; b < n_states; ++b) {
      if (n == kInterleave) {
        int32_t hi[kInterleave];
        block_sums<false>(p, sieves[b].fine, block, hi, nullptr);
        if (close_block(p, sieves[b], block, hi, &out[b].dropped)) continue;
      }
      float centre[kInterleave], upper[kInterleave];
      screen_block(p, sieves[b].fine, block, centre, upper);
      keep_rows(block * kInterleave, n, sieves[b].bar, centre, upper, out + b);
    }
  }
}

inline int32_t sum8(__m256i v) {
  __m128i a = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  a = _mm_add_epi32(a, _mm_shuffle_epi32(a, 0x4e));
  a = _mm_add_epi32(a, _mm_shuffle_epi32(a, 0xb1));
  return _mm_cvtsi128_si32(a);
}

// A plain load may reach up to 7 words behind the row, where the state is zero; `Masked` is for the end of the plane.
template <bool Masked, int Bits>
inline void row_segment(const uint32_t* words, int count, const int8_t* hi, const int8_t* lo, Sums* sums) {
  constexpr int kFields = 8 / Bits;
  const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  for (int t = 0; t < count; t += 8) {
    __m256i lanes = _mm256_cmpgt_epi32(_mm256_set1_epi32(count - t), index);
    __m256i h[kFields], l[kFields];
    for (int f = 0; f < kFields; ++f) {
      int64_t at = (static_cast<int64_t>(f) * count + t) * 4;
      h[f] = _mm256_maskload_epi32(reinterpret_cast<const int*>(hi + at), lanes);
      if constexpr (Bits > 2) l[f] = _mm256_maskload_epi32(reinterpret_cast<const int*>(lo + at), lanes);
    }
    __m256i w = Masked ? _mm256_maskload_epi32(reinterpret_cast<const int*>(words + t), lanes)
                       : _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words + t));
    accumulate<Bits, (Bits > 2)>(w, h, l, sums);
  }
}

template <bool Masked>
inline double row_dot(const Plane& p, const PlaneState& s, const uint32_t* words) {
  const int8_t *hi = s.hi, *lo = s.lo;
  Sums sums = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  for (int k = 0; k < p.n_segments; ++k) {
    int count = p.segments[k].words, bits = p.segments[k].bits;
    if (bits == 4)
      row_segment<Masked, 4>(words, count, hi, lo, &sums);
    else if (bits == 2)
      row_segment<Masked, 2>(words, count, hi, lo, &sums);
    else
      row_segment<Masked, 1>(words, count, hi, lo, &sums);
    words += count;
    hi += p.segments[k].slots();
    lo += p.segments[k].slots();
  }
  return join(sum8(sums.hi), sum8(sums.lo));
}

void refine(const Plane& p, const PlaneState& s, const int64_t* rows, const float* start, int64_t first, int64_t last,
            float* centre, float* upper) {
  const uint32_t* end = p.words + p.rows * p.words_per_row;
  Fetcher fetcher(p, rows, first, last);
  for (int64_t i = first; i < last; ++i) {
    fetcher.reach(i);
    const uint32_t* row = p.words + rows[i] * p.words_per_row;
    double dot =
        row + p.words_per_row + 7 <= end ? row_dot<false>(p, s, row + 1) : row_dot<true>(p, s, row + 1);
    bound(s, start[i], bf16_to_float(p.rho[rows[i]]), row[0], dot, centre + i, upper + i);
  }
}

struct Half {
  uint16_t bits;
};
struct Brain {
  uint16_t bits;
};
inline __m256d load4(const float* p) { return _mm256_cvtps_pd(_mm_loadu_ps(p)); }
inline __m256d load4(const Half* p) {
  return _mm256_cvtps_pd(_mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline __m256d load4(const Brain* p) {
  __m128i wide = _mm_cvtepu16_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return _mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(wide, 16)));
}
inline float read1(float v) { return v; }
inline float read1(Half v) { return f16_to_float(v.bits); }
inline float read1(Brain v) { return bf16_to_float(v.bits); }

template <typename T>
void score_rows(const T* data, int64_t width, const int64_t* ids, int64_t first, int64_t last, const double* h,
                int n_states, double* value, double* magnitude, int64_t stride) {
  const __m256d clear = _mm256_set1_pd(-0.0);
  for (int64_t i = first; i < last; ++i) {
    const T* row = data + (ids ? ids[i] : i) * width;
    if (i + 4 < last) {
      const char* next = reinterpret_cast<const char*>(data + (ids ? ids[i + 4] : i + 4) * width);
      for (int64_t at = 0; at < width * static_cast<int64_t>(sizeof(T)); at += 64) _mm_prefetch(next + at, _MM_HINT_T0);
    }
    for (int b = 0; b < n_states; ++b) {
      const double* x = h + b * width;
      __m256d s[4], m[4];
      for (int k = 0; k < 4; ++k) s[k] = m[k] = _mm256_setzero_pd();
      int64_t j = 0;
      for (; j + 16 <= width; j += 16)
        for (int k = 0; k < 4; ++k) {
          __m256d product = _mm256_mul_pd(load4(row + j + 4 * k), _mm256_loadu_pd(x + j + 4 * k));
          s[k] = _mm256_add_pd(s[k], product);
          m[k] = _mm256_add_pd(m[k], _mm256_andnot_pd(clear, product));
        }
      alignas(32) double sum[16], mag[16];
      for (int k = 0; k < 4; ++k) {
        _mm256_store_pd(sum + 4 * k, s[k]);
        _mm256_store_pd(mag + 4 * k, m[k]);
      }
      for (int k = 0; j < width; ++j, ++k) {
        double product = static_cast<double>(read1(row[j])) * x[j];
        sum[k] += product;
        mag[k] += absolute(product);
      }
      value[b * stride + i] = fold16(sum);
      magnitude[b * stride + i] = fold16(mag);
    }
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
  const __m256 limit = _mm256_set1_ps(bar);
  int64_t i = first;
  for (; i + 8 <= last; i += 8) {
    int hit = _mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(values + i), limit, _CMP_NLE_UQ));
    if (hit) return i + __builtin_ctz(static_cast<unsigned>(hit));
  }
  return scalar_next_above(values, i, last, bar);
}

int64_t select(const float* values, int64_t first, int64_t last, float bar, int64_t* ids, float* dropped) {
  const __m256 limit = _mm256_set1_ps(bar);
  __m256 top = _mm256_set1_ps(*dropped);
  int64_t i = first, n = 0;
  for (; i + 8 <= last; i += 8) {
    __m256 v = _mm256_loadu_ps(values + i);
    __m256 above = _mm256_cmp_ps(v, limit, _CMP_NLE_UQ);
    top = _mm256_blendv_ps(_mm256_max_ps(top, v), top, above);
    for (unsigned hit = static_cast<unsigned>(_mm256_movemask_ps(above)); hit; hit &= hit - 1)
      ids[n++] = i + __builtin_ctz(hit);
  }
  alignas(32) float lane[8];
  _mm256_store_ps(lane, top);
  for (int k = 0; k < 8; ++k)
    if (lane[k] > *dropped) *dropped = lane[k];
  return n + scalar_select(values, i, last, bar, ids + n, dropped);
}

}  // namespace

const Kernels avx2_kernels = {screen, sift, refine, score, next_above, select, noise_upper, add_upper, mass_upper,
                                joint_terms};

}  // namespace csv_decode
#endif
