// A bounded pool of worker threads that sleep on a condition variable between calls, so they take nothing from another
// pool (torch, llama.cpp) on the same cores. The calling thread works too.
#pragma once
#include <cstdint>
#include <functional>

namespace csv_decode {

// Whether this thread rounds to nearest and keeps subnormal numbers. The pool's workers always do.
bool ieee();

// While one lives, workers that have finished a job look out for the next one for a moment before they sleep: a step
// is a handful of jobs with microseconds between them, and to wake a thread takes tens of microseconds.
class Session {
 public:
  Session();
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
};

// Runs task(0) .. task(tasks - 1) on at most `threads` threads, the caller included, and returns when all are done.
// The first exception of a task comes back to the caller.
// A second caller that finds the pool busy does its own work on its own thread.
void parallel(int threads, int64_t tasks, const std::function<void(int64_t)>& task);

// Cuts [0, n) into ranges of at least `grain`, a few for each thread, and runs body(first, last) on them.
void parallel_ranges(int threads, int64_t n, int64_t grain, const std::function<void(int64_t, int64_t)>& body);

}  // namespace csv_decode
