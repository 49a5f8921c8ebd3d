// probe() finds what works, and a full disk is reported, not forgotten.
#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <unistd.h>

#include <cerrno>

#include "check.h"
#include "child.h"
#include "files.h"
#include "holdfast/queue.h"

namespace holdfast {

TEST(probe_names_a_backend_that_works_and_leaves_nothing_behind) {
  const TemporaryDirectory directory;
  ::unsetenv("HOLDFAST_IO");
  const auto found = probe(directory.path(), nullptr);
  if (!CHECK(found.ok())) return;
  std::fprintf(stderr, "  %s\n", found.value().c_str());
  CHECK_EQ(probe(directory.path(), nullptr).value(), found.value());
  CHECK(std::filesystem::is_empty(directory.path()));
  CHECK_EQ(probe(directory / "none", nullptr).status().error(), ENOENT);
}

TEST(probe_falls_back_when_a_backend_fails) {
  const TemporaryDirectory directory;
  const auto best = probe(directory.path(), Vfs::recording()).value();
  if (best == "buffered") return check::skip("there is nothing to fall back from");
  const auto lame = Vfs::faulty({{"write", 1, false, "fail", EINVAL}}, nullptr).value();
  CHECK_EQ(probe(directory.path(), lame).value(), best == "io_uring" ? "direct" : "buffered");
  const auto liar = Vfs::faulty({{"write", 1, false, "lie", 0}}, nullptr).value();
  CHECK(probe(directory.path(), liar).value() != best);
  const auto dead = Vfs::faulty({{"write", 1, true, "fail", EROFS}}, nullptr).value();
  CHECK_EQ(probe(directory.path(), dead).status().error(), EROFS);
  CHECK(Vfs::recording()->trace().empty());
}

TEST(probe_falls_back_where_no_ring_can_be_made) {
  const TemporaryDirectory directory;
  in_child([&] {
    forbid(SYS_io_uring_setup, EPERM);
    CHECK(probe(directory.path(), Vfs::recording()).value() != "io_uring");
  });
}

// As some NFS, FUSE and overlay file systems.
TEST(probe_makes_a_named_file_where_none_can_be_without) {
  const TemporaryDirectory directory;
  const auto best = probe(directory.path(), Vfs::recording()).value();
  const auto forbid_unnamed = [](unsigned error) {
    forbid_where(SYS_openat, 2, O_TMPFILE & ~O_DIRECTORY, error);
  };
  for (const unsigned error : {EOPNOTSUPP, EISDIR, ENOENT}) {
    in_child([&] {
      forbid_unnamed(error);
      CHECK_EQ(probe(directory.path(), Vfs::recording()).value(), best);
      CHECK(std::filesystem::is_empty(directory.path()));
    });
  }
  in_child([&] {
    forbid_unnamed(EACCES);
    CHECK_EQ(probe(directory.path(), Vfs::recording()).status().error(), EACCES);
  });
}

TEST(probe_of_a_directory_where_nothing_may_be_made_says_why) {
  const TemporaryDirectory directory;
  in_child([&] {
    forbid_where(SYS_openat, 2, O_TMPFILE & ~O_DIRECTORY, EOPNOTSUPP);
    forbid_where(SYS_openat, 2, O_CREAT, EROFS);
    const Status status = probe(directory.path(), Vfs::recording()).status();
    if (CHECK_EQ(status.error(), EROFS)) CHECK(status.text().find("probe") != std::string::npos);
  });
}

TEST(holdfast_io_names_a_backend_or_is_refused) {
  ::setenv("HOLDFAST_IO", "buffered", 1);
  CHECK_EQ(probe("/nonexistent", nullptr).value(), "buffered");
  ::setenv("HOLDFAST_IO", "floppy", 1);
  CHECK(probe(".", nullptr).status().kind() == Status::Kind::kArgument);
  ::setenv("HOLDFAST_IO", "", 1);
  CHECK(probe(".", nullptr).ok());
  ::unsetenv("HOLDFAST_IO");
}

TEST(a_device_that_is_full_fails_every_request) {
  const auto pool = Pool::create(64 << 10, 4).value();
  auto queue = make_queue(Vfs::posix(), pool, "buffered", 2, 4096);
  const int fd = ::open("/dev/full", O_WRONLY | O_CLOEXEC);
  if (fd < 0) return check::skip("no /dev/full");
  for (std::size_t slot = 0; slot < 4; ++slot) {
    CHECK(queue->submit({Operation::kWrite, fd, pool->address(slot), 64 << 10, 0, slot}).ok());
  }
  const auto completions = wait_for_all(*queue);
  CHECK_EQ(completions.size(), 4u);
  for (const Completion& completion : completions) CHECK_EQ(completion.error, ENOSPC);
  ::close(fd);
}

// A full tmpfs writes short first, then says ENOSPC, and its fsync says nothing.
TEST(a_file_system_that_fills_up_reports_it_through_every_backend) {
  const TemporaryDirectory directory;
  if (::unshare(CLONE_NEWNS) != 0) return check::skip("cannot mount here");
  ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr);
  if (::mount("tmpfs", directory.path().c_str(), "tmpfs", 0, "size=1m") != 0) {
    return check::skip("cannot mount here");
  }
  const auto pool = Pool::create(2 << 20, 1).value();
  for (const char* backend : kBackends) {
    auto queue = make_queue(Vfs::posix(), pool, backend, 4, 300 << 10);
    if (queue == nullptr) continue;
    auto fd = Vfs::posix()->create(directory / backend, queue->direct());
    if (!fd.ok()) {
      check::skip(backend);
      continue;
    }
    CHECK(queue->submit({Operation::kWrite, fd.value(), pool->address(0), 2 << 20, 0, 1}).ok());
    const Completion done = queue->wait().at(0);
    CHECK_EQ(done.error, ENOSPC);
    CHECK(done.bytes < (2u << 20));
    CHECK_EQ(Vfs::posix()->allocate(fd.value(), 2 << 20).error(), ENOSPC);
    CHECK(Vfs::posix()->close(fd.value()).ok());
    CHECK(Vfs::posix()->unlink(directory / backend).ok());
  }
  // A ring that is closed lets go of its files a little later.
  ::umount2(directory.path().c_str(), MNT_DETACH);
}

}  // namespace holdfast
