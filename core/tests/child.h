// Children of fork(), and system calls that are forbidden in them, as in a container or under an
// older kernel.
#pragma once

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <iterator>

#include "check.h"

#ifdef HOLDFAST_COVERAGE
extern "C" void __gcov_dump();
#endif

namespace holdfast {

// Ends a child at once. What it ran counts.
[[noreturn]] inline void leave(int status) {
#ifdef HOLDFAST_COVERAGE
  ::__gcov_dump();
#endif
  ::_exit(status);
}

// Runs `body` in a child; returns how that ended.
template <class Body>
int status_of(Body body) {
  const pid_t child = ::fork();
  if (child == 0) {
    check::failures = 0;
    body();
    leave(check::failures == 0 ? 0 : 1);
  }
  int status = -1;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  return status;
}

template <class Body>
void in_child(Body body) {
  CHECK_EQ(status_of(body), 0);
}

// From now on the call fails in this process, where its argument has one of the bits.
inline void forbid_where(unsigned call, unsigned argument, unsigned bits, unsigned error) {
  const auto place = static_cast<unsigned>(offsetof(seccomp_data, args)) + 8 * argument;
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, place),  // the lower half
      BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, bits, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{std::size(filter), filter};
  CHECK_EQ(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
  CHECK_EQ(::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program), 0);
}

// From now on the call fails in this process.
inline void forbid(unsigned call, unsigned error) {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{std::size(filter), filter};
  CHECK_EQ(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
  CHECK_EQ(::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program), 0);
}

// As where a limit of processes is reached.
inline void forbid_threads() {
  forbid(SYS_clone3, EAGAIN);
  forbid(SYS_clone, EAGAIN);
}

}  // namespace holdfast
