// What the kernel refuses of an open file, and where a program has closed its standard streams.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <thread>

#include "check.h"
#include "files.h"
#include "holdfast/vfs.h"

namespace {

int fstat_error = 0, fallocate_error = 0;  // what the next calls fail with; 0: they do not

}  // namespace

extern "C" {
int __real_fstat(int fd, struct stat* found);
int __real_fallocate(int fd, int mode, off_t offset, off_t size);

int __wrap_fstat(int fd, struct stat* found) {
  if (fstat_error == 0) return __real_fstat(fd, found);
  errno = fstat_error;
  return -1;
}

int __wrap_fallocate(int fd, int mode, off_t offset, off_t size) {
  if (fallocate_error == 0) return __real_fallocate(fd, mode, offset, size);
  errno = fallocate_error;
  return -1;
}
}

namespace holdfast {

// Or a restore would take the checkpoint for damaged, and an older one instead.
TEST(a_file_that_cannot_be_looked_at_is_not_said_to_be_none) {
  const TemporaryDirectory directory;
  write_file(directory / "a", "x");
  for (const int error : {EIO, ESTALE, EPERM}) {
    fstat_error = error;
    const auto opened = Vfs::posix()->open(directory / "a", false);
    const auto beneath = Vfs::posix()->open_beneath(directory.path(), "a", false);
    fstat_error = 0;
    CHECK_EQ(opened.status().error(), error);
    CHECK_EQ(beneath.status().error(), error);
  }
}

TEST(room_that_cannot_be_made_in_advance_is_made_by_writing) {
  const TemporaryDirectory directory;
  const auto vfs = Vfs::posix();
  const auto fd = vfs->create(directory / "a", false);
  if (!CHECK(fd.ok())) return;
  for (const int error : {EOPNOTSUPP, ENOSYS, EPERM, ENOSPC}) {
    fallocate_error = error;
    const Status status = vfs->allocate(fd.value(), 4096);
    fallocate_error = 0;
    CHECK_EQ(status.error(), error == ENOSPC ? ENOSPC : 0);
  }
  CHECK(vfs->close(fd.value()).ok());
}

// What the program, or a library in it, writes to its stderr then is not written to our files.
TEST(no_file_takes_the_place_of_a_closed_stderr) {
  const TemporaryDirectory directory;
  const int kept = ::fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 10);
  ::close(STDERR_FILENO);
  const auto made = Vfs::posix()->create(directory / "a", false);
  const auto opened = Vfs::posix()->open(directory / "a", false);
  const bool is_free = ::fcntl(STDERR_FILENO, F_GETFD) == -1;
  ::dup2(kept, STDERR_FILENO);
  ::close(kept);
  CHECK(is_free);
  if (!CHECK(made.ok()) || !CHECK(opened.ok())) return;
  CHECK(made.value() > STDERR_FILENO && opened.value() > STDERR_FILENO);
  CHECK((::fcntl(made.value(), F_GETFD) & FD_CLOEXEC) != 0);
  CHECK(Vfs::posix()->close(made.value()).ok());
  CHECK(Vfs::posix()->close(opened.value()).ok());
}

// Another thread wrote into a new file that had this place for a moment.
TEST(no_file_has_the_place_of_a_closed_stderr_for_a_moment) {
  constexpr int kFiles = 2000;
  const TemporaryDirectory directory;
  const auto vfs = Vfs::posix();
  const int kept = ::fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 10);
  std::atomic<bool> is_over = false;
  std::thread library([&] {
    while (!is_over) (void)!::write(STDERR_FILENO, "says", 4);
  });
  ::close(STDERR_FILENO);
  std::uint64_t written = 0;
  for (int n = 0; n < kFiles; ++n) {
    const auto made = vfs->create(directory / "a", false);
    written += bytes_after(made.value(), 0);
    (void)vfs->close(made.value());
    (void)vfs->unlink(directory / "a");
  }
  is_over = true;
  library.join();
  ::dup2(kept, STDERR_FILENO);
  ::close(kept);
  CHECK_EQ(written, 0u);
}

}  // namespace holdfast
