// Threads for the loops of a step: our own, or those of an OpenMP runtime that the process has anyway.
#pragma once
#include <cstdint>
#include <functional>

namespace csv_decode {

// Whether this thread rounds to nearest and keeps subnormal numbers. Whoever works on a task does.
bool ieee();

// Who works: at most `threads` threads, the caller included.
//
// Without `fork` these are a pool's, which sleep on a condition variable between calls, so they take nothing from another
// pool on the same cores. With it they are the calling thread's team of an OpenMP runtime (libgomp's GOMP_parallel, or
// what has its interface). A thread that has just run the layers of a model there has such a team, whose workers spin
// for milliseconds: they would share the cores with ours, and they need no waking.
struct Team {
  int threads = 1;
  void (*fork)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
};

// The team of the OpenMP runtime that a shared library of this process uses (a path); without such a library or
// runtime, our own.
Team team_of(int threads, const char* library);

// While one lives, workers of our own that have finished a job look out for the next one for a moment before they sleep:
// a step is a handful of jobs with microseconds between them, and to wake a thread takes tens of microseconds.
class Session {
 public:
  explicit Session(const Team& team);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

 private:
  bool open_;
};

// Runs task(0) .. task(tasks - 1) on a team and returns when all are done.
// The first exception of a task comes back to the caller.
// A second caller that finds our pool busy does its own work on its own thread.
void parallel(const Team& team, int64_t tasks, const std::function<void(int64_t)>& task);

// Cuts [0, n) into ranges of at least `grain`, a few for each thread, and runs body(first, last) on them.
void parallel_ranges(const Team& team, int64_t n, int64_t grain, const std::function<void(int64_t, int64_t)>& body);

}  // namespace csv_decode
