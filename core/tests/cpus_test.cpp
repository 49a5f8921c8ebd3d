// A thread that sleeps wakes where it is told to, and then runs where its caller may.
#include "holdfast/cpus.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <latch>
#include <thread>

#include "check.h"

namespace holdfast {
namespace {

int count_of(int thread) {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  return sched_getaffinity(thread, sizeof cpus, &cpus) == 0 ? CPU_COUNT(&cpus) : -1;
}

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

}  // namespace holdfast
