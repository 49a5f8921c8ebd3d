#include "holdfast/cpus.h"

#include <string_view>

#include "bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace holdfast {

// With the GIL held: a worker cannot begin a job between the look at its id and the call.
void bind_cpus(nb::module_& module) {
  module.def(
      "wake_here",
      [](int thread) {
        const std::string cpus = wake_here(thread);
        return nb::bytes(cpus.data(), cpus.size());
      },
      "thread"_a);
  module.def(
      "run_on",
      [](const nb::bytes& cpus) { run_on(std::string_view(cpus.c_str(), cpus.size())); },
      "cpus"_a);
}

}  // namespace holdfast
