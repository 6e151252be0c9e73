// Plain data that crosses the boundary between the dispatcher and the kernels.
// Nothing here owns memory, and nothing here knows Python, models or certificates.
#pragma once
#include <cstdint>

namespace csv_decode {

constexpr int kInterleave = 16;  // rows of plane 0 that share a 64-byte vector
constexpr int kGroups = 4;       // groups of dimensions with a radius each
constexpr int kMaxSegments = 4;  // fields of 4, 3, 2 and 1 bits

// `words` consecutive 32-bit words of a row whose bytes each hold 8 / bits fields of `bits` bits.
// Field f of byte k of word t is slot (f * words + t) * 4 + k of the segment.
// Fields of 3 bits (plane 0 only) lie in three parts of n = words / 3 words each: the low two bits of fields 0 to 3 in
// the first, of fields 4 to 7 in the second, the high bits of all eight in the third. Field f of byte k of word t of each
// part is slot (f * n + t) * 4 + k.
struct Segment {
  int32_t bits;
  int32_t words;
  int64_t slots() const { return static_cast<int64_t>(words) * 32 / bits; }
};

// One plane of codes. Each row is one radius word (kGroups bytes) followed by the code words of the segments.
// Plane 0 stores rows 16 by 16, word by word ([block][word][row]); later planes store a row after another.
struct Plane {
  const uint32_t* words;
  const uint16_t* rho;   // (rows) bfloat16, the row scale
  const float* bias;     // (rows) or null
  int64_t rows;
  int32_t words_per_row;  // the radius word included
  int32_t n_segments;
  Segment segments[kMaxSegments];
};

// What one hidden state becomes for one plane. With D = 256 * hi + lo the integer dot of a row's codes:
//   centre = start + rho * (half_scale * (2 D - offset))
//   upper  = centre + rho * (constant + sum_g radius_g * norm_g) + slack + |start| * start_slack
// `start` is `base` + bias for plane 0 and the centre of the plane before for the others.
struct PlaneState {
  const int8_t* hi;  // (slots) high and low halves of the 16-bit state, in slot order, segment by segment
  const int8_t* lo;  // in later planes zero, and not read, for fields of 1 and 2 bits
  double half_scale;
  double offset;
  double constant;
  double norm[kGroups];
  double base;
  double slack;
  double start_slack;
};

// A state that knows a bar, for `sift`: with H the dot of a row's codes and the high bytes alone,
//   rho * (step H + sum_g radius_g * norm_g + constant) + start (and bias)
// in float32, in the order of `sieve_upper`, is above the row's score; bounds/planes.py (`sieves`) has the proof.
struct Sieve {
  PlaneState fine;
  float step;
  float constant;
  float norm[kGroups];
  float start;
  float bar;
};

// What `sift` leaves of a range of rows: those above the bar, in rising order, with room for all of the range.
struct Sifted {
  int64_t* rows;
  float* centre;
  float* upper;
  int64_t n;
  float dropped;  // at least the upper bound of every other row
};

// The last three are block formats of GGUF files; a row is a whole number of blocks.
enum class RowType : int32_t { float32 = 0, float16 = 1, bfloat16 = 2, q8_0 = 3, q4_k = 4, q6_k = 5 };
constexpr int kRowTypes = 6;

struct BlockFormat {
  int64_t numbers, bytes;  // of a block
};
constexpr BlockFormat kBlocks[kRowTypes] = {{1, 4}, {1, 2}, {1, 2}, {32, 34}, {256, 144}, {256, 210}};

struct Rows {
  const void* data;  // rows of `width` numbers, one after another
  RowType type;
  int64_t width;
  int64_t bytes() const {
    const BlockFormat& f = kBlocks[static_cast<int>(type)];
    return width / f.numbers * f.bytes;
  }
};

// What the noise of one state's race depends on; see noise.inl.
struct NoiseKey {
  uint32_t seed[2];
  uint32_t position, stream;
};

constexpr int kMassBins = 128;
constexpr int kJointTerms = 4;

// One table for each instruction set; every entry gives the same bits in all of them.
struct Kernels {
  // Plane 0, blocks [first, last): centre and upper of n_states states, state b at b * stride. Blocks whose `open`
  // byte is 0 get -infinity in both. `open` may be null.
  void (*screen)(const Plane&, const PlaneState*, int n_states, const uint8_t* open, int64_t first, int64_t last,
                 float* centre, float* upper, int64_t stride);
  // Plane 0, blocks [first, last), for states that know a bar: a block in which the high bytes of a state leave no row
  // above the bar is done with; in the others the rows have the centre and upper of `screen`. Appends to `out`, one
  // for each state.
  void (*sift)(const Plane&, const Sieve*, int n_states, int64_t first, int64_t last, Sifted* out);
  // A later plane, for entries [first, last) of `rows`; `start` holds the centres that the plane before left.
  void (*refine)(const Plane&, const PlaneState&, const int64_t* rows, const float* start, int64_t first,
                 int64_t last, float* centre, float* upper);
  // Float64 dots of rows with states h (n_states, width), over 16 lanes in a fixed order, and the same of the
  // absolute values. `ids` selects rows (null: row i is i); entry i of state b goes to i + b * stride.
  void (*score)(const Rows&, const int64_t* ids, int64_t first, int64_t last, const double* h, int n_states,
                double* value, double* magnitude, int64_t stride);
  // The first index in [first, last) with !(values[i] <= bar), or last.
  int64_t (*next_above)(const float* values, int64_t first, int64_t last, float bar);
  // Writes the indices in [first, last) with !(values[i] <= bar) to `ids`, returns how many there are, and raises
  // *dropped to the largest of the other values. `ids` has room for last - first, all of which may be written.
  int64_t (*select)(const float* values, int64_t first, int64_t last, float bar, int64_t* ids, float* dropped);
  // See noise.inl.
  void (*noise)(const NoiseKey&, float temperature, int64_t first, int64_t n, float* extra);
  void (*add)(const float* upper, const float* extra, int64_t n, float* out);
  void (*mass)(const float* upper, int64_t n, float from, float rate, double* bins);
  void (*joint)(const float* centre, const float* upper, int64_t n, float from, float rate, float* high, float* likely,
                float* peak);
};

extern const Kernels generic_kernels;
#if defined(CSV_DECODE_X86)
extern const Kernels avx2_kernels;
extern const Kernels avx512bw_kernels;
extern const Kernels avx512_kernels;
#endif

}  // namespace csv_decode
