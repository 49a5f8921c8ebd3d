#include "io/fork_lock.h"

#include <pthread.h>

namespace holdfast {
namespace {

constinit std::mutex mutex;

// As the core is loaded, before any thread can be in it. It fails only for want of a few bytes.
[[maybe_unused]] const int registered = ::pthread_atfork(
    [] { mutex.lock(); }, [] { mutex.unlock(); }, [] { mutex.unlock(); });

}  // namespace

ForkLock::ForkLock() : held_(mutex) {}

}  // namespace holdfast
