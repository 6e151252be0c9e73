// One whole step of the shadow bound: from hidden states to scored rows, a threshold and what bounds the other rows.
// The same algorithm stands in plain Python in head.py (`_descend`) and bounds/shadow.py (`prepare`), with the proofs;
// here it runs without coming back to Python between planes.
#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "noise.hpp"
#include "plane.hpp"
#include "pool.hpp"

namespace csv_decode {

struct CascadePlane {
  Plane plane;
  std::vector<int32_t> dim;  // of each slot
  std::vector<double> step;
  std::vector<double> cmax;
  double radius_step[kGroups];
  double typical[kGroups - 1];  // of the probabilistic mode
};

struct CascadeSpec {
  Rows rows;          // the head's weights; index row i is row i
  const float* bias;  // (rows) or null
  Rows transform;  // (dims, width)
  Rows mean;       // (1, width) float32
  int64_t dims;
  int groups;
  int64_t edges[kGroups + 1];
  double delta;
  double energy;
  double rotation_error;  // of the probabilistic mode
  double sigma;           // 0: the deterministic mode
  std::vector<CascadePlane> planes;
  int64_t row_bytes(size_t plane) const {
    const bool biased = bias && plane == 0;
    return planes[plane].plane.words_per_row * 4 + 2 + (biased ? 4 : 0);
  }
};

struct Scored {
  std::vector<int64_t> ids;
  std::vector<double> value, error;
  std::vector<double> noise;  // temperature * gumbel of a race, empty without one

  // A key is the score, or in a race the sum with its noise: its lower and its upper end.
  double slack(size_t i) const;
  double lower(size_t i) const { return key(i) - slack(i); }
  double upper(size_t i) const { return key(i) + slack(i); }
  double key(size_t i) const { return noise.empty() ? value[i] : value[i] + noise[i]; }
};

// The k-th largest lower end of the keys, -infinity where there are fewer.
double kth_lower(const Scored& scored, int64_t k);

struct StepResult {
  Scored scored;      // every row scored; only the k best, in order, once `sort_if_clear` has proved their order
  int64_t rows_scored;
  bool clear;
  double threshold;
  double max_unopened;
  double energy;
  std::vector<int64_t> survivors;  // after each plane
  int64_t bytes_read;              // the share of this state in what the call asked memory for
  bool vanishing;                  // true: the state is too small for the error analysis, nothing was done
  bool finite;                     // false: a parameter overflowed, nothing was done
  bool within_budget;              // false: more survivors than the budget; they were not scored
};

struct Margin {
  double relative, absolute;
};

// What one state becomes: for every plane the quantised state and the parameters of the bound.
struct Prepared {
  std::vector<std::vector<int8_t>> hi, lo;
  std::vector<PlaneState> planes;
  double energy;
  bool vanishing;  // too small for the error analysis
  bool finite;     // false: a parameter overflowed
};

class Cascade {
 public:
  explicit Cascade(CascadeSpec spec) : spec_(std::move(spec)) {}

  // Memory for the bounds of plane 0 of some states, kept between calls.
  struct Scratch {
    std::vector<float> centre, upper, extra;  // extra: bounds of the noise of a race
  };

  const CascadeSpec& spec() const { return spec_; }
  std::unique_ptr<Scratch> borrow(size_t size) const;
  void give_back(std::unique_ptr<Scratch> scratch) const;
  std::vector<Prepared> prepare(const Kernels& kernels, const Team& team, const double* h, int n_states) const;

  // h: (n_states, width) float64, finite. k >= 1 rows wanted, `spare` more scored for the first threshold, at most
  // `budget` survivors scored at the end. races: null, or one for each state, and the k first of each are wanted.
  // margins: null, or of each state how far below the k-th rows are scored as well. guesses: null, or without a race
  // (n_states, k) different rows that may be the best ones, or -1 for a state without.
  std::vector<StepResult> scan(const Kernels& kernels, const Team& team, const double* h, int n_states, int64_t k,
                               int64_t spare, int64_t budget, const Race* races, const Margin* margins,
                               const int64_t* guesses);

 private:
  struct Left;
  struct Columns;
  class Room;

  void score(const Kernels& kernels, const Team& team, const double* h, const Race* race, int64_t k, std::vector<int64_t> ids,
             StepResult* out) const;
  void descend(const Kernels& kernels, const Prepared& state, const Race* race, float bar, Left* left,
               int64_t* counts) const;
  void finish(const Kernels& kernels, const Team& team, const double* h, const Race* race, const Margin* margin, Left left,
              int64_t k, int64_t budget, StepResult* out) const;

  CascadeSpec spec_;
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Scratch>> idle_;
};

// Where the intervals of the scored keys do not overlap around the k best, puts those k in order and drops the others.
void sort_if_clear(StepResult* step, int64_t k);

// The `count` largest of values[first, last), larger first, then the smaller index; NaN never. Appends to `out`.
void top_values(const Kernels& kernels, const float* values, int64_t first, int64_t last, int64_t count,
                std::vector<int64_t>* out);

// Scores of rows `ids` with h (width), bias included: |value - score| <= error.
void score_rows(const CascadeSpec& spec, const Kernels& kernels, const Team& team, const double* h, const int64_t* ids,
                int64_t n, double* value, double* error);

// A state of plane 0 for `sift`. See bounds/planes.py (`sieves`) for the proof.
Sieve sieve_of(const Plane& plane, const PlaneState& state, float bar);

// The largest float32 strictly below x.
float below_float32(double x);

}  // namespace csv_decode
