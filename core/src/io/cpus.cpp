#include "holdfast/cpus.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstddef>

namespace holdfast {
namespace {

constexpr int kCpusMax = 8192;  // of any Linux; glibc's own type has 1024
constexpr int kWordBits = 8 * sizeof(unsigned long);
using Cpus = std::array<unsigned long, kCpusMax / kWordBits>;

}  // namespace

std::string wake_here(int thread) {
  Cpus mine{};
  const long bytes = ::syscall(SYS_sched_getaffinity, 0, sizeof mine, mine.data());
  const int cpu = ::sched_getcpu();
  if (bytes <= 0 || cpu < 0 || cpu >= kCpusMax) return {};
  Cpus here{};
  here[static_cast<std::size_t>(cpu / kWordBits)] = 1UL << (cpu % kWordBits);
  if (thread != 0) ::syscall(SYS_sched_setaffinity, thread, bytes, here.data());
  return {reinterpret_cast<const char*>(mine.data()), static_cast<std::size_t>(bytes)};
}

void run_on(std::string_view cpus) {
  if (!cpus.empty()) ::syscall(SYS_sched_setaffinity, 0, cpus.size(), cpus.data());
}

}  // namespace holdfast
