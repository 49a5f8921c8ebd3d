// The floating-point environment that the docs promise, whatever the process has set.
#pragma once

#include <cfenv>

namespace holdfast {

// While it lives this thread rounds to the nearest and keeps denormals: a thread takes over what
// its maker has set (`torch.set_flush_denormal`, -ffast-math of some library), and decoding would
// give other bits.
class DefaultFloats {
 public:
  DefaultFloats() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloats() { std::fesetenv(&before_); }
  DefaultFloats(const DefaultFloats&) = delete;
  DefaultFloats& operator=(const DefaultFloats&) = delete;

 private:
  std::fenv_t before_;
};

}  // namespace holdfast
