// Memory that a thread keeps: what a codec needs for a chunk is not allocated for each.
#pragma once

#include <cstddef>
#include <memory>

namespace holdfast {

// Returns room for `count` of T, the same for each Tag as long as it suffices; undefined contents.
template <class T, class Tag>
T* scratch(std::size_t count) {
  thread_local std::unique_ptr<T[]> memory;
  thread_local std::size_t held = 0;
#ifdef HOLDFAST_SANITIZE
  held = 0;  // only so a sanitizer sees where what is in use ends
#endif
  if (held < count) {
    memory.reset(new T[count]);
    held = count;
  }
  return memory.get();
}

}  // namespace holdfast
