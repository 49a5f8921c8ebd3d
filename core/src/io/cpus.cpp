#include "holdfast/cpus.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#include <span>

namespace holdfast {
namespace {

std::string_view text_of(const Cpus& cpus) {
  return {reinterpret_cast<const char*>(cpus.words.data()), cpus.bytes};
}

// The CPUs on which a thread may run; 0: this thread.
Cpus cpus_of(int thread) {
  Cpus found;
  const std::span words(found.words);
  const long bytes = ::syscall(SYS_sched_getaffinity, thread, words.size_bytes(), words.data());
  if (bytes > 0) found.bytes = static_cast<std::size_t>(bytes);
  return found;
}

bool set_cpus(int thread, std::string_view cpus) {
  return ::syscall(SYS_sched_setaffinity, thread, cpus.size(), cpus.data()) == 0;
}

// One CPU, in as many bytes as others take; none where there is no such CPU.
Cpus only(int cpu, std::size_t bytes) {
  Cpus one;
  if (cpu < 0 || static_cast<std::size_t>(cpu) >= 8 * bytes) return one;
  one.words[static_cast<std::size_t>(cpu / Cpus::kWordBits)] = 1UL << (cpu % Cpus::kWordBits);
  one.bytes = bytes;
  return one;
}

bool has(const Cpus& cpus, int cpu) {
  const auto word = static_cast<std::size_t>(cpu / Cpus::kWordBits);
  return cpu >= 0 && cpu < kCpusMax && (cpus.words[word] >> (cpu % Cpus::kWordBits) & 1) != 0;
}

}  // namespace

std::string wake_here(int thread) {
  const Cpus mine = cpus_of(0);
  const Cpus here = only(::sched_getcpu(), mine.bytes);
  if (thread != 0 && here.bytes != 0) set_cpus(thread, text_of(here));
  return std::string(text_of(mine));
}

bool run_on(std::string_view cpus) {
  Cpus all;
  if (cpus.empty() || cpus.size() > sizeof all.words) return false;
  std::memset(all.words.data(), 0xff, cpus.size());
  all.bytes = cpus.size();
  return set_cpus(0, text_of(all)) && (text_of(cpus_of(0)) == cpus || set_cpus(0, cpus));
}

Waiter::Waiter() : wakes_() { ::sem_init(&wakes_, 0, 0); }

Waiter::~Waiter() { ::sem_destroy(&wakes_); }

bool Waiter::wait() {
  if (::sem_trywait(&wakes_) == 0) return true;
  {
    const std::lock_guard lock(mutex_);
    cpus_ = cpus_of(0);
    // A sandbox may let the thread that wakes it set CPUs, and not this one: nobody would undo it.
    thread_ = run_on(text_of(cpus_)) ? static_cast<int>(::syscall(SYS_gettid)) : 0;
  }
  const bool is_woken = ::sem_wait(&wakes_) == 0;
  const std::lock_guard lock(mutex_);
  thread_ = 0;
  // Unless another thread has set them meanwhile.
  if (kept_to_ >= 0 && text_of(cpus_of(0)) == text_of(only(kept_to_, cpus_.bytes))) {
    run_on(text_of(cpus_));
  }
  kept_to_ = -1;
  return is_woken;
}

void Waiter::wake() noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (thread_ != 0 && kept_to_ < 0) come_here();
  }
  ::sem_post(&wakes_);
}

void Waiter::come_here() noexcept {
  const int cpu = ::sched_getcpu();
  if (has(cpus_, cpu) && set_cpus(thread_, text_of(only(cpu, cpus_.bytes)))) kept_to_ = cpu;
}

}  // namespace holdfast
