// A thread that sleeps wakes where it is told to, and then runs where its caller may.
#include "holdfast/cpus.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <latch>
#include <thread>
#include <vector>

#include "check.h"

namespace holdfast {
namespace {

int count_of(int thread) {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  return sched_getaffinity(thread, sizeof cpus, &cpus) == 0 ? CPU_COUNT(&cpus) : -1;
}

cpu_set_t cpus_of(int thread) {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  sched_getaffinity(thread, sizeof cpus, &cpus);
  return cpus;
}

cpu_set_t only(int cpu) {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  CPU_SET(static_cast<std::size_t>(cpu), &cpus);
  return cpus;
}

void nap() { std::this_thread::sleep_for(std::chrono::milliseconds(20)); }

}  // namespace

TEST(a_thread_wakes_on_the_cpu_of_its_caller_and_then_runs_where_that_may) {
  int id = 0, on = -1, after = 0;
  std::string cpus;
  std::latch known(1), told(1);
  std::thread other([&] {
    id = static_cast<int>(::syscall(SYS_gettid));
    known.count_down();
    told.wait();
    on = sched_getcpu();
    run_on(cpus);
    after = count_of(0);
  });
  known.wait();
  const int before = count_of(0);
  cpu_set_t all, here;
  CPU_ZERO(&all);
  sched_getaffinity(0, sizeof all, &all);
  CPU_ZERO(&here);  // so that this thread stays where it is
  const int cpu = sched_getcpu();
  CPU_SET(static_cast<std::size_t>(cpu), &here);
  sched_setaffinity(0, sizeof here, &here);
  wake_here(id);
  CHECK_EQ(count_of(id), 1);
  sched_setaffinity(0, sizeof all, &all);
  cpus = wake_here(id);
  sched_setaffinity(id, sizeof here, &here);
  told.count_down();
  other.join();
  CHECK_EQ(on, cpu);
  CHECK_EQ(after, before);
}

TEST(what_the_kernel_forbids_is_not_done) {
  const int before = count_of(0);
  CHECK(!wake_here(1 << 30).empty());  // no such thread
  CHECK(!wake_here(0).empty());  // nor is any named
  run_on({});
  CHECK_EQ(count_of(0), before);
}

TEST(each_wake_ends_one_wait_and_the_thread_may_run_where_it_could) {
  constexpr int kWakers = 3, kWakes = 2000;
  Waiter waiter;
  const int before = count_of(0);
  std::atomic<int> moved = 0;
  std::thread waits([&] {
    for (int i = 0; i < kWakers * kWakes; ++i) {
      if (!waiter.wait()) --i;
      moved += count_of(0) != before;
    }
  });
  std::vector<std::thread> wakers;
  for (int i = 0; i < kWakers; ++i) {
    wakers.emplace_back([&] {
      for (int n = 0; n < kWakes; ++n) waiter.wake();
    });
  }
  for (std::thread& waker : wakers) waker.join();
  waits.join();
  CHECK_EQ(moved.load(), 0);
}

TEST(a_thread_that_is_woken_wakes_on_the_cpu_of_the_one_that_wakes_it) {
  constexpr int kTries = 20;
  Waiter waiter;
  const int before = count_of(0);
  int kept = 0, moved = 0;
  for (int i = 0; i < kTries; ++i) {
    std::atomic<int> id = 0;
    std::thread waits([&] {
      id = static_cast<int>(::syscall(SYS_gettid));
      waiter.wait();
      moved += count_of(0) != before;
    });
    nap();  // it waits
    waiter.wake();
    kept += count_of(id) == 1;  // it cannot run yet, where this thread does
    waits.join();
  }
  CHECK(kept > 0);
  CHECK_EQ(moved, 0);
}

TEST(a_thread_is_not_woken_where_it_may_not_run) {
  const cpu_set_t all = cpus_of(0);
  int first = 0;
  while (!CPU_ISSET(static_cast<std::size_t>(first), &all)) ++first;
  const cpu_set_t one = only(first);
  cpu_set_t rest = all;
  CPU_CLR(static_cast<std::size_t>(first), &rest);
  if (CPU_COUNT(&rest) == 0) return;  // there is one CPU
  Waiter waiter;
  int on = -1;
  cpu_set_t after;
  std::thread waits([&] {
    sched_setaffinity(0, sizeof one, &one);
    waiter.wait();
    on = sched_getcpu();
    after = cpus_of(0);
  });
  nap();
  sched_setaffinity(0, sizeof rest, &rest);
  waiter.wake();
  sched_setaffinity(0, sizeof all, &all);
  waits.join();
  CHECK_EQ(on, first);
  CHECK(CPU_EQUAL(&after, &one));
}

TEST(a_signal_ends_a_wait_and_no_wake_is_lost) {
  struct sigaction action {};
  action.sa_handler = [](int) {};
  struct sigaction old {};
  sigaction(SIGUSR1, &action, &old);
  Waiter waiter;
  const int before = count_of(0);
  std::atomic<int> signals = 0, moved = 0;
  std::atomic<bool> is_over = false;
  constexpr int kWakes = 500;
  std::thread waits([&] {
    for (int woken = 0; woken < kWakes;) {
      if (waiter.wait()) {
        ++woken;
      } else {
        ++signals;
      }
      moved += count_of(0) != before;
    }
    is_over = true;
  });
  std::thread strikes([&, target = waits.native_handle()] {
    while (!is_over) {
      pthread_kill(target, SIGUSR1);
      std::this_thread::yield();
    }
  });
  while (signals == 0) std::this_thread::yield();
  for (int n = 0; n < kWakes; ++n) waiter.wake();
  strikes.join();
  waits.join();
  sigaction(SIGUSR1, &old, nullptr);
  CHECK_EQ(moved.load(), 0);
}

}  // namespace holdfast
