// Injected faults behave the same in every backend, and every request is accounted for.
#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <functional>

#include "check.h"
#include "files.h"
#include "holdfast/queue.h"

namespace holdfast {
namespace {

constexpr std::size_t kBytes = 256 << 10;
constexpr std::size_t kRequests = 4;
constexpr std::size_t kBlock = 32 << 10;

struct Outcome {
  std::vector<Completion> completions;
  std::string file;
  std::map<std::string, std::uint64_t> calls;
};

// Writes kRequests requests of kBytes under `rules`, then reads the file without them.
bool write_under(const std::vector<FaultRule>& rules, const char* backend, Outcome& outcome,
                 std::shared_ptr<Vfs> base = nullptr) {
  const TemporaryDirectory directory;
  const auto pool = Pool::create(kBytes, kRequests).value();
  const auto vfs = Vfs::faulty(rules, std::move(base)).value();
  auto queue = make_queue(vfs, pool, backend, 3, kBlock);
  if (queue == nullptr) return false;
  auto fd = vfs->create(directory / "file", queue->direct());
  if (!fd.ok()) return false;
  for (std::size_t index = 0; index < kRequests; ++index) {
    fill_random(pool->address(index), kBytes, index);
    CHECK(queue
              ->submit({Operation::kWrite, fd.value(), pool->address(index), kBytes, index * kBytes,
                        index})
              .ok());
  }
  outcome.completions = wait_for_all(*queue);
  CHECK_EQ(outcome.completions.size(), kRequests);
  outcome.calls = vfs->calls();
  CHECK(vfs->close(fd.value()).ok());
  outcome.file = read_file(directory / "file");
  return true;
}

// Counts transfers that a 4 KiB-sector disk would refuse.
class AlignmentVfs final : public Vfs {
 public:
  Admission admit(const Call& call) override {
    const auto address = reinterpret_cast<std::uintptr_t>(call.data);
    if ((address | call.size | call.number) % kBlockAlignBytes != 0) ++unaligned;
    return Vfs::admit(call);
  }
  std::atomic<int> unaligned = 0;
};

std::string expected_file() {
  std::string bytes(kRequests * kBytes, '\0');
  for (std::size_t index = 0; index < kRequests; ++index) {
    fill_random(bytes.data() + index * kBytes, kBytes, index);
  }
  return bytes;
}

void for_each_backend(const std::function<void(const char*)>& test) {
  for (const char* backend : kBackends) test(backend);
}

std::size_t failed_with(const Outcome& outcome, int error) {
  std::size_t count = 0;
  for (const Completion& completion : outcome.completions) {
    count += completion.error == error;
    CHECK(completion.error == 0 ? completion.bytes == kBytes : completion.bytes < kBytes);
    CHECK_EQ(completion.bytes % (completion.error == 0 ? kBytes : 4096), 0u);
  }
  return count;
}

}  // namespace

TEST(short_writes_are_resumed) {
  for_each_backend([](const char* backend) {
    for (const std::uint64_t bytes : {4096, 5000, 10000, 20480}) {
      for (const bool persistent : {false, true}) {
        Outcome outcome;
        const auto base = std::make_shared<AlignmentVfs>();
        const FaultRule rule{"write", 2, persistent, "short", bytes};
        if (!write_under({rule}, backend, outcome, base)) continue;
        CHECK(base->unaligned == 0 || std::string(backend) == "buffered");
        CHECK_EQ(failed_with(outcome, 0), kRequests);
        CHECK(outcome.file == expected_file());
        CHECK(outcome.calls["write"] > kRequests * kBytes / kBlock);
      }
    }
  });
}

TEST(interruptions_are_retried_but_not_for_ever) {
  for_each_backend([](const char* backend) {
    for (const std::uint64_t error : {EINTR, EAGAIN}) {
      Outcome once;
      if (!write_under({{"write", 3, false, "fail", error}}, backend, once)) continue;
      CHECK_EQ(failed_with(once, 0), kRequests);
      CHECK(once.file == expected_file());
    }
    Outcome always;
    if (!write_under({{"write", 1, true, "fail", EINTR}}, backend, always)) return;
    CHECK_EQ(failed_with(always, EINTR), kRequests);
  });
}

TEST(a_failed_write_fails_its_request_only) {
  for_each_backend([](const char* backend) {
    for (const std::uint64_t error : {EIO, ENOSPC, EINVAL}) {
      Outcome outcome;
      if (!write_under({{"write", 5, false, "fail", error}}, backend, outcome)) continue;
      CHECK_EQ(failed_with(outcome, static_cast<int>(error)), 1u);
    }
    Outcome full;
    if (!write_under({{"write", 9, true, "fail", ENOSPC}}, backend, full)) return;
    CHECK(failed_with(full, ENOSPC) >= kRequests - 1);
    CHECK_EQ(failed_with(full, ENOSPC) + failed_with(full, 0), kRequests);
    // Once a request has failed, no more of it is asked for.
    CHECK(full.calls["write"] < kRequests * kBytes / kBlock);
  });
}

TEST(a_torn_write_leaves_its_first_bytes_and_fails) {
  for_each_backend([](const char* backend) {
    Outcome outcome;
    if (!write_under({{"write", 1, false, "torn", 8192}}, backend, outcome)) return;
    if (!CHECK_EQ(failed_with(outcome, EIO), 1u)) return;
    const auto torn = std::find_if(outcome.completions.begin(), outcome.completions.end(),
                                   [](const Completion& one) { return one.error == EIO; });
    const std::size_t at = torn->tag * kBytes + torn->bytes;
    const std::string expected = expected_file();
    CHECK(outcome.file.substr(at, 8192) == expected.substr(at, 8192));
    CHECK(outcome.file.substr(at + 8192, kBlock - 8192) !=
          expected.substr(at + 8192, kBlock - 8192));
    Outcome nothing;
    if (!write_under({{"write", 1, true, "torn", 0}}, backend, nothing)) return;
    CHECK_EQ(failed_with(nothing, EIO), kRequests);
    CHECK_EQ(nothing.file.size(), 0u);
  });
}

TEST(a_lying_write_succeeds_and_writes_nothing) {
  for_each_backend([](const char* backend) {
    Outcome outcome;
    if (!write_under({{"write", 1, true, "lie", 0}}, backend, outcome)) return;
    CHECK_EQ(failed_with(outcome, 0), kRequests);
    CHECK_EQ(outcome.file.size(), 0u);
    CHECK_EQ(outcome.calls["write"], kRequests * kBytes / kBlock);
  });
}

TEST(short_reads_are_resumed_and_failed_ones_reported) {
  const TemporaryDirectory directory;
  const std::string expected = expected_file();
  write_file(directory / "file", expected);
  for_each_backend([&](const char* backend) {
    for (const FaultRule& rule : std::vector<FaultRule>{{"read", 1, true, "short", 6000},
                                                        {"read", 2, false, "fail", EIO},
                                                        {"read", 1, true, "delay", 1}}) {
      const auto pool = Pool::create(kBytes, 1).value();
      const auto vfs = Vfs::faulty({rule}, nullptr).value();
      auto queue = make_queue(vfs, pool, backend, 1, kBlock);
      if (queue == nullptr) continue;
      auto fd = vfs->open(directory / "file", queue->direct());
      if (!fd.ok()) continue;
      CHECK(queue->submit({Operation::kRead, fd.value(), pool->address(0), kBytes, 0, 7}).ok());
      const Completion done = queue->wait().at(0);
      const bool fails = rule.action == "fail";
      CHECK_EQ(done.error, fails ? EIO : 0);
      CHECK_EQ(done.bytes, fails ? kBlock : kBytes);
      CHECK(std::memcmp(pool->address(0), expected.data(), done.bytes) == 0);
      CHECK(vfs->close(fd.value()).ok());
    }
  });
}

TEST(a_recording_under_faults_holds_what_reached_the_disk) {
  for_each_backend([](const char* backend) {
    const auto recording = Vfs::recording();
    Outcome outcome;
    const std::vector<FaultRule> rules = {{"write", 2, false, "short", 5000},
                                          {"write", 7, false, "torn", 4096},
                                          {"write", 9, false, "lie", 0}};
    if (!write_under(rules, backend, outcome, recording)) return;
    std::string replayed(outcome.file.size(), '\0');
    for (const TraceEntry& entry : recording->trace()) {
      if (entry.operation != Operation::kWrite) continue;
      CHECK(entry.number + entry.data.size() <= replayed.size());
      std::memcpy(replayed.data() + entry.number, entry.data.data(), entry.data.size());
    }
    CHECK(replayed == outcome.file);
  });
}

TEST(a_destroyed_queue_begins_nothing_more) {
  for_each_backend([](const char* backend) {
    const TemporaryDirectory directory;
    const auto vfs = Vfs::faulty({{"write", 1, true, "delay", 20}}, nullptr).value();
    const auto pool = Pool::create(kBytes, 1).value();
    auto queue = make_queue(vfs, pool, backend, 1, 4096);
    if (queue == nullptr) return;
    auto fd = vfs->create(directory / "file", queue->direct());
    if (!fd.ok()) return;
    CHECK(queue->submit({Operation::kWrite, fd.value(), pool->address(0), kBytes, 0, 0}).ok());
    queue.reset();
    CHECK(vfs->calls()["write"] < kBytes / 4096 / 2);
    CHECK(vfs->close(fd.value()).ok());
  });
}

TEST(rules_fire_for_every_operation_by_name_and_number) {
  const TemporaryDirectory directory;
  const auto vfs = Vfs::faulty({{"sync", 2, false, "fail", EIO},
                                {"link", 1, true, "fail", EPERM},
                                {"make_directory", 1, false, "lie", 0},
                                {"rename", 0, true, "fail", EIO},
                                {"unlink", 1, false, "fail", EINTR},
                                {"create", 2, false, "lie", 0},
                                {"list_directory", 1, false, "lie", 0}},
                               nullptr)
                       .value();
  const int fd = vfs->create(directory / "a", false).value();
  CHECK(vfs->sync(fd).ok());
  const Status failed = vfs->sync(fd);
  CHECK_EQ(failed.error(), EIO);
  CHECK(failed.text().find("sync " + (directory / "a")) == 0);
  CHECK(vfs->sync(fd).ok());
  CHECK_EQ(vfs->link(directory / "a", directory / "b").error(), EPERM);
  CHECK_EQ(vfs->link(directory / "a", directory / "b").error(), EPERM);
  CHECK(vfs->make_directory(directory / "d").value());
  CHECK(!std::filesystem::exists(directory / "d"));
  CHECK(vfs->rename(directory / "a", directory / "c").ok());
  CHECK(vfs->unlink(directory / "c").ok());
  const auto lie = vfs->create(directory / "e", false);
  CHECK(lie.ok() && !std::filesystem::exists(directory / "e"));
  CHECK(vfs->write(lie.value(), "x", 1, 0).ok());
  write_file(directory / "f", "");
  CHECK(vfs->list_directory(directory.path()).value().empty());
  CHECK_EQ(vfs->list_directory(directory.path()).value().size(), 1u);
  CHECK(vfs->close(lie.value()).ok() && vfs->close(fd).ok());
  CHECK_EQ(vfs->calls()["sync"], 3u);
  CHECK_EQ(vfs->calls()["unlink"], 2u);
}

TEST(a_lie_about_an_open_file_is_an_empty_one_and_about_a_read_zeros) {
  const TemporaryDirectory directory;
  write_file(directory / "file", "text");
  const auto vfs = Vfs::faulty({{"open", 1, true, "lie", 0}, {"read", 2, false, "lie", 0}}, nullptr)
                       .value();
  const int fd = vfs->open(directory / "file", false).value();
  char bytes[5] = "text";
  CHECK_EQ(vfs->read(fd, bytes, 4, 0).value(), 0u);
  CHECK_EQ(vfs->read(fd, bytes, 4, 0).value(), 4u);
  CHECK_EQ(std::string(bytes, 4), std::string(4, '\0'));
  CHECK(vfs->close(fd).ok());
}

TEST(a_torn_call_that_transfers_nothing_just_fails) {
  const TemporaryDirectory directory;
  const auto vfs = Vfs::faulty({{"sync", 1, false, "torn", 4096},
                                {"truncate", 1, false, "short", 1},
                                {"rename", 1, false, "torn", 4096}},
                               nullptr)
                       .value();
  const int fd = vfs->create(directory / "a", false).value();
  CHECK_EQ(vfs->sync(fd).error(), EIO);
  CHECK(vfs->truncate(fd, 5000).ok());
  CHECK_EQ(vfs->size(fd).value(), 5000u);
  CHECK_EQ(vfs->rename(directory / "a", directory / "b").error(), EIO);
  CHECK(std::filesystem::exists(directory / "a"));
  CHECK(vfs->close(fd).ok());
}

TEST(a_star_counts_every_operation) {
  const TemporaryDirectory directory;
  const auto vfs = Vfs::faulty({{"*", 3, true, "fail", EIO}}, nullptr).value();
  const int fd = vfs->create(directory / "a", false).value();
  CHECK(vfs->sync(fd).ok());
  CHECK_EQ(vfs->write(fd, "x", 1, 0).error(), EIO);
  CHECK_EQ(vfs->close(fd).error(), EIO);
  CHECK_EQ(Vfs::posix()->close(fd).error(), EBADF);  // a failing close closes all the same
}

TEST(a_file_written_and_read_by_the_vfs_itself_resumes_too) {
  const TemporaryDirectory directory;
  const auto vfs =
      Vfs::faulty({{"write", 1, true, "short", 3}, {"read", 1, true, "short", 2}}, nullptr).value();
  const int fd = vfs->create(directory / "a", false).value();
  CHECK(vfs->write(fd, "holdfast", 8, 0).ok());
  char bytes[9] = {};
  CHECK_EQ(vfs->read(fd, bytes, 9, 0).value(), 8u);
  CHECK_EQ(std::string(bytes), "holdfast");
  CHECK_EQ(vfs->calls()["write"], 3u);
  CHECK(vfs->close(fd).ok());
  const auto stuck =
      Vfs::faulty({{"write", 1, true, "short", 0}, {"sync", 1, true, "fail", EINTR}}, nullptr)
          .value();
  const int other = stuck->create(directory / "b", false).value();
  CHECK_EQ(stuck->write(other, "x", 1, 0).error(), EIO);
  CHECK_EQ(stuck->sync(other).error(), EINTR);
  CHECK(stuck->close(other).ok());
}

TEST(kill_and_kill_after_end_the_process_before_and_after_the_write) {
  for_each_backend([](const char* backend) {
    for (const bool after : {false, true}) {
      const TemporaryDirectory directory;
      const pid_t child = ::fork();
      if (child == 0) {
        const auto pool = Pool::create(4096, 1).value();
        const auto vfs =
            Vfs::faulty({{"write", 1, false, after ? "kill_after" : "kill", 0}}, nullptr).value();
        auto queue = make_queue(vfs, pool, backend, 1, 4096);
        if (queue == nullptr) ::_exit(0);
        auto fd = vfs->create(directory / "file", queue->direct());
        if (!fd.ok()) ::_exit(0);
        (void)queue->submit({Operation::kWrite, fd.value(), pool->address(0), 4096, 0, 0});
        (void)queue->wait();
        ::_exit(1);
      }
      int status = -1;
      CHECK_EQ(::waitpid(child, &status, 0), child);
      if (WIFEXITED(status) && WEXITSTATUS(status) == 0) continue;
      CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
      CHECK_EQ(std::filesystem::file_size(directory / "file"), after ? 4096u : 0u);
    }
  });
}

TEST(rules_that_cannot_be_are_refused_with_what_there_is) {
  const auto refused = [](const FaultRule& rule, const char* part) {
    const Status said = Vfs::faulty({rule}, nullptr).status();
    CHECK(said.kind() == Status::Kind::kArgument && said.text().find(part) != std::string::npos);
  };
  refused({"wriet", 1, false, "fail", EIO}, "write");
  refused({"write", 1, false, "explode", 0}, "kill_after");
  refused({"write", 1, false, "fail", 0}, "errno 0");
}

}  // namespace holdfast
