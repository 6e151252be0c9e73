// Scalar pieces shared by the instruction-set units. Included once by each of them inside an anonymous namespace:
// internal linkage, so that code compiled for AVX-512 can never be picked by the linker for another unit.
// No fused multiply-add anywhere (-ffp-contract=off): every unit gives the same bits.

inline float bf16_to_float(uint16_t v) {
  uint32_t bits = static_cast<uint32_t>(v) << 16;
  float f;
  __builtin_memcpy(&f, &bits, sizeof f);
  return f;
}

inline float f16_to_float(uint16_t v) {
  uint32_t sign = static_cast<uint32_t>(v & 0x8000u) << 16;
  uint32_t exponent = (v >> 10) & 0x1fu;
  uint32_t mantissa = v & 0x3ffu;
  uint32_t bits;
  if (exponent == 0x1f) {
    bits = sign | 0x7f800000u | (mantissa << 13);
  } else if (exponent != 0) {
    bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
  } else {  // zero or subnormal: mantissa * 2^-24, exact in float32
    float f = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
    return sign ? -f : f;
  }
  float f;
  __builtin_memcpy(&f, &bits, sizeof f);
  return f;
}

// The smallest float32 that is not below x (NaN stays NaN).
inline float round_up(double x) {
  float f = static_cast<float>(x);
  if (static_cast<double>(f) < x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &f, sizeof bits);
    if (f == 0.0f)
      bits = 1u;
    else if (f > 0.0f)
      bits += 1;
    else
      bits -= 1;
    __builtin_memcpy(&f, &bits, sizeof bits);
  }
  return f;
}

inline double absolute(double x) { return __builtin_fabs(x); }

// The float part of a bound; see PlaneState. The order of operations is part of the contract between kernels.
inline void bound(const PlaneState& s, double start, double rho, uint32_t radii, double dot, float* centre,
                  float* upper) {
  double along = rho * (s.half_scale * ((dot + dot) - s.offset));
  double r0 = static_cast<double>(radii & 255u) * s.norm[0];
  double r1 = static_cast<double>((radii >> 8) & 255u) * s.norm[1];
  double r2 = static_cast<double>((radii >> 16) & 255u) * s.norm[2];
  double r3 = static_cast<double>(radii >> 24) * s.norm[3];
  double radius = rho * (s.constant + ((r0 + r1) + (r2 + r3)));
  double mid = start + along;
  *centre = static_cast<float>(mid);
  *upper = round_up((mid + radius) + (s.slack + absolute(start) * s.start_slack));
}

// The upper bound of `Sieve`. The order of operations is part of the contract between kernels.
inline float sieve_upper(const Sieve& s, float rho, uint32_t radii, float start, int32_t hi) {
  const float r0 = static_cast<float>(radii & 255u) * s.norm[0];
  const float r1 = static_cast<float>((radii >> 8) & 255u) * s.norm[1];
  const float r2 = static_cast<float>((radii >> 16) & 255u) * s.norm[2];
  const float r3 = static_cast<float>(radii >> 24) * s.norm[3];
  const float inner = s.step * static_cast<float>(hi) + (((r0 + r1) + (r2 + r3)) + s.constant);
  return rho * inner + start;
}

inline float sieve_start(const Sieve& s, float bias) { return s.start + (bias + __builtin_fabsf(bias) * 0x1p-20f); }

// Whether a bound leaves its row out. An overflow of float32 to -infinity, or NaN, says nothing.
inline bool sieved(float upper, float bar) { return upper <= bar && upper > -__builtin_inff(); }

// Whether a block of 16 whole rows is done with, from the dots of its high bytes; if so, raises *dropped.
inline bool close_block(const Plane& p, const Sieve& s, int64_t block, const int32_t* hi, float* dropped) {
  const int64_t row0 = block * kInterleave;
  const uint32_t* radii = p.words + row0 * p.words_per_row;
  float top = *dropped;
  for (int r = 0; r < kInterleave; ++r) {
    const float start = p.bias ? sieve_start(s, p.bias[row0 + r]) : s.start;
    const float upper = sieve_upper(s, bf16_to_float(p.rho[row0 + r]), radii[r], start, hi[r]);
    if (!sieved(upper, s.bar)) return false;
    if (upper > top) top = upper;
  }
  *dropped = top;
  return true;
}

// Appends the rows of an open block that are above the bar, from what `screen` says of them.
inline void keep_rows(int64_t row0, int64_t n, float bar, const float* centre, const float* upper, Sifted* out) {
  for (int64_t r = 0; r < n; ++r) {
    if (!(upper[r] <= bar)) {
      out->rows[out->n] = row0 + r;
      out->centre[out->n] = centre[r];
      out->upper[out->n++] = upper[r];
    } else if (upper[r] > out->dropped) {
      out->dropped = upper[r];
    }
  }
}

// Brings codes of a later plane into the cache ahead of `refine`, in tiles of rows.
class Fetcher {
 public:
  Fetcher(const Plane& p, const int64_t* rows, int64_t first, int64_t last) : p_(p), rows_(rows), first_(first), last_(last) {}

  // Called for rows first, first + step, ... with step dividing kTile.
  void reach(int64_t i) {
    if ((i - first_) % kTile == 0) {
      const int64_t end = last_ - i < kTile ? last_ : i + kTile;
      dense_ = rows_[end - 1] - rows_[i] < kDense * (end - i);
      if (!dense_) fetch(i, end);
    }
    if (dense_) stream(i + kAhead < last_ ? i + kAhead : last_ - 1);
  }

 private:
  static constexpr int64_t kTile = 128;  // rows: about 20 KB
  static constexpr int64_t kAhead = 48;  // rows
  static constexpr int64_t kDense = 4;

  const char* row(int64_t i) const { return reinterpret_cast<const char*>(p_.words + rows_[i] * p_.words_per_row); }

  // Each line of some rows, in a loop so short that many misses are under way at once. Prefetch instructions between the
  // computations had less effect.
  void fetch(int64_t first, int64_t last) const {
    uint32_t sum = 0;
    for (int64_t i = first; i < last; ++i) {
      const uint32_t* words = p_.words + rows_[i] * p_.words_per_row;
      for (int32_t at = 0; at < p_.words_per_row; at += 16) sum += words[at];
      sum += words[p_.words_per_row - 1];
    }
    asm volatile("" : : "r"(sum));
  }

  // Where a quarter of the rows or more is wanted, memory hands over all lines in order sooner than some of them.
  void stream(int64_t to) {
    const char* end = row(to) + p_.words_per_row * 4;
    if (!at_) at_ = row(first_);
    if (end - at_ > kAhead * kDense * p_.words_per_row * 4) at_ = row(to);  // tiles before this one were not dense
    for (; at_ < end; at_ += 64) __builtin_prefetch(at_, 0, 3);
  }

  const Plane& p_;
  const int64_t* rows_;
  int64_t first_, last_;
  const char* at_ = nullptr;
  bool dense_ = false;
};

// The fixed order in which 16 partial sums become one.
inline double fold16(const double* lane) {
  double a[8], b[4];
  for (int i = 0; i < 8; ++i) a[i] = lane[i] + lane[i + 8];
  for (int i = 0; i < 4; ++i) b[i] = a[i] + a[i + 4];
  return (b[0] + b[2]) + (b[1] + b[3]);
}

// The integer dot of a row from its two halves.
inline double join(int32_t hi, int32_t lo) { return 256.0 * static_cast<double>(hi) + static_cast<double>(lo); }

inline int64_t rows_of_block(const Plane& p, int64_t block) {
  const int64_t left = p.rows - block * kInterleave;
  return left < kInterleave ? left : kInterleave;
}

// The float part of a block of plane 0: 16 rows, fewer at the end of the index. `centre` and `upper` are of the block.
inline void bound_block(const Plane& p, const PlaneState& s, int64_t block, const double* dot, float* centre,
                        float* upper) {
  const int64_t row0 = block * kInterleave, n = rows_of_block(p, block);
  const uint32_t* radii = p.words + row0 * p.words_per_row;
  for (int64_t r = 0; r < n; ++r) {
    double start = p.bias ? s.base + static_cast<double>(p.bias[row0 + r]) : s.base;
    bound(s, start, bf16_to_float(p.rho[row0 + r]), radii[r], dot[r], centre + r, upper + r);
  }
}

inline bool closed_block(const Plane& p, const uint8_t* open, int64_t block, int n_states, float* centre, float* upper,
                         int64_t stride) {
  if (!open || open[block]) return false;
  const int64_t row0 = block * kInterleave, n = rows_of_block(p, block);
  for (int b = 0; b < n_states; ++b)
    for (int64_t r = 0; r < n; ++r)
      centre[b * stride + row0 + r] = upper[b * stride + row0 + r] = -__builtin_inff();
  return true;
}

inline int64_t scalar_next_above(const float* values, int64_t first, int64_t last, float bar) {
  for (int64_t i = first; i < last; ++i)
    if (!(values[i] <= bar)) return i;
  return last;
}

inline int64_t scalar_select(const float* values, int64_t first, int64_t last, float bar, int64_t* ids,
                             float* dropped) {
  int64_t n = 0;
  float top = *dropped;
  for (int64_t i = first; i < last; ++i) {
    if (!(values[i] <= bar))
      ids[n++] = i;
    else if (values[i] > top)
      top = values[i];
  }
  *dropped = top;
  return n;
}

// Rows of any type against states, in 16 lanes. `Convert` reads one number of the row as float32.
template <typename T, float (*Convert)(T)>
inline void scalar_score(const T* data, int64_t width, const int64_t* ids, int64_t first, int64_t last,
                         const double* h, int n_states, double* value, double* magnitude, int64_t stride) {
  for (int64_t i = first; i < last; ++i) {
    const T* row = data + (ids ? ids[i] : i) * width;
    for (int b = 0; b < n_states; ++b) {
      const double* x = h + b * width;
      double sum[16] = {}, mag[16] = {};
      int64_t j = 0;
      for (; j + 16 <= width; j += 16)
        for (int k = 0; k < 16; ++k) {
          double product = static_cast<double>(Convert(row[j + k])) * x[j + k];
          sum[k] += product;
          mag[k] += absolute(product);
        }
      for (int k = 0; j < width; ++j, ++k) {
        double product = static_cast<double>(Convert(row[j])) * x[j];
        sum[k] += product;
        mag[k] += absolute(product);
      }
      value[b * stride + i] = fold16(sum);
      magnitude[b * stride + i] = fold16(mag);
    }
  }
}

inline float f16_at(const uint8_t* p) {
  uint16_t bits;
  __builtin_memcpy(&bits, p, 2);
  return f16_to_float(bits);
}

// A row of blocks as float32, with the operations and the order of the `gguf` package (its quants.py), so that every
// number is the same.
inline void unpack_row(const uint8_t* p, RowType type, int64_t width, float* out) {
  if (type == RowType::q8_0) {
    for (int64_t at = 0; at < width; at += 32, p += 34) {
      const float d = f16_at(p);
      for (int i = 0; i < 32; ++i) out[at + i] = static_cast<float>(static_cast<int8_t>(p[2 + i])) * d;
    }
  } else if (type == RowType::q4_k) {
    for (int64_t at = 0; at < width; at += 256, p += 144) {
      const float d = f16_at(p), low = f16_at(p + 2);
      const uint8_t *s = p + 4, *q = p + 16;
      for (int j = 0; j < 8; ++j) {
        const int sc = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | ((s[j - 4] >> 2) & 48);
        const int m = j < 4 ? s[j + 4] & 63 : (s[j + 4] >> 4) | ((s[j] >> 2) & 48);
        const float step = d * static_cast<float>(sc), under = low * static_cast<float>(m);
        for (int i = 0; i < 32; ++i) {
          const int code = (q[j / 2 * 32 + i] >> (j % 2 * 4)) & 15;
          out[at + 32 * j + i] = step * static_cast<float>(code) - under;
        }
      }
    }
  } else {
    for (int64_t at = 0; at < width; at += 256, p += 210) {
      const uint8_t *low = p, *high = p + 128, *s = p + 192;
      const float d = f16_at(p + 208);
      for (int j = 0; j < 8; ++j)  // 32 numbers each: half j / 4, its quarter j % 4
        for (int i = 0; i < 32; ++i) {
          const int l = (low[j / 4 * 64 + j % 2 * 32 + i] >> (j % 4 / 2 * 4)) & 15;
          const int h = (high[j / 4 * 32 + i] >> (j % 4 * 2)) & 3;
          const float step = d * static_cast<float>(static_cast<int8_t>(s[2 * j + i / 16]));
          out[at + 32 * j + i] = step * static_cast<float>((l | h << 4) - 32);
        }
    }
  }
}

// Rows of blocks, one after another through `score_one(row, i)`, which takes a row of float32 for output i.
template <typename Score>
inline void score_packed(const Rows& rows, const int64_t* ids, int64_t first, int64_t last, const Score& score_one) {
  float* row = static_cast<float*>(__builtin_malloc(static_cast<size_t>(rows.width) * sizeof(float)));
  if (!row) __builtin_trap();
  const uint8_t* data = static_cast<const uint8_t*>(rows.data);
  const int64_t size = rows.bytes();
  for (int64_t i = first; i < last; ++i) {
    if (i + 4 < last) {
      const uint8_t* next = data + (ids ? ids[i + 4] : i + 4) * size;
      for (int64_t at = 0; at < size; at += 64) __builtin_prefetch(next + at);
    }
    unpack_row(data + (ids ? ids[i] : i) * size, rows.type, rows.width, row);
    score_one(row, i);
  }
  __builtin_free(row);
}
