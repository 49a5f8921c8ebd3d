#include "holdfast/copy.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "check.h"

namespace holdfast {
namespace {

std::vector<std::byte> random_bytes(std::size_t size, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(size);
  for (auto& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

void copies_every_piece_and_nothing_else(std::size_t threads) {
  const std::vector<std::size_t> sizes = {0, 1, 63, 4096, (4 << 20) + 1, 9 << 20, 17, 12 << 20};
  std::size_t total = 0;
  for (const std::size_t size : sizes) total += size + 1;  // one byte between the pieces
  const std::vector<std::byte> source = random_bytes(total, 7);
  std::vector<std::byte> target(total, std::byte{0xAA});
  std::vector<Piece> pieces;
  std::size_t at = 0;
  for (const std::size_t size : sizes) {
    pieces.push_back({target.data() + at, source.data() + at, size});
    at += size + 1;
  }
  copy_pieces(pieces, threads);
  at = 0;
  for (const std::size_t size : sizes) {
    const auto begin = static_cast<std::ptrdiff_t>(at);
    const auto end = begin + static_cast<std::ptrdiff_t>(size);
    CHECK(std::equal(source.begin() + begin, source.begin() + end, target.begin() + begin));
    CHECK(target[at + size] == std::byte{0xAA});
    at += size + 1;
  }
}

}  // namespace

TEST(every_piece_is_copied_and_nothing_else) {
  for (const std::size_t threads : {0, 1, 2, 5}) copies_every_piece_and_nothing_else(threads);
}

TEST(no_pieces_are_copied_at_once) {
  copy_pieces({}, 4);
}

std::byte* map(std::size_t size) {
  void* at = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return static_cast<std::byte*>(at);
}

TEST(memory_that_is_there_is_copied) {
  const std::vector<std::byte> source = random_bytes(3 << 20, 5);
  std::vector<std::byte> target(source.size());
  CHECK(copy_if_there(target.data(), source.data(), source.size()));
  CHECK(source == target);
}

TEST(memory_that_was_taken_away_is_told_of) {
  constexpr std::size_t kSize = 4 << 20;
  std::vector<std::byte> target(kSize);
  std::byte* source = map(kSize);
  ::munmap(source + kSize / 2, kSize / 2);
  for (int again = 0; again < 3; ++again) CHECK(!copy_if_there(target.data(), source, kSize));
  CHECK(copy_if_there(target.data(), source, kSize / 2));
  ::munmap(source, kSize / 2);
}

TEST(a_fault_elsewhere_ends_the_process_as_ever) {
  const pid_t child = ::fork();
  if (child == 0) {
    std::byte* target = map(4096);
    const std::vector<std::byte> source(4096);
    ::munmap(target, 4096);
    copy_if_there(target, source.data(), source.size());
    ::_exit(0);
  }
  int status = 0;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
}

}  // namespace holdfast
