// Threads that run one piece of work together, meeting between its phases.
//
// A thread that waits spins for a while and then sleeps: phases are microseconds long, and going to sleep between them
// would cost more than they do. But other processes share the cores, and a core that spins for a thread without one is
// lost too.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace baton {

// GOMP_parallel: calls a function with what it takes, on each of so many threads of OpenMP.
using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

class Pool {
 public:
  // The caller of `run` is one of the `threads`; with one, no thread is started and none waits. With `parallel`, they are
  // OpenMP's, as many as it gives: two sets of threads on the same cores would wait for each other.
  Pool(int threads, Parallel parallel);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }

  // Calls work(0) here and work(1) … work(threads − 1) on the others; returns when all have ended. One caller at a time.
  void run(const std::function<void(int)>& work);

  // Within `run`: returns when every thread has called it as often. What each wrote before, all see after.
  void meet();

 private:
  struct alignas(64) Turn {
    std::atomic<uint32_t> number{0};
    std::atomic<uint32_t> sleepers{0};
  };

  void serve(int thread);
  static void advance(Turn& turn);
  static void wait(Turn& turn, uint32_t seen);

  int threads_;
  const Parallel parallel_;
  Turn start_;
  Turn meeting_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) const std::function<void(int)>* work_ = nullptr;
  bool ending_ = false;
  std::vector<std::thread> others_;
};

// The part of `count` equal pieces that one of `threads` threads takes: [first, last), in order.
struct Range {
  int64_t first, last;
};
inline Range share(int64_t count, int thread, int threads) {
  return {count * thread / threads, count * (thread + 1) / threads};
}

}  // namespace baton
