#include "ledger.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>

#include "noise.hpp"
#include "pool.hpp"

namespace csv_decode {
namespace {

#include "noise.inl"

constexpr int64_t kRange = 4096;  // rows of a task
constexpr int64_t kLeaders = 16;  // of a race, found while plane 0 is read
constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr double kRelative = 0x1p-50;  // bounds/rounding.py
constexpr double kCoarse = 0x1p-30;    // modes.py
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

// Of (value, row), the `count` largest: larger first, then the smaller row.
std::vector<int64_t> best_rows(std::vector<std::pair<float, int64_t>>* all, int64_t count) {
  auto before = [](const auto& x, const auto& y) { return x.first > y.first || (x.first == y.first && x.second < y.second); };
  const size_t keep = std::min(all->size(), static_cast<size_t>(count));
  std::partial_sort(all->begin(), all->begin() + static_cast<std::ptrdiff_t>(keep), all->end(), before);
  std::vector<int64_t> out(keep);
  for (size_t i = 0; i < keep; ++i) out[i] = (*all)[i].second;
  return out;
}

constexpr uint8_t kNoBin = 255;  // of a row without a peak

// Two bins for each power of two below 1; the first takes all above, the last all below.
int bin_of(float peak) {
  uint32_t bits;
  std::memcpy(&bits, &peak, sizeof bits);
  const int bin = 2 * 127 - 1 - static_cast<int>(bits >> 22);
  return bin < 0 ? 0 : bin < kMassBins ? bin : kMassBins - 1;
}

// Is row `at` in the nucleus for sure, by the rows scored alone, which are all that may come before it? modes.py,
// `_leads`, has the proof.
bool in_nucleus(const Scored& scored, size_t at, const Nucleus& nucleus) {
  const size_t n = scored.ids.size();
  const double start = *std::max_element(scored.value.begin(), scored.value.end());
  double total = 0, before = 0, argument = 0;
  for (size_t i = 0; i < n; ++i) {
    const double weight = std::exp((scored.value[i] - start) / nucleus.t);
    const double doubt = scored.error[i] + kRelative * (std::fabs(scored.value[i]) + std::fabs(start));
    argument = std::max(argument, doubt / nucleus.t);
    total += weight;
    if (i == at) continue;
    const double ahead = scored.value[i] - scored.value[at];
    if (std::fabs(ahead) <= scored.error[i] + scored.error[at]) return false;
    if (ahead > 0) before += weight;
  }
  if (!(argument <= kCoarse)) return false;
  // exp is within a few ulp, n additions within n more
  const double error = std::expm1(argument) + 0x1p-46 + static_cast<double>(n) * 0x1p-52;
  return before * (1 + error) < nucleus.top_p * total * (1 - error);
}

}  // namespace

Ledger::Ledger(const Cascade& cascade, const Kernels& kernels, const Team& team, const double* h, int n_states,
               const Race* races)
    : cascade_(cascade),
      kernels_(kernels),
      team_(team),
      n_rows_(cascade.spec().planes[0].plane.rows),
      h_(h, h + static_cast<int64_t>(n_states) * cascade.spec().rows.width),
      prepared_(cascade.prepare(kernels, team, h, n_states)),
      states_(static_cast<size_t>(n_states)) {
  std::vector<PlaneState> first;
  for (const Prepared& state : prepared_) {
    const bool usable = state.finite && !state.vanishing;
    slot_.push_back(usable ? static_cast<int>(first.size()) : -1);
    if (usable) first.push_back(state.planes[0]);
  }
  for (State& state : states_) state.rows_at.resize(cascade.spec().planes.size());
  const size_t size = first.size() * static_cast<size_t>(n_rows_);
  scratch_ = cascade.borrow(size);
  centre_ = scratch_->centre.data();
  upper_ = scratch_->upper.data();
  level_.resize(size);
  if (first.empty()) return;
  const size_t extra = static_cast<size_t>(n_rows_) * slot_.size();
  if (races && scratch_->extra.size() < extra) scratch_->extra.resize(extra);
  std::vector<size_t> raced;
  for (size_t b = 0; races && b < slot_.size(); ++b) {
    if (slot_[b] < 0 || !(races[b].temperature > 0)) continue;
    states_[b].race = races[b];
    states_[b].extra = scratch_->extra.data() + static_cast<int64_t>(b) * n_rows_;
    raced.push_back(b);
  }
  std::vector<std::vector<std::pair<float, int64_t>>> looks(raced.size());
  std::mutex mutex;
  parallel_ranges(team_, (n_rows_ + kInterleave - 1) / kInterleave, 64, [&](int64_t from, int64_t to) {
    kernels_.screen(cascade_.spec().planes[0].plane, first.data(), static_cast<int>(first.size()), nullptr, from, to,
                    centre_, upper_, n_rows_);
    from *= kInterleave;
    to = std::min(n_rows_, to * kInterleave);
    std::vector<float> buffer(static_cast<size_t>(raced.empty() ? 0 : to - from));
    std::vector<int64_t> found;
    for (size_t i = 0; i < raced.size(); ++i) {
      const State& state = states_[raced[i]];
      kernels_.noise(state.race.key, raised(state.race.temperature), from, to - from, state.extra + from);
      const float* values = keys(state, centre_ + slot_[raced[i]] * n_rows_, false, from, to - from, buffer.data());
      found.clear();
      top_values(kernels_, values, 0, to - from, kLeaders, &found);
      std::lock_guard<std::mutex> lock(mutex);
      for (int64_t row : found)
        if (values[row] > kNothing) looks[i].emplace_back(values[row], from + row);
    }
  });
  for (size_t i = 0; i < raced.size(); ++i) states_[raced[i]].leaders = best_rows(&looks[i], kLeaders);
}

Ledger::~Ledger() { cascade_.give_back(std::move(scratch_)); }

bool Ledger::usable(int state) const { return slot_[static_cast<size_t>(state)] >= 0; }

int64_t Ledger::rows_at(int state, int plane) const {
  return states_[static_cast<size_t>(state)].rows_at[static_cast<size_t>(plane)];
}

template <typename Body>
void Ledger::ranges(const Body& body) const {
  parallel(team_, (n_rows_ + kRange - 1) / kRange,
           [&](int64_t range) { body(range, range * kRange, std::min(n_rows_, (range + 1) * kRange)); });
}

// The values of n rows with their noise.
const float* Ledger::keys(const State& state, const float* values, bool plain, int64_t first, int64_t n,
                          float* buffer) const {
  if (plain || !state.extra) return values + first;
  kernels_.add(values + first, state.extra + first, n, buffer);
  return buffer;
}

// The value of one row with its noise.
float Ledger::key(const State& state, float value, int64_t row, bool noisy) {
  if (noisy) add_upper(&value, &state.extra[row], 1, &value);
  return value;
}

void Ledger::allow(int b, const uint32_t* words) {
  states_[static_cast<size_t>(b)].highest = kUnknown;
  states_[static_cast<size_t>(b)].leaders.clear();
  const int64_t base = slot_[static_cast<size_t>(b)] * n_rows_;
  ranges([&](int64_t, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i)
      if (!(words[i / 32] >> (i % 32) & 1)) centre_[static_cast<size_t>(base + i)] = upper_[static_cast<size_t>(base + i)] = kNothing;
  });
}

std::vector<int64_t> Ledger::leaders(int b, int64_t count, bool plain) const {
  const State& state = states_[static_cast<size_t>(b)];
  if (!plain && count <= static_cast<int64_t>(state.leaders.size()))
    return {state.leaders.begin(), state.leaders.begin() + static_cast<std::ptrdiff_t>(count)};
  const float* centre = centre_ + slot_[static_cast<size_t>(b)] * n_rows_;
  std::vector<std::pair<float, int64_t>> all;
  std::mutex mutex;
  ranges([&](int64_t, int64_t first, int64_t last) {
    float buffer[kRange];
    const float* values = keys(state, centre, plain, first, last - first, buffer);
    std::vector<int64_t> found;
    top_values(kernels_, values, 0, last - first, count, &found);
    std::lock_guard<std::mutex> lock(mutex);
    for (int64_t i : found)
      if (values[i] > kNothing) all.emplace_back(values[i], first + i);
  });
  return best_rows(&all, count);
}

void Ledger::score(int b, const int64_t* ids, int64_t n, double* value, double* error) {
  const CascadeSpec& spec = cascade_.spec();
  score_rows(spec, kernels_, team_, h_.data() + b * spec.rows.width, ids, n, value, error);
  State& state = states_[static_cast<size_t>(b)];
  state.highest = kUnknown;
  state.leaders.clear();
  state.scored.ids.insert(state.scored.ids.end(), ids, ids + n);
  state.scored.value.insert(state.scored.value.end(), value, value + n);
  state.scored.error.insert(state.scored.error.end(), error, error + n);
  const int slot = slot_[static_cast<size_t>(b)];
  if (slot < 0) return;
  for (int64_t i = 0; i < n; ++i) {
    const size_t at = static_cast<size_t>(slot * n_rows_ + ids[i]);
    centre_[at] = upper_[at] = kNothing;
  }
}

std::vector<Ledger::Reached> Ledger::reach(const double* bars, const double* exact, bool plain) {
  const auto& planes = cascade_.spec().planes;
  const size_t n_states = states_.size(), n_ranges = static_cast<size_t>((n_rows_ + kRange - 1) / kRange);
  std::vector<Reached> found(n_states * n_ranges);
  std::vector<std::atomic<int64_t>> refined(n_states * planes.size());
  // A task takes a range of rows for all states, so what one state has brought in is at hand for the next.
  ranges([&](int64_t range, int64_t first, int64_t last) {
    std::vector<int64_t> rows, todo;
    std::vector<float> start, centre, upper;
    float buffer[kRange];
    for (size_t b = 0; b < n_states; ++b) {
      const int slot = slot_[b];
      if (slot < 0 || !(bars[b] < kInfinity)) continue;
      State& state = states_[b];
      const int64_t base = slot * n_rows_;
      const bool noisy = !plain && state.extra;
      const float bar = below_float32(bars[b]), last_bar = below_float32(exact[b]);
      float dropped = kNothing;
      auto select = [&](float limit) {  // of `rows`, those whose key is not below the limit
        size_t kept = 0;
        for (int64_t row : rows) {
          const float key = this->key(state, upper_[static_cast<size_t>(base + row)], row, noisy);
          if (key <= limit)
            dropped = std::max(dropped, key);
          else
            rows[kept++] = row;
        }
        rows.resize(kept);
      };
      rows.resize(static_cast<size_t>(last - first));
      const float* key = keys(state, upper_ + base, plain, first, last - first, buffer);
      rows.resize(static_cast<size_t>(kernels_.select(key, 0, last - first, bar, rows.data(), &dropped)));
      for (int64_t& row : rows) row += first;
      for (size_t p = 1; p < planes.size(); ++p) {
        todo.clear();
        for (int64_t row : rows)
          if (level_[static_cast<size_t>(base + row)] + size_t{1} == p) todo.push_back(row);
        const int64_t n = static_cast<int64_t>(todo.size());
        if (n == 0) continue;
        start.resize(todo.size());
        centre.resize(todo.size());
        upper.resize(todo.size());
        for (size_t j = 0; j < todo.size(); ++j) start[j] = centre_[static_cast<size_t>(base + todo[j])];
        kernels_.refine(planes[p].plane, prepared_[b].planes[p], todo.data(), start.data(), 0, n, centre.data(),
                        upper.data());
        for (size_t j = 0; j < todo.size(); ++j) {
          const size_t at = static_cast<size_t>(base + todo[j]);
          centre_[at] = centre[j];
          upper_[at] = upper[j];
          level_[at] = static_cast<uint8_t>(p);
        }
        refined[b * planes.size() + p] += n;
        select(bar);
      }
      if (noisy) {  // the noise itself in place of its bound, for the few rows that are left
        for (int64_t row : rows) state.extra[row] = noise_above(state.race, row, state.extra[row]);
      }
      select(last_bar);
      found[b * n_ranges + static_cast<size_t>(range)] = {rows, dropped};
    }
  });
  std::vector<Reached> out(n_states);
  for (size_t b = 0; b < n_states; ++b) {
    for (size_t p = 1; p < planes.size(); ++p) states_[b].rows_at[p] += refined[b * planes.size() + p];
    for (size_t range = 0; range < n_ranges; ++range) {
      const Reached& some = found[b * n_ranges + range];
      out[b].rows.insert(out[b].rows.end(), some.rows.begin(), some.rows.end());
      out[b].dropped = std::max(out[b].dropped, some.dropped);
    }
  }
  return out;
}

std::vector<std::vector<int64_t>> Ledger::open(const double* bars, const double* exact, bool plain) {
  std::vector<std::vector<int64_t>> out;
  for (Reached& reached : reach(bars, exact, plain)) out.push_back(std::move(reached.rows));
  for (State& state : states_) {
    state.highest = kUnknown;
    state.leaders.clear();
  }
  return out;
}

// The rows scored, with the noise of their race.
Scored Ledger::raced(const State& state) const {
  Scored raced = state.scored;
  for (int64_t id : raced.ids) raced.noise.push_back(state.race.temperature * gumbel(state.race.key, id));
  return raced;
}

// `kth_lower` of the rows scored.
double Ledger::bar(const State& state, int64_t k, bool plain) const {
  return kth_lower(plain || !state.extra ? state.scored : raced(state), k);
}

// Looks whether the winner of each race is in its nucleus: scores every row that may come before it by score.
void Ledger::settle(const Nucleus* nuclei, int64_t budget, std::vector<Top>* out) {
  std::vector<double> bars(states_.size(), kInfinity);
  for (size_t b = 0; b < states_.size(); ++b) {
    const State& state = states_[b];
    if (!state.extra || state.scored.ids.empty() || !(*out)[b].within_budget) continue;
    const Scored scored = raced(state);
    size_t first = 0;
    for (size_t i = 1; i < scored.ids.size(); ++i)
      if (scored.key(i) > scored.key(first)) first = i;
    bool clear = true;
    for (size_t i = 0; i < scored.ids.size(); ++i)
      clear = clear && (i == first || scored.upper(i) < scored.lower(first));
    if (!clear) continue;
    (*out)[b].winner = static_cast<int64_t>(first);
    if (nuclei[b].top_p >= 1) continue;
    const double best = *std::max_element(scored.value.begin(), scored.value.end());
    if (best - scored.value[first] <= nuclei[b].near)
      bars[b] = scored.value[first] - scored.error[first];
    else
      (*out)[b].winner = -1;
  }
  std::vector<Reached> reached = reach(bars.data(), bars.data(), true);
  for (size_t b = 0; b < states_.size(); ++b) {
    if (!(bars[b] < kInfinity)) continue;
    State& state = states_[b];
    Top& top = (*out)[b];
    const std::vector<int64_t>& rows = reached[b].rows;
    const int64_t n = static_cast<int64_t>(rows.size());
    if (static_cast<int64_t>(state.scored.ids.size()) + n <= budget) {
      std::vector<double> value(rows.size()), error(rows.size());
      const double highest = state.highest;
      score(static_cast<int>(b), rows.data(), n, value.data(), error.data());
      state.highest = highest;  // it has not risen
      top.survivors += n;
      top.floor = bars[b];
    }
    if (!(top.floor < kInfinity && in_nucleus(state.scored, static_cast<size_t>(top.winner), nuclei[b]))) top.winner = -1;
  }
}

std::vector<Top> Ledger::top(const int64_t* k, int64_t spare, int64_t budget, bool plain, const Nucleus* nuclei) {
  const size_t n_states = states_.size();
  std::vector<Top> out(n_states);
  std::vector<size_t> before(n_states);
  Session session(team_);
  std::vector<double> bars(n_states, kInfinity);
  auto take = [&](size_t b, const std::vector<int64_t>& ids) {
    std::vector<double> value(ids.size()), error(ids.size());
    score(static_cast<int>(b), ids.data(), static_cast<int64_t>(ids.size()), value.data(), error.data());
    bars[b] = bar(states_[b], k[b], plain);
  };
  for (size_t b = 0; b < n_states; ++b) {
    before[b] = states_[b].scored.ids.size();
    if (k[b] > 0 && slot_[b] >= 0) take(b, leaders(static_cast<int>(b), k[b] + std::max(spare, k[b]), plain));
  }
  std::vector<Reached> reached = reach(bars.data(), bars.data(), plain);
  for (size_t b = 0; b < n_states; ++b) {
    if (!(bars[b] < kInfinity)) continue;
    State& state = states_[b];
    std::vector<int64_t>& rows = reached[b].rows;
    const float *centre = centre_ + slot_[b] * n_rows_, *upper = upper_ + slot_[b] * n_rows_;
    const bool noisy = !plain && state.extra;
    std::vector<float> looks(rows.size());
    for (size_t i = 0; i < rows.size(); ++i) looks[i] = key(state, centre[rows[i]], rows[i], noisy);
    std::vector<int64_t> best;
    top_values(kernels_, looks.data(), 0, static_cast<int64_t>(rows.size()), k[b], &best);
    for (int64_t& at : best) at = rows[static_cast<size_t>(at)];
    if (!best.empty()) take(b, best);
    const float limit = below_float32(bars[b]);
    size_t kept = 0;
    for (int64_t row : rows) {
      const float bound = key(state, upper[row], row, noisy);  // -infinity where it was scored just now
      if (bound <= limit)
        reached[b].dropped = std::max(reached[b].dropped, bound);
      else
        rows[kept++] = row;
    }
    rows.resize(kept);
    Top& top = out[b];
    top.survivors = static_cast<int64_t>(kept);
    top.within_budget = static_cast<int64_t>(state.scored.ids.size() + kept) <= budget;
    if (top.within_budget) {
      if (kept > 0) take(b, rows);
      if (noisy || !state.extra) state.highest = static_cast<double>(reached[b].dropped);
    }
    top.bar = bars[b];
  }
  if (nuclei && !plain) settle(nuclei, budget, &out);
  for (size_t b = 0; b < n_states; ++b) {
    const auto first = static_cast<std::ptrdiff_t>(before[b]);
    const Scored& all = states_[b].scored;
    out[b].scored = {{all.ids.begin() + first, all.ids.end()},
                     {all.value.begin() + first, all.value.end()},
                     {all.error.begin() + first, all.error.end()},
                     {}};
  }
  return out;
}

double Ledger::highest(int b) const {
  const State& state = states_[static_cast<size_t>(b)];
  if (state.highest == state.highest) return state.highest;
  const int slot = slot_[static_cast<size_t>(b)];
  float top = kNothing;
  std::mutex mutex;
  ranges([&](int64_t, int64_t first, int64_t last) {
    float buffer[kRange], mine = kNothing;
    int64_t odd[kRange];
    const float* key = keys(state, upper_ + slot * n_rows_, false, first, last - first, buffer);
    // only NaN is not at most infinity
    if (kernels_.select(key, 0, last - first, std::numeric_limits<float>::infinity(), odd, &mine) > 0)
      mine = std::numeric_limits<float>::infinity();
    std::lock_guard<std::mutex> lock(mutex);
    top = std::max(top, mine);
  });
  return static_cast<double>(top);
}

void Ledger::mass(int b, float from, float rate, bool likely, double* bins) const {
  const float* upper = (likely ? centre_ : upper_) + slot_[static_cast<size_t>(b)] * n_rows_;
  const size_t n_ranges = static_cast<size_t>((n_rows_ + kRange - 1) / kRange);
  std::vector<double> parts(n_ranges * kMassBins);
  ranges([&](int64_t range, int64_t first, int64_t last) {
    kernels_.mass(upper + first, last - first, from, rate, parts.data() + range * kMassBins);
  });
  std::fill(bins, bins + kMassBins, 0.0);
  for (size_t i = 0; i < parts.size(); ++i) bins[i % kMassBins] += parts[i];
}

void Ledger::joint(int b, float from, float rate, double* out) {
  if (bin_.empty()) bin_.assign(level_.size(), kNoBin);
  const int64_t base = slot_[static_cast<size_t>(b)] * n_rows_;
  const size_t n_ranges = static_cast<size_t>((n_rows_ + kRange - 1) / kRange);
  const size_t size = cascade_.spec().planes.size() * kMassBins * kJointTerms;
  std::vector<double> parts(n_ranges * size);
  ranges([&](int64_t range, int64_t first, int64_t last) {
    float high[kRange], likely[kRange], peak[kRange];
    double* part = parts.data() + static_cast<size_t>(range) * size;
    kernels_.joint(centre_ + base + first, upper_ + base + first, last - first, from, rate, high, likely, peak);
    for (int64_t i = 0; i < last - first; ++i) {
      const size_t at = static_cast<size_t>(base + first + i);
      const int bin = bin_of(peak[i]);
      bin_[at] = peak[i] > 0.0f ? static_cast<uint8_t>(bin) : kNoBin;
      double* sum = part + (static_cast<size_t>(level_[at]) * kMassBins + static_cast<size_t>(bin)) * kJointTerms;
      const double w = static_cast<double>(likely[i]), q = static_cast<double>(peak[i]);
      sum[0] += static_cast<double>(high[i]);
      sum[1] += w;
      sum[2] += w * w;
      sum[3] = std::max(sum[3], q);
    }
  });
  std::fill(out, out + size, 0.0);
  for (size_t range = 0; range < n_ranges; ++range)
    for (size_t i = 0; i < size; ++i) {
      const double x = parts[range * size + i];
      out[i] = i % kJointTerms == 3 ? std::max(out[i], x) : out[i] + x;
    }
}

std::vector<int64_t> Ledger::lift(int b, int level, int bins) {
  if (bin_.empty()) return {};
  states_[static_cast<size_t>(b)].highest = kUnknown;
  states_[static_cast<size_t>(b)].leaders.clear();
  const auto& planes = cascade_.spec().planes;
  const int64_t base = slot_[static_cast<size_t>(b)] * n_rows_;
  const size_t next = static_cast<size_t>(level) + 1;
  const bool last_level = next == planes.size();
  std::vector<std::vector<int64_t>> found(last_level ? static_cast<size_t>((n_rows_ + kRange - 1) / kRange) : 0);
  std::atomic<int64_t> met{0};
  ranges([&](int64_t range, int64_t first, int64_t last) {
    int64_t rows[kRange], n = 0;
    for (int64_t i = first; i < last; ++i) {
      const size_t at = static_cast<size_t>(base + i);
      rows[n] = i;  // stays where the row is one of them
      n += level_[at] == level && bin_[at] < bins && upper_[at] != kNothing;
    }
    if (last_level) {
      found[static_cast<size_t>(range)].assign(rows, rows + n);
      return;
    }
    float start[kRange], centre[kRange], upper[kRange];
    for (int64_t j = 0; j < n; ++j) start[j] = centre_[static_cast<size_t>(base + rows[j])];
    kernels_.refine(planes[next].plane, prepared_[static_cast<size_t>(b)].planes[next], rows, start, 0, n, centre, upper);
    for (int64_t j = 0; j < n; ++j) {
      const size_t at = static_cast<size_t>(base + rows[j]);
      centre_[at] = centre[j];
      upper_[at] = upper[j];
      level_[at] = static_cast<uint8_t>(next);
    }
    met += n;
  });
  std::vector<int64_t> out;
  for (const auto& rows : found) out.insert(out.end(), rows.begin(), rows.end());
  if (!last_level) states_[static_cast<size_t>(b)].rows_at[next] += met;
  return out;
}

}  // namespace csv_decode
