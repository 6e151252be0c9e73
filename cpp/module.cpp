// The Python face of the kernels: it checks shapes and bounds, releases the GIL and splits the work over threads.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "cascade.hpp"
#include "ledger.hpp"
#include "plane.hpp"
#include "pool.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace csv_decode {
namespace {

template <typename T, int Dims>
using In = nb::ndarray<const T, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;
template <typename T, int Dims>
using Out = nb::ndarray<T, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;

constexpr int kParameters = 10;  // half_scale, offset, constant, norm[4], base, slack, start_slack

void expect(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

std::vector<std::string> supported() {
  std::vector<std::string> names = {"generic"};
#if defined(CSV_DECODE_X86)
  __builtin_cpu_init();  // checks cpuid and, through xgetbv, the operating system
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
    names.push_back("avx2");
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
      names.push_back("avx512bw");
      if (__builtin_cpu_supports("avx512vnni")) names.push_back("avx512");
    }
  }
#endif
  return names;
}

const Kernels* find(const std::string& name) {
  auto names = supported();
  if (std::find(names.begin(), names.end(), name) == names.end())
    throw std::invalid_argument("this processor cannot run the kernels '" + name + "'");
#if defined(CSV_DECODE_X86)
  if (name == "avx2") return &avx2_kernels;
  if (name == "avx512bw") return &avx512bw_kernels;
  if (name == "avx512") return &avx512_kernels;
#endif
  return &generic_kernels;
}

// A plane whose arrays have been checked; it keeps them alive.
class BoundPlane {
 public:
  BoundPlane(In<uint32_t, 2> words, In<uint16_t, 1> rho, std::optional<In<float, 1>> bias, In<int32_t, 2> segments)
      : words_(words), rho_(rho), bias_(bias) {
    plane_.words = words.data();
    plane_.rho = rho.data();
    plane_.bias = bias ? bias->data() : nullptr;
    plane_.rows = static_cast<int64_t>(rho.shape(0));
    plane_.words_per_row = static_cast<int32_t>(words.shape(1));
    expect(!bias || bias->shape(0) == rho.shape(0), "bias and rho differ in length");
    expect(segments.shape(0) <= kMaxSegments && segments.shape(1) == 2, "segments must be at most 4 pairs");
    plane_.n_segments = static_cast<int32_t>(segments.shape(0));
    int64_t used = 1;
    for (int i = 0; i < plane_.n_segments; ++i) {
      int32_t bits = segments(i, 0), count = segments(i, 1);
      expect(bits >= 1 && bits <= 4, "fields have 1 to 4 bits");
      expect(count > 0, "segments have at least one word");
      expect(bits != 3 || count % 3 == 0, "fields of 3 bits fill three words at a time");
      plane_.segments[i] = {bits, count};
      by_rows_ = by_rows_ && bits != 3;
      used += count;
      slots_ += plane_.segments[i].slots();
    }
    expect(used == plane_.words_per_row, "segments do not fill the words of a row");
    expect(slots_ <= 65536, "more slots than the rounding analysis covers");
    int64_t stored = static_cast<int64_t>(words.shape(0));
    expect(stored >= plane_.rows, "fewer code rows than rows");
  }

  const Plane& plane() const { return plane_; }
  int64_t slots() const { return slots_; }
  bool by_rows() const { return by_rows_; }  // whether `refine` can read it
  int64_t stored() const { return static_cast<int64_t>(words_.shape(0)); }

 private:
  In<uint32_t, 2> words_;
  In<uint16_t, 1> rho_;
  std::optional<In<float, 1>> bias_;
  Plane plane_{};
  int64_t slots_ = 0;
  bool by_rows_ = true;
};

std::vector<PlaneState> states_of(const BoundPlane& plane, In<int8_t, 2> hi, In<int8_t, 2> lo, In<double, 2> params) {
  size_t n = params.shape(0);
  expect(params.shape(1) == kParameters, "ten parameters a state");
  expect(hi.shape(0) == n && lo.shape(0) == n, "halves and parameters differ in number");
  expect(static_cast<int64_t>(hi.shape(1)) == plane.slots() && hi.shape(1) == lo.shape(1), "a state byte a slot");
  std::vector<PlaneState> out(n);
  for (size_t b = 0; b < n; ++b) {
    const double* p = params.data() + b * kParameters;
    out[b].hi = hi.data() + b * hi.shape(1);
    out[b].lo = lo.data() + b * lo.shape(1);
    out[b].half_scale = p[0];
    out[b].offset = p[1];
    out[b].constant = p[2];
    for (int g = 0; g < kGroups; ++g) out[b].norm[g] = p[3 + g];
    out[b].base = p[7];
    out[b].slack = p[8];
    out[b].start_slack = p[9];
  }
  return out;
}

void screen(const std::string& isa, const Team& team, const BoundPlane& bound, In<int8_t, 2> hi, In<int8_t, 2> lo,
            In<double, 2> params, std::optional<In<uint8_t, 1>> open, Out<float, 2> centre, Out<float, 2> upper) {
  const Kernels* kernels = find(isa);
  const Plane& plane = bound.plane();
  auto states = states_of(bound, hi, lo, params);
  int64_t blocks = (plane.rows + kInterleave - 1) / kInterleave;
  expect(bound.stored() == blocks * kInterleave, "plane 0 stores whole blocks of 16 rows");
  expect(centre.shape(0) == states.size() && upper.shape(0) == states.size(), "one output row a state");
  expect(static_cast<int64_t>(centre.shape(1)) == plane.rows && centre.shape(1) == upper.shape(1),
         "one output column a row");
  expect(!open || static_cast<int64_t>(open->shape(0)) == blocks, "one open byte a block");
  nb::gil_scoped_release release;
  parallel_ranges(team, blocks, 64, [&](int64_t first, int64_t last) {
    kernels->screen(plane, states.data(), static_cast<int>(states.size()), open ? open->data() : nullptr, first, last,
                    centre.data(), upper.data(), plane.rows);
  });
}

void refine(const std::string& isa, const Team& team, const BoundPlane& bound, In<int8_t, 2> hi, In<int8_t, 2> lo,
            In<double, 2> params, In<int64_t, 1> rows, In<float, 1> start, Out<float, 1> centre, Out<float, 1> upper) {
  const Kernels* kernels = find(isa);
  auto states = states_of(bound, hi, lo, params);
  int64_t n = static_cast<int64_t>(rows.shape(0));
  expect(states.size() == 1, "one state at a time");
  expect(bound.by_rows(), "fields of 3 bits are for plane 0");
  expect(start.shape(0) == rows.shape(0) && centre.shape(0) == rows.shape(0) && upper.shape(0) == rows.shape(0),
         "one entry a row");
  for (int64_t i = 0; i < n; ++i)
    if (rows(i) < 0 || rows(i) >= bound.plane().rows) throw std::out_of_range("row outside the plane");
  nb::gil_scoped_release release;
  parallel_ranges(team, n, 256, [&](int64_t first, int64_t last) {
    kernels->refine(bound.plane(), states[0], rows.data(), start.data(), first, last, centre.data(), upper.data());
  });
}

using AnyRows = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Rows of numbers, or of blocks of bytes.
Rows rows_of(const AnyRows& rows, int type) {
  expect(type >= 0 && type < kRowTypes, "no such row type");
  const BlockFormat& format = kBlocks[type];
  const bool packed = format.numbers > 1;
  expect(static_cast<int64_t>(rows.itemsize()) == (packed ? 1 : format.bytes), "row type and item size differ");
  const int64_t count = static_cast<int64_t>(rows.shape(1));
  expect(!packed || count % format.bytes == 0, "a row is no whole number of blocks");
  return {rows.data(), static_cast<RowType>(type), packed ? count / format.bytes * format.numbers : count};
}

void score(const std::string& isa, const Team& team, AnyRows rows, int type, std::optional<In<int64_t, 1>> ids, In<double, 2> h, Out<double, 2> value,
           Out<double, 2> magnitude) {
  const Kernels* kernels = find(isa);
  const Rows view = rows_of(rows, type);
  expect(view.width == static_cast<int64_t>(h.shape(1)), "rows and states differ in width");
  int64_t n = static_cast<int64_t>(ids ? ids->shape(0) : rows.shape(0));
  expect(value.shape(0) == h.shape(0) && magnitude.shape(0) == h.shape(0), "one output row a state");
  expect(static_cast<int64_t>(value.shape(1)) == n && static_cast<int64_t>(magnitude.shape(1)) == n,
         "one output column a row");
  if (ids)
    for (int64_t i = 0; i < n; ++i)
      if ((*ids)(i) < 0 || (*ids)(i) >= static_cast<int64_t>(rows.shape(0)))
        throw std::out_of_range("row outside the weights");
  nb::gil_scoped_release release;
  parallel_ranges(team, n, 32, [&](int64_t first, int64_t last) {
    kernels->score(view, ids ? ids->data() : nullptr, first, last, h.data(), static_cast<int>(h.shape(0)),
                   value.data(), magnitude.data(), n);
  });
}

using Ids = nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>;

Ids to_numpy(std::vector<int64_t> ids) {
  auto* held = new std::vector<int64_t>(std::move(ids));
  nb::capsule owner(held, [](void* p) noexcept { delete static_cast<std::vector<int64_t>*>(p); });
  return Ids(held->data(), {held->size()}, owner);
}

// The m largest values: larger first, then the smaller index. NaN is skipped.
Ids leaders(const std::string& isa, const Team& team, In<float, 1> values, int64_t m) {
  const Kernels* kernels = find(isa);
  int64_t n = static_cast<int64_t>(values.shape(0));
  m = std::max<int64_t>(0, std::min(m, n));
  const float* v = values.data();
  auto before = [v](int64_t a, int64_t b) { return v[a] > v[b] || (v[a] == v[b] && a < b); };
  std::vector<int64_t> all;
  std::mutex mutex;
  {
    nb::gil_scoped_release release;
    parallel_ranges(team, n, 16384, [&](int64_t first, int64_t last) {
      std::vector<int64_t> found;
      top_values(*kernels, v, first, last, m, &found);
      std::lock_guard<std::mutex> lock(mutex);
      all.insert(all.end(), found.begin(), found.end());
    });
    std::sort(all.begin(), all.end(), before);
    if (static_cast<int64_t>(all.size()) > m) all.resize(static_cast<size_t>(m));
  }
  return to_numpy(std::move(all));
}

// Indices with !(value <= bar) in rising order, and the largest of the others (-inf without any).
std::tuple<Ids, float> select_above(const std::string& isa, In<float, 1> values, float bar) {
  const Kernels* kernels = find(isa);
  int64_t n = static_cast<int64_t>(values.shape(0));
  float dropped = -std::numeric_limits<float>::infinity();
  std::vector<int64_t> ids;
  {
    nb::gil_scoped_release release;
    constexpr int64_t kStep = 4096;
    int64_t buffer[kStep];
    for (int64_t first = 0; first < n; first += kStep) {
      int64_t count = kernels->select(values.data(), first, std::min(n, first + kStep), bar, buffer, &dropped);
      ids.insert(ids.end(), buffer, buffer + count);
    }
  }
  return {to_numpy(std::move(ids)), dropped};
}

using Values = nb::ndarray<nb::numpy, double, nb::ndim<1>>;

Values to_numpy(std::vector<double> values) {
  auto* held = new std::vector<double>(std::move(values));
  nb::capsule owner(held, [](void* p) noexcept { delete static_cast<std::vector<double>*>(p); });
  return Values(held->data(), {held->size()}, owner);
}

nb::ndarray<nb::numpy, float, nb::ndim<1>> to_numpy(std::vector<float> values) {
  auto* held = new std::vector<float>(std::move(values));
  nb::capsule owner(held, [](void* p) noexcept { delete static_cast<std::vector<float>*>(p); });
  return {held->data(), {held->size()}, owner};
}

// For each state the rows of plane 0 above its bar, their centre and upper, and what bounds the others.
nb::list sift(const std::string& isa, const BoundPlane& bound, In<int8_t, 2> hi, In<int8_t, 2> lo,
              In<double, 2> params, In<float, 1> bars) {
  const Kernels* kernels = find(isa);
  const Plane& plane = bound.plane();
  auto states = states_of(bound, hi, lo, params);
  const size_t n_states = states.size();
  const size_t room = static_cast<size_t>(bound.stored());
  expect(room % kInterleave == 0 && static_cast<int64_t>(room) - plane.rows < kInterleave,
         "plane 0 stores whole blocks of 16 rows");
  expect(bars.shape(0) == n_states, "one bar a state");
  std::vector<std::vector<int64_t>> rows(n_states);
  std::vector<std::vector<float>> centre(n_states), upper(n_states);
  std::vector<Sifted> out;
  {
    nb::gil_scoped_release release;
    std::vector<Sieve> sieves;
    for (size_t b = 0; b < n_states; ++b) {
      sieves.push_back(sieve_of(plane, states[b], bars(b)));
      rows[b].resize(room);
      centre[b].resize(room);
      upper[b].resize(room);
      out.push_back({rows[b].data(), centre[b].data(), upper[b].data(), 0, -std::numeric_limits<float>::infinity()});
    }
    kernels->sift(plane, sieves.data(), static_cast<int>(n_states), 0, static_cast<int64_t>(room) / kInterleave,
                  out.data());
  }
  nb::list found;
  for (size_t b = 0; b < n_states; ++b) {
    const size_t n = static_cast<size_t>(out[b].n);
    rows[b].resize(n);
    centre[b].resize(n);
    upper[b].resize(n);
    found.append(nb::make_tuple(to_numpy(std::move(rows[b])), to_numpy(std::move(centre[b])),
                                to_numpy(std::move(upper[b])), static_cast<double>(out[b].dropped)));
  }
  return found;
}

// A plane with its slots: dimension, step and cmax of each, and the units of the radii.
using PlaneParts = std::tuple<BoundPlane*, In<int32_t, 1>, In<double, 1>, In<double, 1>, In<double, 1>>;
template <typename T, typename Get>
nb::object column(const std::vector<StepResult>& steps, Get get) {
  std::vector<T> values;
  for (const StepResult& step : steps) values.push_back(get(step));
  return nb::cast(to_numpy(std::move(values)));
}

template <typename T, typename Get>
nb::object table(const std::vector<StepResult>& steps, size_t width, Get get) {
  auto* held = new std::vector<T>;
  nb::capsule owner(held, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  for (const StepResult& step : steps) {
    const std::vector<T>& row = get(step);
    held->insert(held->end(), row.begin(), row.begin() + static_cast<std::ptrdiff_t>(width));
  }
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<2>>(held->data(), {steps.size(), width}, owner));
}

nb::object columns(const std::vector<StepResult>& steps, size_t k) {
  using S = const StepResult&;
  return nb::make_tuple(
      table<int64_t>(steps, k, [](S s) -> const std::vector<int64_t>& { return s.scored.ids; }),
      table<double>(steps, k, [](S s) -> const std::vector<double>& { return s.scored.value; }),
      column<double>(steps, [](S s) { return *std::max_element(s.scored.error.begin(), s.scored.error.end()); }),
      column<double>(steps, [](S s) { return s.threshold; }),
      column<double>(steps, [](S s) { return s.max_unopened; }),
      column<int64_t>(steps, [](S s) { return s.rows_scored; }),
      table<int64_t>(steps, steps[0].survivors.size(), [](S s) -> const std::vector<int64_t>& { return s.survivors; }),
      column<int64_t>(steps, [](S s) { return s.bytes_read; }),
      column<double>(steps, [](S s) { return s.energy; }));
}

NoiseKey noise_key(uint64_t seed, uint32_t stream, uint32_t position) {
  return {{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)}, position, stream};
}

Race race_key(uint64_t seed, int64_t stream, int64_t position, double temperature) {
  expect(temperature > 0 && temperature < 1e32, "temperature out of range");
  expect(stream >= 0 && stream < int64_t{1} << 32 && position >= 0 && position < int64_t{1} << 32,
         "stream and position have 32 bits");
  return {noise_key(seed, static_cast<uint32_t>(stream), static_cast<uint32_t>(position)), temperature};
}

// Seeds, streams, positions and temperatures, one for each state.
using Races = std::tuple<In<uint64_t, 1>, In<int64_t, 1>, In<int64_t, 1>, In<double, 1>>;

std::vector<Race> race_keys(const std::optional<Races>& races, size_t n_states, bool some) {
  std::vector<Race> out;
  if (!races) return out;
  const auto& [seed, stream, position, temperature] = *races;
  for (size_t n : {seed.shape(0), stream.shape(0), position.shape(0), temperature.shape(0)})
    expect(n == n_states, "one race a state");
  for (size_t b = 0; b < n_states; ++b)
    out.push_back(some && temperature(b) == 0 ? Race{} : race_key(seed(b), stream(b), position(b), temperature(b)));
  return out;
}

class BoundCascade {
 public:
  BoundCascade(std::vector<PlaneParts> planes, AnyRows rows, int type, std::optional<In<float, 1>> bias,
               AnyRows transform, int transform_type, In<float, 2> mean, In<int64_t, 1> edges, double delta,
               double energy, double rotation_error, In<double, 2> typical, double sigma)
      : rows_(rows), bias_(bias), transform_(transform), mean_(mean) {
    CascadeSpec s{};
    s.rows = rows_of(rows, type);
    s.bias = bias ? bias->data() : nullptr;
    s.transform = rows_of(transform, transform_type);
    s.mean = {mean.data(), RowType::float32, s.rows.width};
    s.dims = static_cast<int64_t>(transform.shape(0));
    s.delta = delta;
    s.energy = energy;
    s.rotation_error = rotation_error;
    s.sigma = sigma;
    expect(s.transform.width == s.rows.width && static_cast<int64_t>(mean.shape(1)) == s.rows.width && mean.shape(0) == 1,
           "transform, mean and rows differ in width");
    expect(!bias || bias->shape(0) >= rows.shape(0), "fewer biases than rows");
    s.groups = static_cast<int>(edges.shape(0)) - 1;
    expect(s.groups == (sigma > 0 ? kGroups - 1 : kGroups), "one edge more than groups");
    for (int g = 0; g <= s.groups; ++g) s.edges[g] = edges(g);
    for (int g = 0; g < s.groups; ++g) expect(s.edges[g] <= s.edges[g + 1], "group edges fall");
    expect(s.edges[0] == 0 && s.edges[s.groups] == (sigma > 0 ? s.rows.width : s.dims),
           "groups do not cover the dimensions");
    expect(!planes.empty(), "a cascade has at least one plane");
    expect(typical.shape(0) == planes.size() && typical.shape(1) == kGroups - 1, "typical has a row for each plane");
    for (auto& [bound, dim, step, cmax, radius_step] : planes) {
      CascadePlane plane{};
      plane.plane = bound->plane();
      expect(s.planes.empty() || bound->by_rows(), "fields of 3 bits are for plane 0");
      size_t slots = static_cast<size_t>(bound->slots());
      expect(dim.shape(0) == slots && step.shape(0) == slots && cmax.shape(0) == slots, "one entry a slot");
      expect(radius_step.shape(0) == kGroups, "one radius step a group");
      for (size_t j = 0; j < slots; ++j) expect(dim(j) >= 0 && dim(j) < s.dims, "slot outside the transform");
      plane.dim.assign(dim.data(), dim.data() + slots);
      plane.step.assign(step.data(), step.data() + slots);
      plane.cmax.assign(cmax.data(), cmax.data() + slots);
      for (int g = 0; g < kGroups; ++g) plane.radius_step[g] = radius_step(g);
      for (int g = 0; g < kGroups - 1; ++g) plane.typical[g] = typical(s.planes.size(), g);
      expect(plane.plane.rows == (s.planes.empty() ? plane.plane.rows : s.planes[0].plane.rows),
             "planes differ in rows");
      held_.push_back(nb::find(bound));
      s.planes.push_back(std::move(plane));
    }
    int64_t n = s.planes[0].plane.rows;
    expect(n <= static_cast<int64_t>(rows.shape(0)), "more index rows than weights");
    cascade_ = std::make_unique<Cascade>(std::move(s));
  }

  // None where a state holds NaN, infinity or more than float32 can. Else, where every state has a clear answer from the
  // codes, its columns (ids, values, largest errors, thresholds, max_unopened, rows scored, survivors, bytes read,
  // energies); else for each state ids, values, errors, clear, rows scored, threshold, max_unopened, energy, survivors,
  // bytes read, vanishing, finite, within budget.
  // seed, stream, position and temperature of each state make its k first of a race, with the values of their scores.
  // A margin, relative to the k-th and absolute for each state, is scored as well, and all that was scored is returned.
  // guess: k rows of each state that may be the best ones, -1 in a state without.
  nb::object scan(const std::string& isa, const Team& team, In<double, 2> h, int64_t k, int64_t spare, int64_t budget,
                  std::optional<Races> race,
                  std::optional<std::tuple<double, In<double, 1>>> margin, std::optional<In<int64_t, 2>> guess) {
    const Kernels* kernels = find(isa);
    expect(static_cast<int64_t>(h.shape(1)) == cascade_->spec().rows.width, "rows and states differ in width");
    expect(k >= 1, "k is at least 1");
    for (size_t i = 0; i < h.size(); ++i)
      if (!(std::fabs(h.data()[i]) <= std::numeric_limits<float>::max())) return nb::none();
    const std::vector<Race> races = race_keys(race, h.shape(0), false);
    std::vector<Margin> margins;
    if (margin) {
      expect(std::get<1>(*margin).shape(0) == h.shape(0), "one margin a state");
      for (size_t b = 0; b < h.shape(0); ++b) margins.push_back({std::get<0>(*margin), std::get<1>(*margin)(b)});
    }
    expect(!guess || (guess->shape(0) == h.shape(0) && static_cast<int64_t>(guess->shape(1)) == k), "k guesses a state");
    expect(!guess || (!race && !margin), "guesses are for the k largest scores");
    for (size_t i = 0; guess && i < guess->size(); ++i)
      if (guess->data()[i] >= n_rows()) throw std::out_of_range("row outside the weights");
    std::vector<StepResult> steps;
    {
      nb::gil_scoped_release release;
      steps = cascade_->scan(*kernels, team, h.data(), static_cast<int>(h.shape(0)), k, spare, budget,
                             race ? races.data() : nullptr, margin ? margins.data() : nullptr, guess ? guess->data() : nullptr);
      for (StepResult& step : steps) {
        if (margin) {
          step.rows_scored = static_cast<int64_t>(step.scored.ids.size());
          step.clear = false;
        } else {
          sort_if_clear(&step, k);
        }
      }
    }
    bool clear = true;
    for (const StepResult& step : steps) clear = clear && step.clear && step.within_budget;
    if (clear) return columns(steps, static_cast<size_t>(k));
    nb::list out;
    for (StepResult& step : steps)
      out.append(nb::make_tuple(to_numpy(std::move(step.scored.ids)), to_numpy(std::move(step.scored.value)),
                                to_numpy(std::move(step.scored.error)), step.clear, step.rows_scored, step.threshold,
                                step.max_unopened, step.energy, step.survivors, step.bytes_read, step.vanishing,
                                step.finite, step.within_budget));
    return out;
  }

  const Cascade& cascade() const { return *cascade_; }
  int64_t n_rows() const { return cascade_->spec().planes[0].plane.rows; }

 private:
  AnyRows rows_;
  std::optional<In<float, 1>> bias_;
  AnyRows transform_;
  In<float, 2> mean_;
  std::vector<nb::object> held_;
  std::unique_ptr<Cascade> cascade_;
};

// See ledger.hpp. One caller at a time.
class BoundLedger {
 public:
  // Temperature 0 in `race`: the state has none.
  BoundLedger(const BoundCascade& cascade, const std::string& isa, const Team& team, In<double, 2> h,
              std::optional<Races> race)
      : n_rows_(cascade.n_rows()),
        n_states_(static_cast<int64_t>(h.shape(0))),
        n_planes_(static_cast<int64_t>(cascade.cascade().spec().planes.size())) {
    const Kernels* kernels = find(isa);
    expect(static_cast<int64_t>(h.shape(1)) == cascade.cascade().spec().rows.width, "rows and states differ in width");
    const std::vector<Race> races = race_keys(race, h.shape(0), true);
    nb::gil_scoped_release release;
    ledger_ = std::make_unique<Ledger>(cascade.cascade(), *kernels, team, h.data(), static_cast<int>(n_states_),
                                       race ? races.data() : nullptr);
  }

  bool usable(int64_t b) const { return ledger_->usable(state(b)); }
  bool vanishing(int64_t b) const { return ledger_->vanishing(state(b)); }
  double energy(int64_t b) const { return ledger_->energy(state(b)); }
  int64_t rows_at(int64_t b, int64_t plane) const {
    expect(plane >= 0 && plane < n_planes_, "no such plane");
    return ledger_->rows_at(state(b), static_cast<int>(plane));
  }

  void allow(int64_t b, In<uint32_t, 1> words) {
    const int at = live(b);
    expect(static_cast<int64_t>(words.shape(0)) * 32 >= n_rows_, "fewer bits than rows");
    nb::gil_scoped_release release;
    ledger_->allow(at, words.data());
  }

  Ids leaders(int64_t b, int64_t count, bool plain) const {
    const int at = live(b);
    std::vector<int64_t> found;
    {
      nb::gil_scoped_release release;
      found = ledger_->leaders(at, count, plain);
    }
    return to_numpy(std::move(found));
  }

  nb::tuple score(int64_t b, In<int64_t, 1> ids) {
    const int at = state(b);
    for (size_t i = 0; i < ids.shape(0); ++i)
      if (ids(i) < 0 || ids(i) >= n_rows_) throw std::out_of_range("row outside the weights");
    std::vector<double> value(ids.shape(0)), error(ids.shape(0));
    {
      nb::gil_scoped_release release;
      ledger_->score(at, ids.data(), static_cast<int64_t>(ids.shape(0)), value.data(), error.data());
    }
    return nb::make_tuple(to_numpy(std::move(value)), to_numpy(std::move(error)));
  }

  nb::list open(In<double, 1> bars, In<double, 1> exact, bool plain) {
    expect(static_cast<int64_t>(bars.shape(0)) == n_states_ && static_cast<int64_t>(exact.shape(0)) == n_states_, "one bar a state");
    std::vector<std::vector<int64_t>> rows;
    {
      nb::gil_scoped_release release;
      rows = ledger_->open(bars.data(), exact.data(), plain);
    }
    nb::list out;
    for (auto& ids : rows) out.append(to_numpy(std::move(ids)));
    return out;
  }

  // For each state ids, values, errors, the bar, how many reached it, whether the budget allowed to score these, the
  // number of the winner, and the score above which every row is scored. nuclei: near, t and top_p of each state.
  nb::list top(In<int64_t, 1> k, int64_t spare, int64_t budget, bool plain,
               std::optional<std::tuple<In<double, 1>, In<double, 1>, In<double, 1>>> nuclei) {
    expect(static_cast<int64_t>(k.shape(0)) == n_states_, "one k a state");
    std::vector<Nucleus> each;
    if (nuclei) {
      const auto& [near, t, top_p] = *nuclei;
      for (size_t n : {near.shape(0), t.shape(0), top_p.shape(0)})
        expect(static_cast<int64_t>(n) == n_states_, "one nucleus a state");
      for (size_t b = 0; b < near.shape(0); ++b) each.push_back({near(b), t(b), top_p(b)});
    }
    std::vector<Top> found;
    {
      nb::gil_scoped_release release;
      found = ledger_->top(k.data(), spare, budget, plain, nuclei ? each.data() : nullptr);
    }
    nb::list out;
    for (Top& top : found)
      out.append(nb::make_tuple(to_numpy(std::move(top.scored.ids)), to_numpy(std::move(top.scored.value)),
                                to_numpy(std::move(top.scored.error)), top.bar, top.survivors, top.within_budget,
                                top.winner, top.floor));
    return out;
  }

  double highest(int64_t b) const {
    const int at = live(b);
    nb::gil_scoped_release release;
    return ledger_->highest(at);
  }

  Values mass(int64_t b, float from, float rate, bool likely) const {
    const int at = live(b);
    std::vector<double> bins(kMassBins);
    {
      nb::gil_scoped_release release;
      ledger_->mass(at, from, rate, likely, bins.data());
    }
    return to_numpy(std::move(bins));
  }

  nb::object joint(int64_t b, float from, float rate) {
    const int at = live(b);
    std::vector<double> sums(static_cast<size_t>(n_planes_) * kMassBins * kJointTerms);
    {
      nb::gil_scoped_release release;
      ledger_->joint(at, from, rate, sums.data());
    }
    return nb::cast(to_numpy(std::move(sums))).attr("reshape")(n_planes_, kMassBins, kJointTerms);
  }

  Ids lift(int64_t b, int64_t level, int64_t bins) {
    const int at = live(b);
    expect(level >= 0 && level < n_planes_ && bins >= 0 && bins <= kMassBins, "no such level or bin");
    std::vector<int64_t> rows;
    {
      nb::gil_scoped_release release;
      rows = ledger_->lift(at, static_cast<int>(level), static_cast<int>(bins));
    }
    return to_numpy(std::move(rows));
  }

 private:
  int state(int64_t b) const {
    expect(b >= 0 && b < n_states_, "no such state");
    return static_cast<int>(b);
  }
  int live(int64_t b) const {
    const int at = state(b);
    expect(ledger_->usable(at), "nothing is known of this state");
    return at;
  }

  int64_t n_rows_, n_states_, n_planes_;
  std::unique_ptr<Ledger> ledger_;
};

Values gumbel_of(uint64_t seed, uint32_t stream, uint32_t position, In<int64_t, 1> ids) {
  const NoiseKey key = noise_key(seed, stream, position);
  std::vector<double> noise;
  for (size_t i = 0; i < ids.shape(0); ++i) {
    if (ids(i) < 0 || ids(i) >= int64_t{1} << 33) throw std::out_of_range("token id outside 0 .. 2^33 - 1");
    noise.push_back(gumbel(key, ids(i)));
  }
  return to_numpy(std::move(noise));
}

// For tests of the bounds themselves.
void noise_bound(const std::string& isa, uint64_t seed, uint32_t stream, uint32_t position, float temperature,
                 Out<float, 1> extra) {
  find(isa)->noise(noise_key(seed, stream, position), temperature, 0, static_cast<int64_t>(extra.shape(0)), extra.data());
}

void add_bound(const std::string& isa, In<float, 1> upper, In<float, 1> extra, Out<float, 1> out) {
  expect(upper.shape(0) == extra.shape(0) && upper.shape(0) == out.shape(0), "one entry a row");
  find(isa)->add(upper.data(), extra.data(), static_cast<int64_t>(out.shape(0)), out.data());
}

Values mass_bound(const std::string& isa, In<float, 1> upper, float from, float rate) {
  std::vector<double> bins(kMassBins);
  find(isa)->mass(upper.data(), static_cast<int64_t>(upper.shape(0)), from, rate, bins.data());
  return to_numpy(std::move(bins));
}

void joint_bound(const std::string& isa, In<float, 1> centre, In<float, 1> upper, float from, float rate, Out<float, 1> high,
                 Out<float, 1> likely, Out<float, 1> peak) {
  for (size_t n : {upper.shape(0), high.shape(0), likely.shape(0), peak.shape(0)}) expect(n == centre.shape(0), "one entry a row");
  find(isa)->joint(centre.data(), upper.data(), static_cast<int64_t>(centre.shape(0)), from, rate, high.data(), likely.data(),
                   peak.data());
}

}  // namespace
}  // namespace csv_decode

NB_MODULE(_native, m) {
  using namespace csv_decode;
  m.def("ieee", &ieee, "Whether this thread rounds to nearest and keeps subnormal numbers.");
  m.def("supported", &supported, "Instruction sets that this build and this processor can run, slowest first.");
  nb::class_<Team>(m, "Team")
      .def("__init__",
           [](Team* team, int threads, std::optional<std::string> library) {
             new (team) Team(library ? team_of(threads, library->c_str()) : Team{threads});
           },
           "threads"_a, "library"_a.none())
      .def_prop_ro("shared", [](const Team& team) { return team.fork != nullptr; });
  nb::class_<BoundPlane>(m, "Plane")
      .def(nb::init<In<uint32_t, 2>, In<uint16_t, 1>, std::optional<In<float, 1>>, In<int32_t, 2>>(), "words"_a,
           "rho"_a, "bias"_a.none(), "segments"_a);
  nb::class_<BoundCascade>(m, "Cascade")
      .def(nb::init<std::vector<PlaneParts>, AnyRows, int, std::optional<In<float, 1>>,
                    AnyRows, int, In<float, 2>, In<int64_t, 1>, double, double, double,
                    In<double, 2>, double>(),
           "planes"_a, "rows"_a, "type"_a, "bias"_a.none(), "transform"_a, "transform_type"_a, "mean"_a, "edges"_a,
           "delta"_a, "energy"_a, "rotation_error"_a, "typical"_a, "sigma"_a)
      .def("scan", &BoundCascade::scan, "isa"_a, "team"_a, "h"_a, "k"_a, "spare"_a, "budget"_a,
           "race"_a.none(), "margin"_a.none(), "guess"_a.none());
  nb::class_<BoundLedger>(m, "Ledger")
      .def(nb::init<const BoundCascade&, const std::string&, const Team&, In<double, 2>, std::optional<Races>>(),
           "cascade"_a, "isa"_a, "team"_a, "h"_a, "race"_a.none(), nb::keep_alive<1, 2>())
      .def("usable", &BoundLedger::usable, "state"_a)
      .def("vanishing", &BoundLedger::vanishing, "state"_a)
      .def("energy", &BoundLedger::energy, "state"_a)
      .def("rows_at", &BoundLedger::rows_at, "state"_a, "plane"_a)
      .def("allow", &BoundLedger::allow, "state"_a, "words"_a)
      .def("leaders", &BoundLedger::leaders, "state"_a, "count"_a, "plain"_a)
      .def("score", &BoundLedger::score, "state"_a, "ids"_a)
      .def("open", &BoundLedger::open, "bars"_a, "exact"_a, "plain"_a)
      .def("top", &BoundLedger::top, "k"_a, "spare"_a, "budget"_a, "plain"_a, "nuclei"_a.none())
      .def("highest", &BoundLedger::highest, "state"_a)
      .def("mass", &BoundLedger::mass, "state"_a, "from_"_a, "rate"_a, "likely"_a)
      .def("joint", &BoundLedger::joint, "state"_a, "from_"_a, "rate"_a)
      .def("lift", &BoundLedger::lift, "state"_a, "level"_a, "bins"_a);
  m.def("gumbel", &gumbel_of, "seed"_a, "stream"_a, "position"_a, "ids"_a);
  m.def("noise_bound", &noise_bound, "isa"_a, "seed"_a, "stream"_a, "position"_a, "temperature"_a, "extra"_a);
  m.def("add_bound", &add_bound, "isa"_a, "upper"_a, "extra"_a, "out"_a);
  m.def("mass_bound", &mass_bound, "isa"_a, "upper"_a, "from_"_a, "rate"_a);
  m.def("joint_bound", &joint_bound, "isa"_a, "centre"_a, "upper"_a, "from_"_a, "rate"_a, "high"_a, "likely"_a, "peak"_a);
  m.def("screen", &screen, "isa"_a, "team"_a, "plane"_a, "hi"_a, "lo"_a, "params"_a, "open"_a.none(), "centre"_a,
        "upper"_a);
  m.def("sift", &sift, "isa"_a, "plane"_a, "hi"_a, "lo"_a, "params"_a, "bars"_a);
  m.def("refine", &refine, "isa"_a, "team"_a, "plane"_a, "hi"_a, "lo"_a, "params"_a, "rows"_a, "start"_a,
        "centre"_a, "upper"_a);
  m.def("score", &score, "isa"_a, "team"_a, "rows"_a, "type"_a, "ids"_a.none(), "h"_a, "value"_a, "magnitude"_a);
  m.def("leaders", &leaders, "isa"_a, "team"_a, "values"_a, "m"_a);
  m.def("select", &select_above, "isa"_a, "values"_a, "bar"_a);
}
