// Opens what lies below a directory: no part of the name may be a link or lead out of it, whoever
// swaps directories meanwhile. Thread-safe.
#pragma once

#include <string>

namespace holdfast {

// A descriptor of `name` below `root`, or -errno: ELOOP or ENOTDIR where a part is a link, EXDEV or
// EINVAL where it leads out. `root` itself may be reached through links; an empty name is `root`.
int open_beneath(const std::string& root, const std::string& name, int flags);

// The same for kernels before 5.6, and sandboxes that refuse openat2: one part after the other.
int walk_beneath(const std::string& root, const std::string& name, int flags);

}  // namespace holdfast
