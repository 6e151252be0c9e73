// Portable C++: the kernel that runs everywhere and that the others must equal.
#include "plane.hpp"

namespace csv_decode {
namespace {
#include "row_math.inl"

void screen(const Plane& p, const PlaneState* states, int n_states, const uint8_t* open, int64_t first, int64_t last,
            float* centre, float* upper, int64_t stride) {
  for (int64_t block = first; block < last; ++block) {
    if (closed_block(p, open, block, n_states, centre, upper, stride)) continue;
    const uint32_t* words = p.words + block * kInterleave * p.words_per_row + kInterleave;
    for (int b = 0; b < n_states; ++b) {
      int32_t hi[kInterleave], lo[kInterleave];
      for (int r = 0; r < kInterleave; ++r) scalar_dot(p, states[b], words + r, kInterleave, hi + r, lo + r);
      bound_block(p, states[b], block, hi, lo, centre + b * stride, upper + b * stride);
    }
  }
}

void refine(const Plane& p, const PlaneState& s, const int64_t* rows, const float* start, int64_t first, int64_t last,
            float* centre, float* upper) {
  for (int64_t i = first; i < last; ++i) {
    const uint32_t* words = p.words + rows[i] * p.words_per_row;
    int32_t hi, lo;
    scalar_dot(p, s, words + 1, 1, &hi, &lo);
    bound(s, start[i], bf16_to_float(p.rho[rows[i]]), words[0], hi, lo, centre + i, upper + i);
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
  else
    scalar_score<uint16_t, bf16_to_float>(static_cast<const uint16_t*>(rows.data), rows.width, ids, first, last, h,
                                        n_states, value, magnitude, stride);
}

}  // namespace

const Kernels generic_kernels = {screen, refine, score, scalar_next_above, scalar_select};

}  // namespace csv_decode
