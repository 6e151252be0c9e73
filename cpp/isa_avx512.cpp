// AVX-512 with VNNI (F, BW, VL, DQ, VNNI). vpdpbusd multiplies unsigned codes by signed state bytes and adds four
// products to an int32 lane without saturation, so the integer sums are exact.
#if defined(CSV_DECODE_X86)
#include <immintrin.h>

#include "plane.hpp"

namespace csv_decode {
namespace {
#include "row_math.inl"

constexpr int kPrefetchBytes = 8192;

// 16 rows at once: lane r belongs to row r, state words are broadcast.
template <int Bits>
inline const uint32_t* block_segment(const uint32_t* words, int count, const int8_t* hi, const int8_t* lo, __m512i* acc_hi,
                                     __m512i* acc_lo) {
  constexpr int kFields = 8 / Bits;
  const __m512i mask = _mm512_set1_epi8((1 << Bits) - 1);
  const int32_t* h = reinterpret_cast<const int32_t*>(hi);
  const int32_t* l = reinterpret_cast<const int32_t*>(lo);
  __m512i a0 = *acc_hi, b0 = *acc_lo, a1 = _mm512_setzero_si512(), b1 = a1;
  for (int t = 0; t < count; ++t) {
    __m512i w = _mm512_loadu_si512(words + t * kInterleave);
    _mm_prefetch(reinterpret_cast<const char*>(words + t * kInterleave) + kPrefetchBytes, _MM_HINT_T0);
#pragma GCC unroll 8
    for (int f = 0; f < kFields; f += 2) {
      __m512i c0 = _mm512_and_si512(f ? _mm512_srli_epi32(w, f * Bits) : w, mask);
      __m512i c1 = _mm512_and_si512(_mm512_srli_epi32(w, (f + 1) * Bits), mask);
      a0 = _mm512_dpbusd_epi32(a0, c0, _mm512_set1_epi32(h[f * count + t]));
      b0 = _mm512_dpbusd_epi32(b0, c0, _mm512_set1_epi32(l[f * count + t]));
      a1 = _mm512_dpbusd_epi32(a1, c1, _mm512_set1_epi32(h[(f + 1) * count + t]));
      b1 = _mm512_dpbusd_epi32(b1, c1, _mm512_set1_epi32(l[(f + 1) * count + t]));
    }
  }
  *acc_hi = _mm512_add_epi32(a0, a1);
  *acc_lo = _mm512_add_epi32(b0, b1);
  return words + static_cast<int64_t>(count) * kInterleave;
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

void screen(const Plane& p, const PlaneState* states, int n_states, const uint8_t* open, int64_t first, int64_t last,
            float* centre, float* upper, int64_t stride) {
  for (int64_t block = first; block < last; ++block) {
    if (closed_block(p, open, block, n_states, centre, upper, stride)) continue;
    const uint32_t* begin = p.words + block * kInterleave * p.words_per_row;
    for (int b = 0; b < n_states; ++b) {
      const PlaneState& s = states[b];
      const uint32_t* words = begin + kInterleave;
      const int8_t *hi = s.hi, *lo = s.lo;
      __m512i acc_hi = _mm512_setzero_si512(), acc_lo = acc_hi;
      for (int i = 0; i < p.n_segments; ++i) {
        int count = p.segments[i].words, bits = p.segments[i].bits;
        if (bits == 4)
          words = block_segment<4>(words, count, hi, lo, &acc_hi, &acc_lo);
        else if (bits == 2)
          words = block_segment<2>(words, count, hi, lo, &acc_hi, &acc_lo);
        else
          words = block_segment<1>(words, count, hi, lo, &acc_hi, &acc_lo);
        int64_t slots = static_cast<int64_t>(count) * 4 * (8 / bits);
        hi += slots;
        lo += slots;
      }
      int64_t row0 = block * kInterleave;
      if (p.rows - row0 < kInterleave) {
        alignas(64) int32_t h[kInterleave], l[kInterleave];
        _mm512_store_si512(h, acc_hi);
        _mm512_store_si512(l, acc_lo);
        double dot[kInterleave];
        for (int r = 0; r < kInterleave; ++r) dot[r] = join(h[r], l[r]);
        bound_block(p, s, block, dot, centre + b * stride, upper + b * stride);
        continue;
      }
      __m512i radii = _mm512_loadu_si512(begin);
      for (int half = 0; half < 2; ++half) {
        int64_t row = row0 + half * 8;
        __m512d start = _mm512_set1_pd(s.base);
        if (p.bias) start = _mm512_add_pd(start, _mm512_cvtps_pd(_mm256_loadu_ps(p.bias + row)));
        __m256i r = half ? _mm512_extracti64x4_epi64(radii, 1) : _mm512_castsi512_si256(radii);
        __m256i h = half ? _mm512_extracti64x4_epi64(acc_hi, 1) : _mm512_castsi512_si256(acc_hi);
        __m256i l = half ? _mm512_extracti64x4_epi64(acc_lo, 1) : _mm512_castsi512_si256(acc_lo);
        Bounds8 out = bound8(s, start, bf16_to_double8(p.rho + row), r, h, l);
        _mm256_storeu_ps(centre + b * stride + row, out.centre);
        _mm256_storeu_ps(upper + b * stride + row, out.upper);
      }
    }
  }
}

// One row at once: lane t belongs to word t.
template <int Bits>
inline void row_segment(const uint32_t* words, int count, const int8_t* hi, const int8_t* lo, __m512i* acc_hi,
                        __m512i* acc_lo) {
  constexpr int kFields = 8 / Bits;
  const __m512i mask = _mm512_set1_epi8((1 << Bits) - 1);
  for (int t = 0; t < count; t += 16) {
    __mmask16 lanes = count - t >= 16 ? 0xffff : static_cast<__mmask16>((1u << (count - t)) - 1);
    __m512i w = _mm512_maskz_loadu_epi32(lanes, words + t);
#pragma GCC unroll 8
    for (int f = 0; f < kFields; ++f) {
      __m512i c = _mm512_and_si512(f ? _mm512_srli_epi32(w, f * Bits) : w, mask);
      int64_t at = (static_cast<int64_t>(f) * count + t) * 4;
      *acc_hi = _mm512_dpbusd_epi32(*acc_hi, c, _mm512_maskz_loadu_epi32(lanes, hi + at));
      *acc_lo = _mm512_dpbusd_epi32(*acc_lo, c, _mm512_maskz_loadu_epi32(lanes, lo + at));
    }
  }
}

void refine(const Plane& p, const PlaneState& s, const int64_t* rows, const float* start, int64_t first, int64_t last,
            float* centre, float* upper) {
  constexpr int kAhead = 8;
  for (int64_t i = first; i < last; ++i) {
    if (i + kAhead < last) {
      const char* next = reinterpret_cast<const char*>(p.words + rows[i + kAhead] * p.words_per_row);
      for (int64_t at = 0; at < p.words_per_row * 4; at += 64) _mm_prefetch(next + at, _MM_HINT_T0);
    }
    const uint32_t* row = p.words + rows[i] * p.words_per_row;
    const uint32_t* words = row + 1;
    const int8_t *hi = s.hi, *lo = s.lo;
    __m512i acc_hi = _mm512_setzero_si512(), acc_lo = acc_hi;
    for (int k = 0; k < p.n_segments; ++k) {
      int count = p.segments[k].words, bits = p.segments[k].bits;
      if (bits == 4)
        row_segment<4>(words, count, hi, lo, &acc_hi, &acc_lo);
      else if (bits == 2)
        row_segment<2>(words, count, hi, lo, &acc_hi, &acc_lo);
      else
        row_segment<1>(words, count, hi, lo, &acc_hi, &acc_lo);
      words += count;
      int64_t slots = static_cast<int64_t>(count) * 4 * (8 / bits);
      hi += slots;
      lo += slots;
    }
    bound(s, start[i], bf16_to_float(p.rho[rows[i]]), row[0],
          join(_mm512_reduce_add_epi32(acc_hi), _mm512_reduce_add_epi32(acc_lo)), centre + i, upper + i);
  }
}

inline __m512 load16(const float* p, __mmask16 lanes) { return _mm512_maskz_loadu_ps(lanes, p); }

struct Half {
  uint16_t bits;
};
struct Brain {
  uint16_t bits;
};
inline __m512 load16(const Half* p, __mmask16 lanes) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes, p)); }
inline __m512 load16(const Brain* p, __mmask16 lanes) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, p)), 16));
}

template <typename T>
void score_rows(const T* data, int64_t width, const int64_t* ids, int64_t first, int64_t last, const double* h,
                int n_states, double* value, double* magnitude, int64_t stride) {
  for (int64_t i = first; i < last; ++i) {
    const T* row = data + (ids ? ids[i] : i) * width;
    if (i + 4 < last) {
      const char* next = reinterpret_cast<const char*>(data + (ids ? ids[i + 4] : i + 4) * width);
      for (int64_t at = 0; at < width * static_cast<int64_t>(sizeof(T)); at += 64) _mm_prefetch(next + at, _MM_HINT_T0);
    }
    for (int b = 0; b < n_states; ++b) {
      const double* x = h + b * width;
      __m512d s0 = _mm512_setzero_pd(), s1 = s0, m0 = s0, m1 = s0;
      for (int64_t j = 0; j < width; j += 16) {
        __mmask16 lanes = width - j >= 16 ? 0xffff : static_cast<__mmask16>((1u << (width - j)) - 1);
        __m512 w = load16(row + j, lanes);
        __m512d x0 = _mm512_maskz_loadu_pd(static_cast<__mmask8>(lanes), x + j);
        __m512d x1 = _mm512_maskz_loadu_pd(static_cast<__mmask8>(lanes >> 8), x + j + 8);
        __m512d p0 = _mm512_mul_pd(_mm512_cvtps_pd(_mm512_castps512_ps256(w)), x0);
        __m512d p1 = _mm512_mul_pd(_mm512_cvtps_pd(_mm512_extractf32x8_ps(w, 1)), x1);
        s0 = _mm512_add_pd(s0, p0);
        s1 = _mm512_add_pd(s1, p1);
        m0 = _mm512_add_pd(m0, _mm512_abs_pd(p0));
        m1 = _mm512_add_pd(m1, _mm512_abs_pd(p1));
      }
      alignas(64) double lane[16];
      _mm512_store_pd(lane, s0);
      _mm512_store_pd(lane + 8, s1);
      value[b * stride + i] = fold16(lane);
      _mm512_store_pd(lane, m0);
      _mm512_store_pd(lane + 8, m1);
      magnitude[b * stride + i] = fold16(lane);
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
  else
    score_rows(static_cast<const Brain*>(rows.data), rows.width, ids, first, last, h, n_states, value, magnitude,
               stride);
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
  __m512 top = _mm512_set1_ps(*dropped);
  int64_t i = first, n = 0;
  for (; i + 16 <= last; i += 16) {
    __m512 v = _mm512_loadu_ps(values + i);
    unsigned hit = _mm512_cmp_ps_mask(v, limit, _CMP_NLE_UQ);
    top = _mm512_mask_max_ps(top, static_cast<__mmask16>(~hit), top, v);
    for (; hit; hit &= hit - 1) ids[n++] = i + __builtin_ctz(hit);
  }
  *dropped = _mm512_reduce_max_ps(top);
  return n + scalar_select(values, i, last, bar, ids + n, dropped);
}

}  // namespace

const Kernels avx512_kernels = {screen, refine, score, next_above, select};

}  // namespace csv_decode
#endif
