#include "holdfast/copy.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "child.h"

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

bool copied(std::byte* target, const std::byte* source, std::size_t size, std::size_t threads) {
  const Piece piece{target, source, size};
  auto missing = copy_if_there({&piece, 1}, threads);
  CHECK(missing.ok());
  return missing.value() == 1;
}

void copies_what_is_there() {
  for (const std::size_t threads : {1, 4}) {
    for (const std::size_t size : {1, 4095, 4097, 65537, (4 << 20) + 1, 33 << 20}) {
      const std::vector<std::byte> source = random_bytes(size + 9, 5);
      std::vector<std::byte> target(size + 9, std::byte{0xAA});
      CHECK(copied(target.data() + 1, source.data() + 3, size, threads));
      const auto end = static_cast<std::ptrdiff_t>(size);
      CHECK(std::equal(source.begin() + 3, source.begin() + 3 + end, target.begin() + 1));
      CHECK(target[0] == std::byte{0xAA} && target[size + 1] == std::byte{0xAA});
    }
  }
}

void tells_of_what_is_not() {
  constexpr std::size_t kSize = 32 << 20;
  std::vector<std::byte> target(kSize);
  std::byte* source = map(kSize);
  const std::size_t end = kSize / 2 + 3 * 4096;  // within a block of any size
  ::munmap(source + end, kSize - end);
  for (const std::size_t threads : {1, 4}) {
    CHECK(!copied(target.data(), source, kSize, threads));
    CHECK(!copied(target.data(), source + end - 1, 2, threads));
    CHECK(copied(target.data(), source, end, threads));
  }
  const std::vector<Piece> pieces = {{target.data(), source, 9},
                                     {target.data() + 9, nullptr, 0},
                                     {target.data() + 9, source + end - 5, 6},
                                     {target.data() + 15, source, 4}};
  auto missing = copy_if_there(pieces, 1);
  CHECK(missing.ok());
  CHECK_EQ(missing.value(), 2U);
  ::munmap(source, end);
}

TEST(memory_that_is_there_is_copied) {
  copies_what_is_there();
  auto missing = copy_if_there({}, 4);
  CHECK(missing.ok());
  CHECK_EQ(missing.value(), 0U);
}

void hashes_what_is_copied(std::size_t threads, std::size_t room_bytes) {
  const std::vector<std::size_t> sizes = {9 << 20, 0,         1,       3 << 20, (4 << 20) + 1,
                                          4 << 20, 256 << 10, 1 << 20, 5 << 20, 100};
  const std::vector<std::byte> source = random_bytes(40 << 20, 3);
  std::vector<std::byte> target(source.size()), room(room_bytes);
  std::vector<Piece> pieces;
  std::vector<std::uint64_t> seeds;
  std::size_t at = 0;
  for (const std::size_t size : sizes) {
    pieces.push_back({target.data() + at, source.data() + at, size});
    seeds.push_back(at * 3 + 1);
    at += size;
  }
  const auto end = static_cast<std::ptrdiff_t>(at);
  std::vector<std::uint64_t> checksums(sizes.size());
  std::vector<Hash128> digests(sizes.size());
  std::vector<std::uint8_t> known(sizes.size());
  const PieceHashes hashes{seeds, checksums, digests, known};
  for (const std::uint8_t hurry : {std::uint8_t{0}, std::uint8_t{1}}) {
    std::fill(target.begin(), target.end(), std::byte{0});
    auto missing = copy_and_hash_if_there(pieces, threads, hashes, room, hurry);
    CHECK(missing.ok() && missing.value() == pieces.size());
    CHECK(std::equal(target.begin(), target.begin() + end, source.begin()));
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      CHECK_EQ(known[i], hurry == 0 ? 1 : 0);
      if (known[i] == 0) continue;
      const Digest found = hash_chunk(pieces[i].source, sizes[i], seeds[i]);
      CHECK(checksums[i] == found.xxh3_64 && digests[i] == found.xxh3_128);
    }
  }
  for (const std::size_t gone : {4, 5}) {
    std::vector<Piece> others = pieces;
    others[gone].source = nullptr;
    auto missing = copy_and_hash_if_there(others, threads, hashes, room, std::uint8_t{0});
    CHECK(missing.ok());
    CHECK_EQ(missing.value(), gone);
    CHECK_EQ(known[gone], 0);
  }
}

TEST(pieces_are_hashed_as_they_are_copied) {
  for (const std::size_t threads : {1, 4}) {
    for (const std::size_t room_mib : {0, 4, 9, 16}) hashes_what_is_copied(threads, room_mib << 20);
  }
}

TEST(another_thread_may_ask_to_hurry_at_any_time) {
  const std::vector<std::byte> source = random_bytes(64 << 20, 4);
  std::vector<std::byte> target(source.size());
  std::vector<Piece> pieces;
  constexpr std::size_t kSize = 1 << 20;
  for (std::size_t at = 0; at < source.size(); at += kSize) {
    pieces.push_back({target.data() + at, source.data() + at, kSize});
  }
  const std::vector<std::uint64_t> seeds(pieces.size(), 9);
  std::vector<std::uint64_t> checksums(pieces.size());
  std::vector<Hash128> digests(pieces.size());
  std::vector<std::uint8_t> known(pieces.size());
  std::vector<std::byte> room(8 << 20);
  std::uint8_t hurry = 0;
  std::thread waits([&hurry] {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    __atomic_store_n(&hurry, std::uint8_t{1}, __ATOMIC_RELAXED);
  });
  auto missing = copy_and_hash_if_there(pieces, 2, {seeds, checksums, digests, known}, room, hurry);
  waits.join();
  CHECK(missing.ok() && missing.value() == pieces.size());
  CHECK(source == target);
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    if (known[i] == 0) continue;
    const Digest found = hash_chunk(pieces[i].source, kSize, seeds[i]);
    CHECK(checksums[i] == found.xxh3_64 && digests[i] == found.xxh3_128);
  }
}

TEST(memory_that_was_taken_away_is_told_of) {
  tells_of_what_is_not();
}

TEST(a_file_cut_shorter_under_its_mapping_is_told_of) {
  const int fd = ::memfd_create("cut", MFD_CLOEXEC);
  CHECK_EQ(::ftruncate(fd, 2 * 4096), 0);
  void* at = ::mmap(nullptr, 2 * 4096, PROT_READ, MAP_SHARED, fd, 0);
  CHECK_EQ(::ftruncate(fd, 4096), 0);
  std::vector<std::byte> target(2 * 4096);
  CHECK(!copied(target.data(), static_cast<std::byte*>(at), target.size(), 1));
  CHECK(copied(target.data(), static_cast<std::byte*>(at), 4096, 1));
  ::munmap(at, 2 * 4096);
  ::close(fd);
}

TEST(where_the_call_is_forbidden_it_is_all_the_same) {
  for (const unsigned error : {EPERM, ENOSYS}) {
    in_child([error] {
      forbid(SYS_process_vm_writev, error);
      copies_what_is_there();
      tells_of_what_is_not();
    });
  }
}

TEST(where_nothing_else_can_be_done_the_error_is_told) {
  in_child([] {
    forbid(SYS_process_vm_writev, EPERM);
    forbid(SYS_pipe2, EMFILE);
    std::byte bytes[2] = {};
    const Piece piece{&bytes[0], &bytes[1], 1};
    auto missing = copy_if_there({&piece, 1}, 1);
    CHECK(!missing.ok());
    CHECK_EQ(missing.status().error(), EMFILE);
  });
}

TEST(where_no_thread_can_be_started_the_caller_copies_everything) {
  in_child([] {
    forbid_threads();
    copies_every_piece_and_nothing_else(5);
    copies_what_is_there();
    tells_of_what_is_not();
  });
}

TEST(no_handler_of_signals_is_touched_and_a_fault_ends_the_process_at_once) {
  const int status = status_of([] {
    struct sigaction handlers[2] = {};
    ::signal(SIGSEGV, SIG_DFL);
    ::sigaction(SIGSEGV, nullptr, &handlers[0]);
    tells_of_what_is_not();
    ::sigaction(SIGSEGV, nullptr, &handlers[1]);
    if (handlers[0].sa_handler != handlers[1].sa_handler || check::failures > 0) leave(1);
    std::byte* gone = map(4096);
    ::munmap(gone, 4096);
    *const_cast<volatile std::byte*>(gone) = std::byte{1};
  });
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
}

}  // namespace holdfast
