// On which CPUs a thread runs. What the kernel forbids is not done, and nobody is told: it would
// only have been faster. Safe from any thread.
#pragma once

#include <string>
#include <string_view>

namespace holdfast {

// Lets another thread, which sleeps, wake on the CPU of this one, whose caches hold what it needs.
// `thread` is its kernel id; 0: there is none. Returns the CPUs on which this thread may run, for
// `run_on`; empty where the kernel does not say.
std::string wake_here(int thread);

// Lets this thread run on these CPUs, from now on.
void run_on(std::string_view cpus);

}  // namespace holdfast
