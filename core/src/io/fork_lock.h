// The one mutex of the core that threads wait for outside of a Queue: it guards what is short. A
// fork() waits for it, so a child finds it free, and what it guards whole. Never hold it during a
// system call that may take long, nor take it twice. Internal to the core.
#pragma once

#include <mutex>

namespace holdfast {

class ForkLock {
 public:
  ForkLock();

 private:
  std::lock_guard<std::mutex> held_;
};

}  // namespace holdfast
