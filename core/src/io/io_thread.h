// Threads that no signal is delivered to. Internal to the core.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <thread>
#include <utility>

namespace holdfast {

// Starts a thread with the signals of the process blocked: a Ctrl-C or a profiler's tick belongs to
// the threads of Python, and would only interrupt reads and writes here. Throws std::system_error.
template <class Body>
std::thread start_io_thread(Body body) {
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) ::sigdelset(&all, fault);
  ::pthread_sigmask(SIG_BLOCK, &all, &before);  // inherited by the thread
  const struct Restore {
    const sigset_t* mask;
    ~Restore() { ::pthread_sigmask(SIG_SETMASK, mask, nullptr); }
  } restore{&before};
  return std::thread(std::move(body));
}

}  // namespace holdfast
