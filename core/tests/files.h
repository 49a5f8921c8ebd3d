// What the file tests share: a directory that goes away, random bytes, whole files.
#pragma once

#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "holdfast/pool.h"
#include "holdfast/queue.h"
#include "holdfast/vfs.h"

namespace holdfast {

inline constexpr std::array<const char*, 3> kBackends = {"io_uring", "direct", "buffered"};

// Below the working directory: /tmp is often a tmpfs, which is not what O_DIRECT is for.
class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string pattern = std::filesystem::current_path() / "holdfast-test-XXXXXX";
    path_ = ::mkdtemp(pattern.data());
  }
  ~TemporaryDirectory() { std::filesystem::remove_all(path_); }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline void fill_random(void* data, std::size_t size, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  auto* bytes = static_cast<unsigned char*>(data);
  for (std::size_t at = 0; at < size; at += 8) {
    const std::uint64_t word = random();
    std::memcpy(bytes + at, &word, std::min<std::size_t>(8, size - at));
  }
}

inline std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void write_file(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

// Null where the machine has no such backend: a container may forbid io_uring.
inline std::unique_ptr<Queue> make_queue(std::shared_ptr<Vfs> vfs, std::shared_ptr<Pool> pool,
                                         const char* backend, std::size_t depth,
                                         std::size_t block_bytes) {
  auto queue = Queue::create(std::move(vfs), std::move(pool), {backend, depth, block_bytes});
  return queue.ok() ? std::move(queue.value()) : nullptr;
}

inline std::vector<Completion> wait_for_all(Queue& queue) {
  std::vector<Completion> all;
  while (queue.pending() > 0) {
    const auto some = queue.wait();
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

}  // namespace holdfast
