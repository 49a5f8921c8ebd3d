// A file descriptor that is closed at the end. Internal to the core.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace holdfast {

class Descriptor {
 public:
  // -1: none.
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }

  int get() const { return fd_; }
  // Whoever calls this closes it.
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

// Takes the places of stdin, stdout and stderr while it lives, where a program has closed them:
// what is opened meanwhile is not what others take for these and write to, or replace.
class StandardPlaces {
 public:
  StandardPlaces() {
    for (Descriptor& taken : taken_) {
      if (are_open()) return;
      Descriptor null(::open("/dev/null", O_RDWR | O_CLOEXEC));
      if (null.get() < 0 || null.get() > STDERR_FILENO) return;
      taken = std::move(null);
    }
  }

 private:
  static bool are_open() {
    int fd = STDIN_FILENO;
    while (fd <= STDERR_FILENO && ::fcntl(fd, F_GETFD) >= 0) ++fd;
    return fd > STDERR_FILENO;
  }

  Descriptor taken_[STDERR_FILENO + 1];
};

// Moves what has been opened to a place of its own, if it is in such a one; or returns -errno.
inline int out_of_standard_places(int fd) {
  if (fd < 0 || fd > STDERR_FILENO) return fd;
  const Descriptor old(fd);
  const int moved = ::fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  return moved < 0 ? -errno : moved;
}

}  // namespace holdfast
