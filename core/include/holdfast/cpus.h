// On which CPUs a thread runs. Where the kernel forbids a change, nothing changes and nobody is
// told: all of this only saves time. Safe from any thread.
#pragma once

#include <semaphore.h>

#include <array>
#include <cstddef>
#include <mutex>
#include <string>
#include <string_view>

namespace holdfast {

inline constexpr int kCpusMax = 8192;  // of any Linux; glibc's own type has 1024

// CPUs, as the kernel writes them; `bytes` is 0 where it does not say.
struct Cpus {
  static constexpr int kWordBits = 8 * sizeof(unsigned long);
  std::array<unsigned long, kCpusMax / kWordBits> words{};
  std::size_t bytes = 0;
};

// Lets another thread, which sleeps, wake on the CPU of this one: the caches there hold its data.
// `thread` is its kernel id; 0: there is none. Returns the CPUs on which this thread may run, for
// `run_on`; empty where the kernel does not say.
std::string wake_here(int thread);

// Lets this thread run on these CPUs, from now on. Where its cpuset has no others, it follows that
// as it changes, like a thread whose CPUs were never set. False: it may not set them, or there are
// none.
bool run_on(std::string_view cpus);

// What one thread waits for, again and again; each `wake` ends one `wait`. The thread wakes on the
// CPU of the one that wakes it, which is about to sleep: another CPU would have to wake as well.
class Waiter {
 public:
  Waiter();
  ~Waiter();
  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;

  // Waits; false: a signal came first. Either way, the thread may run where it could before.
  bool wait();

  // Ends a wait: the one that is on, or the next. Safe from any thread.
  void wake() noexcept;

 private:
  void come_here() noexcept;

  ::sem_t wakes_;
  std::mutex mutex_;
  int thread_ = 0;  // kernel id of the one that waits; 0: none does, or it may not set its CPUs
  Cpus cpus_;  // where it may run
  int kept_to_ = -1;  // the CPU that it is kept to until it wakes; -1: none
};

}  // namespace holdfast
