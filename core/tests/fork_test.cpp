// Children that are forked while other threads are in the middle of something can use all of it.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <functional>
#include <thread>
#include <vector>

#include "check.h"
#include "files.h"
#include "holdfast/copy.h"

namespace holdfast {
namespace {

constexpr int kForks = 200;
constexpr unsigned kSecondsMax = 20;  // what hangs ends by SIGALRM

// Forks again and again while two threads do what the children do too.
void forks_during(const std::function<void()>& work) {
  const int before = check::failures;
  std::atomic<bool> ended = false;
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      while (!ended) work();
    });
  }
  for (int i = 0; i < kForks && check::failures == before; ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(kSecondsMax);
      work();
      ::_exit(check::failures == before ? 0 : 1);
    }
    int status = -1;
    CHECK_EQ(::waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
  }
  ended = true;
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

TEST(a_child_can_probe) {
  const TemporaryDirectory directory;
  ::unsetenv("HOLDFAST_IO");
  // Not remembered, so that the probe itself is what a fork meets.
  forks_during([&] {
    CHECK(probe(directory.path(), nullptr).ok());
    CHECK(probe(directory.path(), Vfs::recording()).ok());
  });
}

TEST(a_child_can_use_a_vfs_that_counts_or_misbehaves) {
  const TemporaryDirectory directory;
  const auto recording = Vfs::recording();
  const auto faulty = Vfs::faulty({{"sync", 1000000, false, "fail", EIO}}, recording).value();
  forks_during([&] {
    CHECK(faulty->list_directory(directory.path()).ok());
    for (int i = 0; i < 200; ++i) CHECK(!faulty->calls().empty() && !recording->calls().empty());
  });
}

TEST(a_child_can_copy_what_may_go_away) {
  std::vector<std::byte> source(1 << 20);
  forks_during([&] {
    std::vector<std::byte> target(source.size());
    const Piece piece{target.data(), source.data(), source.size()};
    auto missing = copy_if_there({&piece, 1}, 2);
    CHECK(missing.ok() && missing.value() == 1);
  });
}

}  // namespace holdfast
