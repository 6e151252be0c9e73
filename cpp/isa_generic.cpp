// Portable C++: the kernel that runs everywhere and that the others must equal.
#include <cstddef>
#include <vector>

#include "plane.hpp"

namespace csv_decode {
namespace {
#include "row_math.inl"
#include "noise.inl"
#include "sums.inl"

// 256 hi + lo of every slot, or hi alone: 16-bit states meet 8-bit codes in loops that compilers turn into multiply-add of pairs.
struct Whole {
  std::vector<int16_t> q;

  Whole(const Plane& p, const PlaneState& s, bool high = false) {
    int64_t slots = 0;
    for (int i = 0; i < p.n_segments; ++i)
      slots += p.segments[i].slots();
    q.resize(static_cast<std::size_t>(slots));
    for (int64_t j = 0; j < slots; ++j)
      q[static_cast<std::size_t>(j)] = static_cast<int16_t>(high ? s.hi[j] : 256 * s.hi[j] + s.lo[j]);
  }
};

// Sum of codes times states over one field: count bytes, at most 4096 at a time, since 4096 * 15 * 32512 < 2^31.
template <int Bits>
int64_t field_dot(const uint8_t* bytes, int64_t count, int shift, const int16_t* q) {
  int64_t total = 0;
  for (int64_t first = 0; first < count; first += 4096) {
    int64_t last = count < first + 4096 ? count : first + 4096;
    int32_t sum = 0;
    for (int64_t i = first; i < last; ++i)
      sum += static_cast<int16_t>((bytes[i] >> shift) & ((1 << Bits) - 1)) * static_cast<int32_t>(q[i]);
    total += sum;
  }
  return total;
}

template <int Bits>
int64_t segment_dot(const uint8_t* bytes, int64_t count, const int16_t* q) {
  int64_t total = 0;
  for (int f = 0; f < 8 / Bits; ++f) total += field_dot<Bits>(bytes, count, f * Bits, q + f * count);
  return total;
}

// Fields of 3 bits: `count` bytes in each of the three parts.
int64_t segment3_dot(const uint8_t* bytes, int64_t count, const int16_t* q) {
  const uint8_t* high = bytes + 2 * count;
  int64_t total = 0;
  for (int f = 0; f < 8; ++f)
    total += field_dot<2>(bytes + (f / 4) * count, count, (f % 4) * 2, q + f * count) +
             4 * field_dot<1>(high, count, f, q + f * count);
  return total;
}

// Integer dot of one row with contiguous code words.
double row_dot(const Plane& p, const Whole& state, const uint32_t* words) {
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(words);
  const int16_t* q = state.q.data();
  int64_t total = 0;
  for (int i = 0; i < p.n_segments; ++i) {
    int64_t count = static_cast<int64_t>(p.segments[i].words) * 4;
    int bits = p.segments[i].bits;
    if (bits == 4)
      total += segment_dot<4>(bytes, count, q);
    else if (bits == 3)
      total += segment3_dot(bytes, count / 3, q);
    else if (bits == 2)
      total += segment_dot<2>(bytes, count, q);
    else
      total += segment_dot<1>(bytes, count, q);
    bytes += count;
    q += p.segments[i].slots();
  }
  return static_cast<double>(total);
}

// The code words of a block, row by row.
void take_rows(const Plane& p, int64_t block, std::vector<uint32_t>* rows) {
  const int count = p.words_per_row - 1;
  rows->resize(static_cast<std::size_t>(count) * kInterleave);
  const uint32_t* words = p.words + block * kInterleave * p.words_per_row + kInterleave;
  for (int t = 0; t < count; ++t)
    for (int r = 0; r < kInterleave; ++r) (*rows)[static_cast<std::size_t>(r * count + t)] = words[t * kInterleave + r];
}

void screen(const Plane& p, const PlaneState* states, int n_states, const uint8_t* open, int64_t first, int64_t last,
            float* centre, float* upper, int64_t stride) {
  std::vector<Whole> whole;
  for (int b = 0; b < n_states; ++b) whole.emplace_back(p, states[b]);
  const int count = p.words_per_row - 1;
  std::vector<uint32_t> rows;
  for (int64_t block = first; block < last; ++block) {
    if (closed_block(p, open, block, n_states, centre, upper, stride)) continue;
    take_rows(p, block, &rows);
    for (int b = 0; b < n_states; ++b) {
      double dot[kInterleave];
      for (int r = 0; r < kInterleave; ++r) dot[r] = row_dot(p, whole[static_cast<std::size_t>(b)], rows.data() + r * count);
      const int64_t at = b * stride + block * kInterleave;
      bound_block(p, states[b], block, dot, centre + at, upper + at);
    }
  }
}

void sift(const Plane& p, const Sieve* sieves, int n_states, int64_t first, int64_t last, Sifted* out) {
  std::vector<Whole> whole, high;
  for (int b = 0; b < n_states; ++b) {
    whole.emplace_back(p, sieves[b].fine);
    high.emplace_back(p, sieves[b].fine, true);
  }
  const int count = p.words_per_row - 1;
  std::vector<uint32_t> rows;
  for (int64_t block = first; block < last; ++block) {
    const int64_t n = rows_of_block(p, block);
    take_rows(p, block, &rows);
    for (int b = 0; b < n_states; ++b) {
      const std::size_t at = static_cast<std::size_t>(b);
      int32_t hi[kInterleave];
      for (int r = 0; r < kInterleave; ++r) hi[r] = static_cast<int32_t>(row_dot(p, high[at], rows.data() + r * count));
      if (n == kInterleave && close_block(p, sieves[b], block, hi, &out[b].dropped)) continue;
      double dot[kInterleave];
      float centre[kInterleave], upper[kInterleave];
      for (int r = 0; r < kInterleave; ++r) dot[r] = row_dot(p, whole[at], rows.data() + r * count);
      bound_block(p, sieves[b].fine, block, dot, centre, upper);
      keep_rows(block * kInterleave, n, sieves[b].bar, centre, upper, out + b);
    }
  }
}

void refine(const Plane& p, const PlaneState& s, const int64_t* rows, const float* start, int64_t first, int64_t last,
            float* centre, float* upper) {
  Whole whole(p, s);
  Fetcher fetcher(p, rows, first, last);
  for (int64_t i = first; i < last; ++i) {
    fetcher.reach(i);
    const uint32_t* words = p.words + rows[i] * p.words_per_row;
    bound(s, start[i], bf16_to_float(p.rho[rows[i]]), words[0], row_dot(p, whole, words + 1), centre + i, upper + i);
  }
}

float same(float x) { return x; }

void score(const Rows& rows, const int64_t* ids, int64_t first, int64_t last, const double* h, int n_states,
           double* value, double* magnitude, int64_t stride) {
  if (rows.type == RowType::float32)
    scalar_score<float, same>(static_cast<const float*>(rows.data), rows.width, ids, first, last, h, n_states, value,
                            magnitude, stride);
  else if (rows.type == RowType::float16)
    scalar_score<uint16_t, f16_to_float>(static_cast<const uint16_t*>(rows.data), rows.width, ids, first, last, h,
                                       n_states, value, magnitude, stride);
  else if (rows.type == RowType::bfloat16)
    scalar_score<uint16_t, bf16_to_float>(static_cast<const uint16_t*>(rows.data), rows.width, ids, first, last, h,
                                        n_states, value, magnitude, stride);
  else
    score_packed(rows, ids, first, last, [&](const float* row, int64_t i) {
      scalar_score<float, same>(row, rows.width, nullptr, 0, 1, h, n_states, value + i, magnitude + i, stride);
    });
}

}  // namespace

const Kernels generic_kernels = {screen, sift, refine, score, scalar_next_above, scalar_select, noise_upper, add_upper, mass_upper,
                                joint_terms};

}  // namespace csv_decode
