#include "pool.hpp"

#if defined(CSV_DECODE_X86)
#include <immintrin.h>
#endif

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <limits>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace csv_decode {
namespace {

struct Job {
  const std::function<void(int64_t)>* task = nullptr;
  int64_t tasks = 0;
  std::atomic<int64_t> next{0};
  int helpers = 0;  // workers that may still join; guarded by the pool's mutex
  std::atomic<int> active{0};  // workers inside the job; raised and lowered under the pool's mutex
  std::mutex failing;
  std::exception_ptr failure;

  // Never throws: the job lives on the caller's stack, which must not unwind while workers are inside.
  void work() noexcept {
    try {
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) (*task)(i);
    } catch (...) {
      next.store(tasks);
      std::lock_guard<std::mutex> lock(failing);
      if (!failure) failure = std::current_exception();
    }
  }
};

void use_ieee() {
#if defined(CSV_DECODE_X86)
  _mm_setcsr(0x1f80);
#else
  std::fesetenv(FE_DFL_ENV);
#endif
}

// Work on a thread that is not ours, whose float mode comes back to it.
void work_as_guest(void* job) {
#if defined(CSV_DECODE_X86)
  const unsigned mode = _mm_getcsr();
  use_ieee();
  static_cast<Job*>(job)->work();
  _mm_setcsr(mode);
#else
  std::fenv_t mode;
  std::fegetenv(&mode);
  use_ieee();
  static_cast<Job*>(job)->work();
  std::fesetenv(&mode);
#endif
}

// Waits for done() for at most 100 microseconds.
template <typename Done>
void look_out(const Done& done) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(100);
  do {
    for (int i = 0; i < 16; ++i) {
      if (done()) return;
#if defined(CSV_DECODE_X86)
      _mm_pause();
#endif
    }
  } while (std::chrono::steady_clock::now() < end);
}

class Pool {
 public:
  std::mutex caller;  // held by the one caller that the workers serve
  std::atomic<int> sessions{0};

  void run(int threads, int64_t tasks, const std::function<void(int64_t)>& task) {
    Job job;
    job.task = &task;
    job.tasks = tasks;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      try {
        while (workers_ < threads - 1) {
          std::thread([this] { serve(); }).detach();
          ++workers_;
        }
      } catch (const std::system_error&) {
        // no more threads to be had: go on with those that are here
      }
      job.helpers = threads - 1;
      job_ = &job;
    }
    jobs_.fetch_add(1);  // the mutex is free by then: who looks out would sleep on it
    wake_.notify_all();
    job.work();
    std::unique_lock<std::mutex> lock(mutex_);
    job_ = nullptr;  // nobody joins any more
    if (job.active != 0) {
      lock.unlock();
      look_out([&] { return job.active == 0 && lock.try_lock(); });
      if (!lock.owns_lock()) lock.lock();
    }
    done_.wait(lock, [&] { return job.active == 0; });
    if (job.failure) std::rethrow_exception(job.failure);
  }

 private:
  void serve() {
    use_ieee();  // a new thread inherits the float mode of the one that made it
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return job_ && job_->helpers > 0; });
      Job* job = job_;
      --job->helpers;
      ++job->active;
      lock.unlock();
      job->work();
      lock.lock();
      if (--job->active == 0) done_.notify_all();
      if (sessions.load() > 0) {
        const uint64_t seen = jobs_.load();
        lock.unlock();
        look_out([&] { return (jobs_.load() != seen || sessions.load() == 0) && lock.try_lock(); });
        if (!lock.owns_lock()) lock.lock();
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  Job* job_ = nullptr;
  std::atomic<uint64_t> jobs_{0};  // so far
  int workers_ = 0;
};

// Never destroyed: detached workers may outlive main. A forked child has no workers, so it gets a new pool, and leaves
// OpenMP's team alone, which is lost as well.
Pool* pool = nullptr;
std::atomic<bool> forked{false};

Pool& the_pool() {
  static std::once_flag once;
  std::call_once(once, [] {
    pool = new Pool;
    pthread_atfork(nullptr, nullptr, [] {
      pool = new Pool;
      forked = true;
    });
  });
  return *pool;
}

}  // namespace

bool ieee() {
  // volatile: the answer must come from this thread, now, not from the compiler
  volatile double smallest = std::numeric_limits<double>::denorm_min(), one = 1.0, half = 0.5;
  volatile double normal = std::numeric_limits<double>::min();
  volatile float small32 = std::numeric_limits<float>::denorm_min(), one32 = 1.0f;
  return std::fegetround() == FE_TONEAREST && smallest * one != 0.0 && normal * half != 0.0 && small32 * one32 != 0.0f;
}

Team team_of(int threads, const char* library) {
  Team team{threads, nullptr};
  the_pool();  // notices a fork from now on
#if defined(__linux__)
  if (void* handle = dlopen(library, RTLD_NOLOAD | RTLD_LAZY)) {  // finds symbols of what it depends on, too
    team.fork = reinterpret_cast<decltype(team.fork)>(dlsym(handle, "GOMP_parallel"));
    dlclose(handle);
  }
#else
  (void)library;
#endif
  return team;
}

Session::Session(const Team& team) : open_(team.threads > 1 && !team.fork) {
  if (open_) the_pool().sessions.fetch_add(1);
}

Session::~Session() {
  if (open_) the_pool().sessions.fetch_sub(1);
}

void parallel(const Team& team, int64_t tasks, const std::function<void(int64_t)>& task) {
  const int threads = static_cast<int>(std::min<int64_t>(team.threads, tasks));
  if (threads > 1 && team.fork && !forked) {
    Job job;
    job.task = &task;
    job.tasks = tasks;
    team.fork(work_as_guest, &job, static_cast<unsigned>(threads), 0);  // any number of threads that it gives will do
    if (job.failure) std::rethrow_exception(job.failure);
    return;
  }
  if (threads > 1) {
    Pool& p = the_pool();
    std::unique_lock<std::mutex> lock(p.caller, std::try_to_lock);
    if (lock.owns_lock()) return p.run(threads, tasks, task);
  }
  for (int64_t i = 0; i < tasks; ++i) task(i);
}

void parallel_ranges(const Team& team, int64_t n, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
  int64_t pieces = team.threads > 1 ? static_cast<int64_t>(team.threads) * 8 : 1;
  int64_t size = std::max(grain, (n + pieces - 1) / pieces);
  int64_t tasks = (n + size - 1) / size;
  parallel(team, tasks, [&](int64_t i) { body(i * size, std::min(n, (i + 1) * size)); });
}

}  // namespace csv_decode
