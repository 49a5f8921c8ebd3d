#include "holdfast/cpus.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <utility>

namespace holdfast {
namespace {

constexpr int kCpusMax = 8192;  // of any Linux; glibc's own type has 1024
constexpr int kWordBits = 8 * sizeof(unsigned long);
using Cpus = std::array<unsigned long, kCpusMax / kWordBits>;

// The CPUs on which a thread may run; 0: this thread. Empty where the kernel does not say.
std::string cpus_of(int thread) {
  Cpus found{};
  const long bytes = ::syscall(SYS_sched_getaffinity, thread, sizeof found, found.data());
  if (bytes <= 0) return {};
  return {reinterpret_cast<const char*>(found.data()), static_cast<std::size_t>(bytes)};
}

bool set_cpus(int thread, std::string_view cpus) {
  return ::syscall(SYS_sched_setaffinity, thread, cpus.size(), cpus.data()) == 0;
}

// Keeps a thread to one CPU; false where that may not be.
bool keep_to(int cpu, int thread, std::size_t bytes) {
  if (cpu < 0 || cpu >= kCpusMax) return false;
  Cpus one{};
  one[static_cast<std::size_t>(cpu / kWordBits)] = 1UL << (cpu % kWordBits);
  return set_cpus(thread, {reinterpret_cast<const char*>(one.data()), bytes});
}

}  // namespace

std::string wake_here(int thread) {
  std::string mine = cpus_of(0);
  if (thread != 0 && !mine.empty()) keep_to(::sched_getcpu(), thread, mine.size());
  return mine;
}

void run_on(std::string_view cpus) {
  if (cpus.empty()) return;
  set_cpus(0, std::string(cpus.size(), '\xff'));
  if (cpus_of(0) != cpus) set_cpus(0, cpus);
}

Waiter::Waiter() : wakes_() { ::sem_init(&wakes_, 0, 0); }

Waiter::~Waiter() { ::sem_destroy(&wakes_); }

bool Waiter::wait() {
  if (::sem_trywait(&wakes_) == 0) return true;
  {
    const std::lock_guard lock(mutex_);
    thread_ = static_cast<int>(::syscall(SYS_gettid));
  }
  const bool is_woken = ::sem_wait(&wakes_) == 0;
  const std::lock_guard lock(mutex_);
  thread_ = 0;
  run_on(std::exchange(cpus_, {}));
  return is_woken;
}

void Waiter::wake() {
  {
    const std::lock_guard lock(mutex_);
    if (thread_ != 0 && cpus_.empty()) come_here();
  }
  ::sem_post(&wakes_);
}

void Waiter::come_here() {
  std::string before = cpus_of(thread_);
  const int cpu = ::sched_getcpu();
  const auto place = static_cast<std::size_t>(cpu);
  const bool may = place / 8 < before.size() && (before[place / 8] >> (place % 8) & 1) != 0;
  if (may && keep_to(cpu, thread_, before.size())) cpus_ = std::move(before);
}

}  // namespace holdfast
