// What is known of every row while one call decides: for each state the bounds of all rows that were not scored, as tight
// as the planes read so far make them. Every decoding mode is a few questions to it (scan.py).
#pragma once
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "cascade.hpp"
#include "noise.hpp"

namespace csv_decode {

// What `Ledger::top` did for a state.
struct Top {
  Scored scored;            // the rows it scored, with errors
  double bar = 0;           // the k-th largest lower end of all keys scored, -infinity where there are fewer
  int64_t survivors = 0;    // rows that reached the last bar
  bool within_budget = true;  // false: those were not scored
  int64_t winner = -1;  // of all rows scored, the number of the one that the race draws from its nucleus; -1: not clear
  double floor = std::numeric_limits<double>::infinity();  // every row that may have a larger score is scored
};

// The rows that top-p leaves of a state: those before which less than top_p of the mass of exp(score / t) comes.
struct Nucleus {
  double near;  // a row may be so far behind the best for the rows before it to be worth scoring; below 0: none
  double t, top_p;
};

class Ledger {
 public:
  // Prepares the states h (n_states, width) and reads plane 0. The cascade must outlive the ledger. races: null, or one
  // for each state, temperature 0: none; the keys of a state with a race are upper bounds of score + temperature *
  // gumbel, else of the score.
  Ledger(const Cascade& cascade, const Kernels& kernels, const Team& team, const double* h, int n_states, const Race* races);
  ~Ledger();
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;

  // False: nothing is known of this state; its rows have to be scored.
  bool usable(int state) const;
  bool vanishing(int state) const { return prepared_[static_cast<size_t>(state)].vanishing; }
  double energy(int state) const { return prepared_[static_cast<size_t>(state)].energy; }
  int64_t rows_at(int state, int plane) const;  // rows that were refined by a plane

  // Takes rows out whose bit (i % 32 of word i / 32) is 0.
  void allow(int state, const uint32_t* words);
  // `plain` below: without the noise, though a race is on.
  // The `count` unscored rows that look best, best first.
  std::vector<int64_t> leaders(int state, int64_t count, bool plain) const;
  // Scores rows, which then leave the ledger.
  void score(int state, const int64_t* ids, int64_t n, double* value, double* error);
  // Scores rows of every state with k[state] > 0 until no other can be among its k best; ties stay. The rows that look
  // best (k and at least `spare` more) give a bar, planes drop the rows below it, those that look best then raise it, and
  // what still reaches it is scored, unless more than `budget` rows in all would be. nuclei: null, or
  // for k = 1 in races what else has to be known of each winner: the rows before it, by their score, are scored as well.
  std::vector<Top> top(const int64_t* k, int64_t spare, int64_t budget, bool plain, const Nucleus* nuclei);
  // Refines until every row has a key below bars[state] or has met all planes; returns the rows whose key still reaches
  // exact[state] then, in rising order. A state whose bar is infinity is left as it is.
  std::vector<std::vector<int64_t>> open(const double* bars, const double* exact, bool plain);
  // The largest key (of the race, where one is on); +infinity where one is NaN, -infinity where no row is left.
  double highest(int state) const;
  // See Kernels.mass, over the rows left. `likely`: of their centres, which bounds nothing but shows where to look.
  void mass(int state, float from, float rate, bool likely, double* bins) const;
  // For the rows left on each level (planes met after the first), by half powers of two of their peak: the sums of high,
  // of likely and of its square, and the largest peak; see `joint_terms`. out: (planes, kMassBins, kJointTerms).
  void joint(int state, float from, float rate, double* out);
  // Refines the rows of a level whose peak is in the first `bins` bins, as the last call of `joint` for this state has
  // found them; those that have met all planes are returned.
  std::vector<int64_t> lift(int state, int level, int bins);

 private:
  struct State {
    float* extra = nullptr;  // bounds of the race's noise, null without one
    Race race{};
    std::vector<int64_t> rows_at;
    std::vector<int64_t> leaders;  // the rows that look best in the race, until something is known of any row
    Scored scored;
    double highest = std::numeric_limits<double>::quiet_NaN();  // what `highest` says, NaN where it has to look
  };

  // What `open` finds, by state: the rows, and the largest key of all others.
  struct Reached {
    std::vector<int64_t> rows;
    float dropped = -std::numeric_limits<float>::infinity();
  };

  template <typename Body>
  void ranges(const Body& body) const;
  const float* keys(const State& state, const float* values, bool plain, int64_t first, int64_t n, float* buffer) const;
  static float key(const State& state, float value, int64_t row, bool noisy);
  std::vector<Reached> reach(const double* bars, const double* exact, bool plain);
  Scored raced(const State& state) const;
  double bar(const State& state, int64_t k, bool plain) const;
  void settle(const Nucleus* nuclei, int64_t budget, std::vector<Top>* out);

  const Cascade& cascade_;
  const Kernels& kernels_;
  Team team_;
  int64_t n_rows_;
  std::vector<double> h_;
  std::vector<Prepared> prepared_;
  std::vector<State> states_;
  std::vector<int> slot_;  // of each state in the arrays below, -1 where it is not usable
  std::unique_ptr<Cascade::Scratch> scratch_;
  float *centre_, *upper_;
  std::vector<uint8_t> level_;  // planes met after the first
  std::vector<uint8_t> bin_;    // of each peak, as `joint` found it
};

}  // namespace csv_decode
