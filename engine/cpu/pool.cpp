#include "pool.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <x86intrin.h>

namespace baton {

namespace {
// About 50 µs: the time stamp counter of today's CPUs runs at 2 to 4 GHz.
constexpr uint64_t kSpinCycles = 150'000;

void futex(std::atomic<uint32_t>& word, int operation, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}
}  // namespace

Pool::Pool(int threads, Parallel parallel) : threads_(threads < 1 ? 1 : threads), parallel_(parallel) {
  if (parallel) {  // it may give fewer threads than are wanted, and a meeting would wait for the others for ever
    std::atomic<int> given{0};
    parallel([](void* at) { ++*static_cast<std::atomic<int>*>(at); }, &given, threads_, 0);
    threads_ = given;
  }
  for (int thread = 1; !parallel && thread < threads_; ++thread) others_.emplace_back([this, thread] { serve(thread); });
}

Pool::~Pool() {
  ending_ = true;
  advance(start_);
  for (auto& other : others_) other.join();
}

void Pool::run(const std::function<void(int)>& work) {
  if (threads_ == 1) return work(0);
  if (parallel_) {
    struct Team {
      const std::function<void(int)>& work;
      std::atomic<int> begun{0};
    } team{work};
    return parallel_([](void* at) { auto& own = *static_cast<Team*>(at); own.work(own.begun++); }, &team, threads_, 0);
  }
  work_ = &work;
  advance(start_);
  work(0);
  meet();
}

void Pool::serve(int thread) {
  for (uint32_t turn = 0;; ++turn) {
    wait(start_, turn);
    if (ending_) return;
    (*work_)(thread);
    meet();
  }
}

void Pool::meet() {
  if (threads_ == 1) return;
  const uint32_t seen = meeting_.number.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < threads_) return wait(meeting_, seen);
  arrived_.store(0, std::memory_order_relaxed);
  advance(meeting_);
}

void Pool::advance(Turn& turn) {
  turn.number.fetch_add(1);
  // Either this thread sees the one about to sleep, or that one sees the number above: both are sequentially consistent.
  if (turn.sleepers.load()) futex(turn.number, FUTEX_WAKE, INT32_MAX);
}

void Pool::wait(Turn& turn, uint32_t seen) {
  for (const uint64_t begin = __rdtsc(); __rdtsc() - begin < kSpinCycles;) {
    if (turn.number.load(std::memory_order_acquire) != seen) return;
    _mm_pause();
  }
  turn.sleepers.fetch_add(1);
  while (turn.number.load() == seen) futex(turn.number, FUTEX_WAIT, seen);
  turn.sleepers.fetch_sub(1);
}

}  // namespace baton

extern "C" {

void* baton_pool_make(int threads, baton::Parallel parallel) { return new baton::Pool(threads, parallel); }

void baton_pool_free(void* pool) { delete static_cast<baton::Pool*>(pool); }
}
