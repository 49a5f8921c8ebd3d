// On which CPUs a thread runs. Where the kernel forbids a change, nothing changes and nobody is
// told: all of this only saves time. Safe from any thread.
#pragma once

#include <string>
#include <string_view>

namespace holdfast {

// Lets another thread, which sleeps, wake on the CPU of this one: the caches there hold its data.
// `thread` is its kernel id; 0: there is none. Returns the CPUs on which this thread may run, for
// `run_on`; empty where the kernel does not say.
std::string wake_here(int thread);

// Lets this thread run on these CPUs, from now on.
void run_on(std::string_view cpus);

}  // namespace holdfast
