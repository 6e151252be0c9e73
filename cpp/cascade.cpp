#include "cascade.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <utility>

#include "pool.hpp"

namespace csv_decode {
namespace {

// See bounds/rounding.py for what each of these covers.
constexpr double kU = 0x1p-53;
constexpr double kRelative = 0x1p-50;
constexpr double kInflate = 1.0 + 0x1p-36;
constexpr double kAbsolute = 1e-150;
constexpr double kSmallestState = 1e-100;
constexpr double kPeak = 32512;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

double gamma(int64_t n) {
  double x = static_cast<double>(n) * kU;
  return x / (1 - x) * (1 + 4 * kU);
}

// Factor of the magnitude in score_error; the absolute part is width * 2^-1074.
double score_factor(int64_t width) {
  double g = gamma((width + 15) / 16 + 5);
  return g / (1 - g) * (1 + 8 * kU);
}

double score_floor(int64_t width) { return static_cast<double>(width) * 0x1p-1074; }

// The nearest integer, the even one of two, of a number below 2^51: std::nearbyint is a call of 5 ns.
double to_even(double x) { return (x + 0x1.8p52) - 0x1.8p52; }

double norm(const double* x, int64_t first, int64_t last) {
  double lane[4] = {};
  int64_t j = first;
  for (; j + 4 <= last; j += 4)
    for (int i = 0; i < 4; ++i) lane[i] += x[j + i] * x[j + i];
  for (; j < last; ++j) lane[0] += x[j] * x[j];
  return std::sqrt((lane[0] + lane[1]) + (lane[2] + lane[3]));
}

struct Best {
  const float* values;
  bool operator()(int64_t a, int64_t b) const {
    return values[a] > values[b] || (values[a] == values[b] && a < b);
  }
};

// A row whose key is not above this is out.
float bar_of(const StepResult& step, const Margin* margin) {
  const double bar = step.threshold;
  return below_float32(margin ? bar - (margin->relative * std::fabs(bar) + margin->absolute) : bar);
}

// The smallest float32 that is not below x.
float above_float32(double x) {
  const float near = static_cast<float>(x);
  return static_cast<double>(near) < x ? std::nextafter(near, std::numeric_limits<float>::infinity()) : near;
}

}  // namespace

float below_float32(double x) {
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  float bar = static_cast<float>(x);
  return static_cast<double>(bar) >= x ? std::nextafter(bar, kLowest) : bar;
}

Sieve sieve_of(const Plane& plane, const PlaneState& state, float bar) {
  double offset = 0, high = 0, low = 0;  // sums of cmax hi, cmax |hi| and cmax |lo|: integers
  int64_t j = 0;
  for (int i = 0; i < plane.n_segments; ++i) {
    const double cmax = (1 << plane.segments[i].bits) - 1;
    for (const int64_t end = j + plane.segments[i].slots(); j < end; ++j) {
      offset += cmax * state.hi[j];
      high += cmax * std::abs(state.hi[j]);
      low += cmax * std::abs(state.lo[j]);
    }
  }
  const double step = 512 * state.half_scale;
  const double constant = state.half_scale * (low - 256 * offset) + state.constant;
  double reach = step * high + std::fabs(constant);
  for (double norm : state.norm) reach += 255 * norm;
  Sieve out{};
  out.fine = state;
  out.step = static_cast<float>(step);
  out.constant = above_float32(constant + 0x1p-20 * reach + 0x1p-140 * (1 + high));
  for (int g = 0; g < kGroups; ++g) out.norm[g] = above_float32(state.norm[g]);
  out.start = above_float32(state.base + state.slack + 0x1p-20 * (std::fabs(state.base) + state.slack) + 0x1p-140);
  out.bar = bar;
  return out;
}

void top_values(const Kernels& kernels, const float* values, int64_t first, int64_t last, int64_t count,
                std::vector<int64_t>* out) {
  if (count <= 0) return;
  Best before{values};
  std::vector<int64_t> heap;  // the worst of the best on top
  int64_t i = first;
  for (; i < last && static_cast<int64_t>(heap.size()) < count; ++i)
    if (values[i] == values[i]) {
      heap.push_back(i);
      std::push_heap(heap.begin(), heap.end(), before);
    }
  while (i < last && (i = kernels.next_above(values, i, last, values[heap.front()])) < last) {
    if (values[i] == values[i]) {
      std::pop_heap(heap.begin(), heap.end(), before);
      heap.back() = i;
      std::push_heap(heap.begin(), heap.end(), before);
    }
    ++i;
  }
  std::sort(heap.begin(), heap.end(), before);
  out->insert(out->end(), heap.begin(), heap.end());
}

double Scored::slack(size_t i) const {
  return noise.empty() ? error[i] : error[i] + kRelative * (std::fabs(value[i]) + std::fabs(noise[i]));
}

double kth_lower(const Scored& scored, int64_t k) {
  if (static_cast<int64_t>(scored.ids.size()) < k) return -kInfinity;
  std::vector<double> lower(scored.ids.size());
  for (size_t i = 0; i < lower.size(); ++i) lower[i] = scored.lower(i);
  auto at = lower.begin() + (k - 1);
  std::nth_element(lower.begin(), at, lower.end(), [](double a, double b) { return a > b; });
  return *at;
}

void sort_if_clear(StepResult* step, int64_t k) {
  Scored& s = step->scored;
  step->rows_scored = static_cast<int64_t>(s.ids.size());
  step->clear = false;
  if (step->rows_scored < k) return;
  std::vector<size_t> at;
  for (size_t i = 0; i < s.ids.size(); ++i)
    if (!(s.upper(i) < step->threshold)) at.push_back(i);
  std::sort(at.begin(), at.end(), [&](size_t a, size_t b) {
    return s.key(a) > s.key(b) || (s.key(a) == s.key(b) && s.ids[a] < s.ids[b]);
  });
  double next = -kInfinity;  // the largest upper end behind
  for (size_t i = at.size(); i-- > 0;) {
    if (static_cast<int64_t>(i) < k && !(s.lower(at[i]) > next)) return;
    next = std::max(next, s.upper(at[i]));
  }
  Scored best;
  for (int64_t i = 0; i < k; ++i) {
    const size_t from = at[static_cast<size_t>(i)];
    best.ids.push_back(s.ids[from]);
    best.value.push_back(s.value[from]);
    best.error.push_back(s.error[from]);
  }
  s = std::move(best);
  step->clear = true;
}

void score_rows(const CascadeSpec& s, const Kernels& kernels, const Team& team, const double* h, const int64_t* ids,
                int64_t n, double* value, double* error) {
  parallel_ranges(team, n, 64, [&](int64_t first, int64_t last) {
    kernels.score(s.rows, ids, first, last, h, 1, value, error, n);
  });
  const double factor = score_factor(s.rows.width), floor = score_floor(s.rows.width);
  for (int64_t i = 0; i < n; ++i) {
    error[i] = error[i] * factor + floor;
    if (s.bias) {
      value[i] += static_cast<double>(s.bias[ids[i]]);
      error[i] += kRelative * std::fabs(value[i]);
    }
  }
}

std::vector<Prepared> Cascade::prepare(const Kernels& kernels, const Team& team, const double* h,
                                                int n_states) const {
  const CascadeSpec& s = spec_;
  const int64_t dims = s.dims, width = s.transform.width;
  const double factor = score_factor(width), floor = score_floor(width);
  std::vector<double> white(static_cast<size_t>(dims * n_states)), white_error(white.size());
  std::vector<double> base(static_cast<size_t>(n_states)), base_magnitude(base.size());
  parallel_ranges(team, dims, 64, [&](int64_t first, int64_t last) {
    kernels.score(s.transform, nullptr, first, last, h, n_states, white.data(), white_error.data(), dims);
  });
  kernels.score(s.mean, nullptr, 0, 1, h, n_states, base.data(), base_magnitude.data(), 1);
  for (double& e : white_error) e = e * factor + floor;

  std::vector<Prepared> out(static_cast<size_t>(n_states));
  parallel(n_states > 1 ? team : Team{}, n_states, [&](int64_t b) {
    std::vector<double> v, q;
    Prepared& state = out[static_cast<size_t>(b)];
    const double* x = white.data() + b * dims;
    const double* e = white_error.data() + b * dims;
    double norms[kGroups] = {}, across[kGroups] = {}, whole = 0;
    for (int g = 0; g < s.groups; ++g)
      norms[g] = (norm(x, s.edges[g], s.edges[g + 1]) + norm(e, s.edges[g], s.edges[g + 1])) * kInflate + kAbsolute;
    double largest = 0;
    for (int64_t j = 0; j < width; ++j) largest = std::max(largest, std::fabs(h[b * width + j]));
    state.vanishing = largest < kSmallestState;
    double bb = base[static_cast<size_t>(b)];
    double slack = (base_magnitude[static_cast<size_t>(b)] * factor + floor) * kInflate;
    const double size = norm(h + b * width, 0, width) * kInflate + kAbsolute;
    double constant = s.delta * size;
    if (s.sigma > 0) {
      for (int g = 0; g < s.groups; ++g) {
        norms[g] = (norms[g] + s.rotation_error * size) * kInflate;
        const int64_t others = s.edges[g + 1] - s.edges[g] - 1;
        if (others > 0) across[g] = norms[g] * norms[g] * kInflate / static_cast<double>(others);
        whole += norms[g] * norms[g];
      }
      whole = std::sqrt(whole) * kInflate;
    }
    double between = 0;  // reach of the planes after the first and before this one
    state.finite = true;
    for (size_t i = 0; i < s.planes.size(); ++i) {
      const CascadePlane& plane = s.planes[i];
      size_t slots = plane.dim.size();
      v.resize(slots);
      q.resize(slots);
      state.hi.emplace_back(slots);
      state.lo.emplace_back(slots);
      double peak = 0;
      for (size_t j = 0; j < slots; ++j) {
        v[j] = x[plane.dim[j]] * plane.step[j];
        peak = std::max(peak, std::fabs(v[j]));
      }
      double scale = peak > kAbsolute ? peak / kPeak : 1.0;
      double offset = 0, error = 0, reach = 0;
      for (size_t j = 0; j < slots; ++j) {
        const double quantum = i > 0 && plane.cmax[j] <= 3 ? 256 : 1;
        q[j] = std::min(kPeak, std::max(-kPeak, to_even(v[j] / (scale * quantum)) * quantum));
        double left = std::fabs(v[j] - q[j] * scale) + kRelative * peak + e[plane.dim[j]] * plane.step[j];
        error += left * (plane.cmax[j] * 0.5);
        offset += q[j] * plane.cmax[j];
        reach += std::fabs(q[j]) * plane.cmax[j];
        int32_t whole = static_cast<int32_t>(q[j]);
        int32_t high = (whole + 128) >> 8;
        state.hi[i][j] = static_cast<int8_t>(high);
        state.lo[i][j] = static_cast<int8_t>(whole - 256 * high);
      }
      reach *= scale * 0.5;
      error = (error * kInflate + kRelative * reach) * kInflate;
      constant = (constant + error) * kInflate;
      PlaneState p{};
      p.half_scale = scale * 0.5;
      p.offset = offset;
      p.constant = (constant + static_cast<double>(i) * 0x1p-23 * between) * kInflate;
      if (i > 0) between += reach * kInflate;
      for (int g = 0; g < kGroups; ++g) p.norm[g] = plane.radius_step[g] * norms[g] * kInflate;
      if (s.sigma > 0) {
        double middle = 0;
        for (int g = 0; g < s.groups; ++g) middle += across[g] * plane.typical[g];
        middle = std::sqrt(middle) + kAbsolute;
        p.constant = (p.constant + s.sigma / 2 * middle) * kInflate;
        for (int g = 0; g < s.groups; ++g)
          p.norm[g] = plane.radius_step[g] * (s.sigma / 2 * (across[g] / middle)) * kInflate * kInflate;
        p.norm[kGroups - 1] = plane.radius_step[kGroups - 1] * whole * kInflate;
      }
      p.base = bb;
      p.slack = slack + 0x1p-140;
      p.start_slack = i == 0 ? kRelative : static_cast<double>(i) * 0x1p-23;
      double total = p.half_scale + p.offset + p.constant + p.base + p.slack;
      for (double n : p.norm) total += n;
      state.finite = state.finite && std::isfinite(total);
      state.planes.push_back(p);
    }
    for (size_t i = 0; i < s.planes.size(); ++i) {
      state.planes[i].hi = state.hi[i].data();
      state.planes[i].lo = state.lo[i].data();
    }
    double length = norm(x, 0, dims);
    state.energy = length * length / static_cast<double>(dims) / (s.energy > 0 ? s.energy : 1.0);
  });
  return out;
}

void Cascade::score(const Kernels& kernels, const Team& team, const double* h, const Race* race, int64_t k,
                    std::vector<int64_t> ids, StepResult* out) const {
  const CascadeSpec& s = spec_;
  Scored& scored = out->scored;
  if (!scored.ids.empty()) {
    std::vector<int64_t> known = scored.ids;
    std::sort(known.begin(), known.end());
    ids.erase(std::remove_if(ids.begin(), ids.end(),
                             [&](int64_t id) { return std::binary_search(known.begin(), known.end(), id); }),
              ids.end());
  }
  const int64_t n = static_cast<int64_t>(ids.size());
  if (n > 0) {
    size_t before = scored.ids.size();
    scored.ids.insert(scored.ids.end(), ids.begin(), ids.end());
    scored.value.resize(scored.ids.size());
    scored.error.resize(scored.ids.size());
    score_rows(s, kernels, team, h, ids.data(), n, scored.value.data() + before, scored.error.data() + before);
    if (race)
      for (int64_t id : ids) scored.noise.push_back(race->temperature * gumbel(race->key, id));
  }
  out->threshold = kth_lower(scored, k);
}

// What plane 0 says of all rows; extra: bounds of the noise of a race, or null.
struct Cascade::Columns {
  const float *centre, *upper, *extra;

  // `values` of rows [first, last), with their noise; value 0 is of row first.
  const float* keys(const Kernels& kernels, const float* values, int64_t first, int64_t last,
                    std::vector<float>* buffer) const {
    if (!extra) return values + first;
    buffer->resize(static_cast<size_t>(last - first));
    kernels.add(values + first, extra + first, last - first, buffer->data());
    return buffer->data();
  }
};

// Memory for some rows of a range, which nobody clears.
class Cascade::Room {
  std::unique_ptr<char[]> memory_;

 public:
  int64_t* rows;
  float *centre, *upper;

  explicit Room(int64_t n)
      : memory_(new char[static_cast<size_t>(n) * (sizeof(int64_t) + 2 * sizeof(float)) + 1]),
        rows(reinterpret_cast<int64_t*>(memory_.get())),
        centre(reinterpret_cast<float*>(rows + n)),
        upper(centre + n) {}

  Sifted of(int64_t first) const {
    return {rows + first, centre + first, upper + first, 0, -std::numeric_limits<float>::infinity()};
  }
};

// Rows that are still in the race, in rising order, with their bounds, and the largest key of those that are not.
struct Cascade::Left {
  std::vector<int64_t> rows;
  std::vector<float> centre, upper, extra;
  float dropped = -std::numeric_limits<float>::infinity();

  const std::vector<float>& keys(const Kernels& kernels, const std::vector<float>& values,
                                 std::vector<float>* buffer) const {
    if (extra.empty()) return values;
    buffer->resize(values.size());
    kernels.add(values.data(), extra.data(), static_cast<int64_t>(values.size()), buffer->data());
    return *buffer;
  }

  // Takes rows [first, last) of plane 0 whose key is above bar. `room` holds last - first indices.
  void take(const Kernels& kernels, const Columns& columns, int64_t first, int64_t last, float bar, int64_t* room) {
    std::vector<float> buffer;
    const float* keys = columns.keys(kernels, columns.upper, first, last, &buffer);
    const int64_t n = kernels.select(keys, 0, last - first, bar, room, &dropped);
    for (int64_t j = 0; j < n; ++j) {
      const int64_t row = first + room[j];
      rows.push_back(row);
      centre.push_back(columns.centre[row]);
      upper.push_back(columns.upper[row]);
      if (columns.extra) extra.push_back(columns.extra[row]);
    }
  }

  // Drops the rows whose key is not above bar.
  void select(const Kernels& kernels, float bar) {
    std::vector<float> buffer;
    std::vector<int64_t> keep(rows.size());
    keep.resize(static_cast<size_t>(kernels.select(keys(kernels, upper, &buffer).data(), 0,
                                                   static_cast<int64_t>(rows.size()), bar, keep.data(), &dropped)));
    for (size_t j = 0; j < keep.size(); ++j) {
      const size_t at = static_cast<size_t>(keep[j]);
      rows[j] = rows[at];
      centre[j] = centre[at];
      upper[j] = upper[at];
      if (!extra.empty()) extra[j] = extra[at];
    }
    rows.resize(keep.size());
    centre.resize(keep.size());
    upper.resize(keep.size());
    if (!extra.empty()) extra.resize(keep.size());
  }

  void take(const Sifted& more) {
    rows.assign(more.rows, more.rows + more.n);
    centre.assign(more.centre, more.centre + more.n);
    upper.assign(more.upper, more.upper + more.n);
    dropped = more.dropped;
  }

  void append(const Left& more) {
    rows.insert(rows.end(), more.rows.begin(), more.rows.end());
    centre.insert(centre.end(), more.centre.begin(), more.centre.end());
    upper.insert(upper.end(), more.upper.begin(), more.upper.end());
    extra.insert(extra.end(), more.extra.begin(), more.extra.end());
    dropped = std::max(dropped, more.dropped);
  }
};

// What plane 0 has left of a range of rows, refined by one plane after another; `counts` gets how many each leaves.
void Cascade::descend(const Kernels& kernels, const Prepared& state, const Race* race, float bar, Left* left,
                      int64_t* counts) const {
  std::vector<int64_t>& rows = left->rows;
  counts[0] = static_cast<int64_t>(rows.size());
  std::vector<float> start;
  for (size_t i = 1; i < spec_.planes.size(); ++i) {
    start = left->centre;
    kernels.refine(spec_.planes[i].plane, state.planes[i], rows.data(), start.data(), 0,
                   static_cast<int64_t>(rows.size()), left->centre.data(), left->upper.data());
    left->select(kernels, bar);
    counts[i] = static_cast<int64_t>(rows.size());
  }
  if (race) {  // the noise itself in place of its bound, for the few rows that are left
    for (size_t j = 0; j < rows.size(); ++j) left->extra[j] = noise_above(*race, rows[j], left->extra[j]);
    left->select(kernels, bar);
  }
}

// The best-looking rows of the last plane give a better threshold; the rows that reach it are scored.
void Cascade::finish(const Kernels& kernels, const Team& team, const double* h, const Race* race, const Margin* margin,
                     Left left, int64_t k, int64_t budget, StepResult* out) const {
  std::vector<int64_t> best;
  std::vector<float> buffer;
  top_values(kernels, left.keys(kernels, left.centre, &buffer).data(), 0, static_cast<int64_t>(left.rows.size()), k,
             &best);
  for (int64_t& at : best) at = left.rows[static_cast<size_t>(at)];
  score(kernels, Team{}, h, race, k, std::move(best), out);
  left.select(kernels, bar_of(*out, margin));
  out->survivors.back() = static_cast<int64_t>(left.rows.size());
  out->max_unopened = static_cast<double>(left.dropped);
  out->within_budget = out->survivors.back() <= budget;
  if (out->within_budget) score(kernels, team, h, race, k, std::move(left.rows), out);
}

// The lock is only tried: a forked child may find it held by a thread that it does not have.
std::unique_ptr<Cascade::Scratch> Cascade::borrow(size_t size) const {
  std::unique_ptr<Scratch> scratch;
  {
    std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (lock.owns_lock() && !idle_.empty()) {
      scratch = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  if (!scratch) scratch = std::make_unique<Scratch>();
  if (scratch->centre.size() < size) {
    scratch->centre.resize(size);
    scratch->upper.resize(size);
  }
  return scratch;
}

void Cascade::give_back(std::unique_ptr<Scratch> scratch) const {
  std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (lock.owns_lock() && idle_.size() < 4) idle_.push_back(std::move(scratch));
}

std::vector<StepResult> Cascade::scan(const Kernels& kernels, const Team& team, const double* h, int n_states, int64_t k,
                                      int64_t spare, int64_t budget, const Race* races, const Margin* margins,
                                      const int64_t* guesses) {
  const CascadeSpec& s = spec_;
  const Plane& plane = s.planes[0].plane;
  Session session(team);
  const int64_t n_rows = plane.rows, blocks = (n_rows + kInterleave - 1) / kInterleave;
  std::vector<Prepared> states = prepare(kernels, team, h, n_states);
  std::vector<StepResult> out(states.size());
  std::vector<PlaneState> first_plane;
  std::vector<int> live, known;  // states without and with a guess
  auto guess_of = [&](int64_t b) {  // in rising order; none where one is missing or there twice
    std::vector<int64_t> ids(guesses + b * k, guesses + (b + 1) * k);
    std::sort(ids.begin(), ids.end());
    if (ids[0] < 0 || std::adjacent_find(ids.begin(), ids.end()) != ids.end()) ids.clear();
    return ids;
  };
  for (int b = 0; b < n_states; ++b) {
    StepResult& result = out[static_cast<size_t>(b)];
    const Prepared& state = states[static_cast<size_t>(b)];
    result.threshold = result.max_unopened = -kInfinity;
    result.energy = state.energy;
    result.finite = state.finite;
    result.within_budget = false;
    result.bytes_read = 0;
    result.vanishing = state.vanishing;
    if (!result.finite || result.vanishing) continue;
    if (guesses && !guess_of(b).empty()) {
      known.push_back(b);
    } else {
      live.push_back(b);
      first_plane.push_back(state.planes[0]);
    }
  }
  const int64_t n_open = static_cast<int64_t>(live.size()), n_known = static_cast<int64_t>(known.size());
  live.insert(live.end(), known.begin(), known.end());
  const int64_t n_live = n_open + n_known;
  if (n_live == 0) return out;

  std::unique_ptr<Scratch> scratch = borrow(static_cast<size_t>(n_open * n_rows));
  float *centre = scratch->centre.data(), *upper = scratch->upper.data(), *extra = nullptr;
  if (races) {
    if (scratch->extra.size() < scratch->centre.size()) scratch->extra.resize(scratch->centre.size());
    extra = scratch->extra.data();
  }
  auto at = [&](int64_t i) { return static_cast<size_t>(live[static_cast<size_t>(i)]); };
  auto race_of = [&](int64_t i) { return races ? races + at(i) : nullptr; };
  auto margin_of = [&](int64_t i) { return margins ? margins + at(i) : nullptr; };
  auto columns = [&](int64_t i) {
    return Columns{centre + i * n_rows, upper + i * n_rows, extra ? extra + i * n_rows : nullptr};
  };

  // A task takes a range of rows for all states, so what one state has brought in is at hand for the next.
  constexpr int64_t kRange = 4096;
  const int64_t ranges = (n_rows + kRange - 1) / kRange;
  std::vector<Left> left(static_cast<size_t>(ranges * n_live));
  auto left_of = [&](int64_t i, int64_t range) { return &left[static_cast<size_t>(i * ranges + range)]; };

  // Every code of plane 0 is read once, whatever the batch; each task also keeps the best-looking rows of its range.
  const int64_t lead = k + spare;
  std::vector<std::vector<std::pair<float, int64_t>>> leaders(live.size());
  std::mutex mutex;
  if (n_open) {
    parallel_ranges(team, blocks, 64, [&](int64_t first, int64_t last) {
      kernels.screen(plane, first_plane.data(), static_cast<int>(n_open), nullptr, first, last, centre, upper, n_rows);
      const int64_t from = first * kInterleave, to = std::min(n_rows, last * kInterleave);
      std::vector<float> buffer;
      std::vector<int64_t> found;
      for (int64_t i = 0; i < n_open; ++i) {
        const Race* race = race_of(i);
        if (race) kernels.noise(race->key, raised(race->temperature), from, to - from, extra + i * n_rows + from);
        const float* looks = columns(i).keys(kernels, centre + i * n_rows, from, to, &buffer);
        found.clear();
        top_values(kernels, looks, 0, to - from, lead, &found);
        std::lock_guard<std::mutex> lock(mutex);
        for (int64_t row : found) leaders[static_cast<size_t>(i)].emplace_back(looks[row], from + row);
      }
    });
  }
  if (n_known) {  // the k-th score of a guess is a bar for all rows
    std::vector<Sieve> sieves(known.size());
    parallel(team, n_known, [&](int64_t i) {
      const size_t b = at(n_open + i);
      score(kernels, Team{}, h + static_cast<int64_t>(b) * s.rows.width, nullptr, k, guess_of(static_cast<int64_t>(b)),
            &out[b]);
      sieves[static_cast<size_t>(i)] = sieve_of(plane, states[b].planes[0], bar_of(out[b], nullptr));
    });
    parallel(team, ranges, [&](int64_t range) {
      const Room room(n_known * kRange);
      std::vector<Sifted> sifted;
      for (int64_t i = 0; i < n_known; ++i) sifted.push_back(room.of(i * kRange));
      kernels.sift(plane, sieves.data(), static_cast<int>(n_known), range * kRange / kInterleave,
                   std::min(blocks, (range + 1) * kRange / kInterleave), sifted.data());
      std::vector<int64_t> found;
      for (int64_t i = 0; i < n_known; ++i) {
        Left* to = left_of(n_open + i, range);
        to->take(sifted[static_cast<size_t>(i)]);
        found.clear();
        top_values(kernels, to->centre.data(), 0, static_cast<int64_t>(to->rows.size()), lead, &found);
        std::lock_guard<std::mutex> lock(mutex);
        for (int64_t j : found)
          leaders[static_cast<size_t>(n_open + i)].emplace_back(to->centre[static_cast<size_t>(j)],
                                                                to->rows[static_cast<size_t>(j)]);
      }
    });
  }
  parallel(team, n_live, [&](int64_t i) {
    auto& best = leaders[static_cast<size_t>(i)];
    std::sort(best.begin(), best.end(),
              [](const auto& x, const auto& y) { return x.first > y.first || (x.first == y.first && x.second < y.second); });
    std::vector<int64_t> ids;
    for (size_t j = 0; j < best.size() && static_cast<int64_t>(j) < lead; ++j) ids.push_back(best[j].second);
    score(kernels, Team{}, h + live[static_cast<size_t>(i)] * s.rows.width, race_of(i), k, std::move(ids), &out[at(i)]);
  });

  const size_t planes = s.planes.size();
  std::vector<int64_t> counts(left.size() * planes);
  parallel(team, ranges, [&](int64_t range) {
    const Room room(n_open ? kRange : 0);
    for (int64_t i = 0; i < n_live; ++i) {
      Left* some = left_of(i, range);
      const float bar = bar_of(out[at(i)], margin_of(i));
      if (i < n_open)
        some->take(kernels, columns(i), range * kRange, std::min(n_rows, (range + 1) * kRange), bar, room.rows);
      else
        some->select(kernels, bar);
      descend(kernels, states[at(i)], race_of(i), bar, some, &counts[static_cast<size_t>(i * ranges + range) * planes]);
    }
  });
  parallel(n_live > 1 ? team : Team{}, n_live, [&](int64_t i) {
    Left all;
    std::vector<int64_t>& survivors = out[at(i)].survivors;
    survivors.resize(planes);
    for (int64_t range = 0; range < ranges; ++range) {
      all.append(*left_of(i, range));
      for (size_t p = 0; p < planes; ++p) survivors[p] += counts[static_cast<size_t>(i * ranges + range) * planes + p];
    }
    finish(kernels, n_live > 1 ? Team{} : team, h + live[static_cast<size_t>(i)] * s.rows.width, race_of(i),
           margin_of(i), std::move(all), k, budget, &out[at(i)]);
  });
  const int64_t row_bytes = s.rows.bytes();
  const double once = static_cast<double>(s.dims * s.transform.bytes() + s.mean.bytes() + s.row_bytes(0) * n_rows) /
                      static_cast<double>(n_live);
  for (int b : live) {
    StepResult& result = out[static_cast<size_t>(b)];
    int64_t bytes = static_cast<int64_t>(result.scored.ids.size()) * row_bytes;
    for (size_t i = 1; i < s.planes.size(); ++i) bytes += result.survivors[i - 1] * s.row_bytes(i);
    result.bytes_read = static_cast<int64_t>(std::nearbyint(once + static_cast<double>(bytes)));
  }
  give_back(std::move(scratch));
  return out;
}

}  // namespace csv_decode
