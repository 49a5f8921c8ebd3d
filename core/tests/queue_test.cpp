// Every backend moves the same bytes.
#include "holdfast/queue.h"

#include <sys/resource.h>

#include <algorithm>
#include <map>

#include "check.h"
#include "child.h"
#include "files.h"

namespace holdfast {
namespace {

constexpr std::size_t kSlotBytes = 512 << 10;
constexpr std::size_t kSlots = 6;

struct Piece {
  std::uint64_t offset;
  std::size_t size;  // without the padding
};

// Pieces of random sizes, most of them no multiple of anything, each from a multiple of 4 KiB on.
std::vector<Piece> random_pieces(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<Piece> pieces;
  std::uint64_t offset = 0;
  for (int index = 0; index < 24; ++index) {
    const std::size_t size = 1 + random() % kSlotBytes;
    pieces.push_back({offset, size});
    offset += (size + kBlockAlignBytes - 1) / kBlockAlignBytes * kBlockAlignBytes;
  }
  std::shuffle(pieces.begin(), pieces.end(), random);
  return pieces;
}

std::size_t padded(std::size_t size) {
  return (size + kBlockAlignBytes - 1) / kBlockAlignBytes * kBlockAlignBytes;
}

// Runs all pieces through the queue, as many at once as there are slots.
template <class Before, class After>
void run(Queue& queue, const Pool& pool, const std::vector<Piece>& pieces, Operation operation,
         int fd, Before before, After after) {
  std::vector<std::size_t> free_slots;
  for (std::size_t slot = 0; slot < pool.slots(); ++slot) free_slots.push_back(slot);
  std::map<std::uint64_t, std::pair<Piece, std::size_t>> open;
  for (std::size_t next = 0; next < pieces.size() || !open.empty();) {
    while (next < pieces.size() && !free_slots.empty()) {
      const std::size_t slot = free_slots.back();
      free_slots.pop_back();
      const Piece& piece = pieces[next];
      before(piece, pool.address(slot));
      open[next] = {piece, slot};
      CHECK(
          queue.submit({operation, fd, pool.address(slot), padded(piece.size), piece.offset, next})
              .ok());
      ++next;
    }
    CHECK_EQ(queue.pending(), open.size());
    for (const Completion& completion : queue.wait()) {
      const auto [piece, slot] = open.at(completion.tag);
      open.erase(completion.tag);
      free_slots.push_back(slot);
      CHECK_EQ(completion.error, 0);
      CHECK_EQ(completion.bytes, padded(piece.size));
      after(piece, pool.address(slot));
    }
  }
  CHECK_EQ(queue.pending(), 0u);
  CHECK(queue.wait().empty());
}

void fill(const Piece& piece, std::byte* data) {
  std::memset(data, 0, padded(piece.size));
  fill_random(data, piece.size, piece.offset);
}

void compare(const Piece& piece, std::byte* data) {
  std::vector<std::byte> expected(padded(piece.size));
  fill(piece, expected.data());
  CHECK(std::equal(expected.begin(), expected.end(), data));
}

// The bytes of a file written and read back through `backend`; empty where there is no such one.
std::string written(const std::string& path, const char* backend, std::size_t depth,
                    std::size_t block_bytes, const std::vector<Piece>& pieces) {
  const auto vfs = Vfs::posix();
  const auto pool = Pool::create(kSlotBytes, kSlots).value();
  auto queue = make_queue(vfs, pool, backend, depth, block_bytes);
  if (queue == nullptr) return "";
  const auto created = vfs->create(path, queue->direct());
  if (!created.ok()) return "";  // this file system takes no O_DIRECT
  const int fd = created.value();
  CHECK_EQ(queue->backend(), backend);
  run(*queue, *pool, pieces, Operation::kWrite, fd, fill, [](auto&, auto*) {});
  run(
      *queue, *pool, pieces, Operation::kRead, fd,
      [](auto& piece, auto* data) { std::memset(data, 0xee, padded(piece.size)); }, compare);
  queue->close();
  queue->close();
  CHECK(!queue->submit({Operation::kWrite, fd, pool->address(0), 4096, 0, 0}).ok());
  CHECK(vfs->close(fd).ok());
  std::string bytes = read_file(path);
  CHECK(vfs->unlink(path).ok());
  return bytes;
}

}  // namespace

TEST(every_backend_writes_the_same_file_and_reads_it_back) {
  const TemporaryDirectory directory;
  constexpr std::size_t kBlockSizes[] = {4096, 64 << 10, 4 << 20};
  constexpr std::size_t kDepths[] = {1, 7, 32};
  for (const std::size_t block_bytes : kBlockSizes) {
    for (const std::size_t depth : kDepths) {
      const auto pieces = random_pieces(block_bytes + depth);
      const std::string expected =
          written(directory / "file", "buffered", depth, block_bytes, pieces);
      CHECK(!expected.empty());
      for (const char* backend : {"direct", "io_uring"}) {
        const std::string found = written(directory / "file", backend, depth, block_bytes, pieces);
        if (found.empty()) {
          check::skip(backend);
        } else {
          CHECK(found == expected);
        }
      }
    }
  }
}

TEST(a_read_past_the_end_gives_what_there_is) {
  const TemporaryDirectory directory;
  const std::string bytes(300001, 'x');
  write_file(directory / "file", bytes);
  for (const char* backend : kBackends) {
    const auto pool = Pool::create(512 << 10, 1).value();
    auto queue = make_queue(Vfs::posix(), pool, backend, 4, 64 << 10);
    if (queue == nullptr) continue;
    auto fd = Vfs::posix()->open(directory / "file", queue->direct());
    if (!fd.ok()) continue;
    CHECK(queue->submit({Operation::kRead, fd.value(), pool->address(0), 512 << 10, 0, 1}).ok());
    const auto whole = queue->wait();
    CHECK_EQ(whole.at(0).bytes, bytes.size());
    CHECK_EQ(whole.at(0).error, 0);
    CHECK(std::memcmp(pool->address(0), bytes.data(), bytes.size()) == 0);
    CHECK(queue->submit({Operation::kRead, fd.value(), pool->address(0), 4096, 1 << 20, 2}).ok());
    CHECK_EQ(queue->wait().at(0).bytes, 0u);
    CHECK(queue->submit({Operation::kRead, fd.value(), pool->address(0), 0, 0, 3}).ok());
    CHECK_EQ(queue->wait().at(0).tag, 3u);
    CHECK(Vfs::posix()->close(fd.value()).ok());
  }
}

TEST(a_cached_request_of_one_block_is_carried_out_before_it_is_waited_for) {
  const TemporaryDirectory directory;
  const auto pool = Pool::create(64 << 10, 4).value();
  fill_random(pool->address(0), 64 << 10, 1);
  for (const char* backend : kBackends) {
    auto queue = make_queue(Vfs::posix(), pool, backend, 4, 64 << 10);
    if (queue == nullptr) continue;
    const int fd = Vfs::posix()->create(directory / backend, false).value();
    CHECK(queue->submit({Operation::kWrite, fd, pool->address(0), 64 << 10, 0, 1}, true).ok());
    CHECK_EQ(std::filesystem::file_size(directory / backend), 64u << 10);
    CHECK_EQ(queue->pending(), 1u);
    CHECK_EQ(queue->wait().at(0).bytes, 64u << 10);
    CHECK_EQ(queue->pending(), 0u);
    CHECK(queue->submit({Operation::kRead, fd, pool->address(1), 64 << 10, 4096, 2}, true).ok());
    CHECK(std::memcmp(pool->address(1), pool->address(0) + 4096, 60 << 10) == 0);
    CHECK_EQ(queue->wait().at(0).bytes, 60u << 10);  // the file ends there
    CHECK(queue->submit({Operation::kWrite, -1, pool->address(0), 4096, 0, 3}, true).ok());
    CHECK_EQ(queue->wait().at(0).error, EBADF);
    // Where another is pending, a thread takes it.
    CHECK(queue->submit({Operation::kWrite, fd, pool->address(0), 64 << 10, 0, 4}).ok());
    CHECK(queue->submit({Operation::kWrite, fd, pool->address(2), 4096, 64 << 10, 5}, true).ok());
    CHECK_EQ(wait_for_all(*queue).size(), 2u);
    CHECK_EQ(std::filesystem::file_size(directory / backend), 68u << 10);
    CHECK(Vfs::posix()->close(fd).ok());
  }
}

// One queue has files of both kinds at the same time: what is cached needs no alignment, and has
// threads of its own.
TEST(cached_files_and_others_are_written_and_read_side_by_side) {
  constexpr std::size_t kBytes = (3 << 20) + 5;  // of the cached file: many blocks
  const TemporaryDirectory directory;
  const auto pool = Pool::create(4 << 20, 3).value();
  for (const char* backend : kBackends) {
    auto queue = make_queue(Vfs::posix(), pool, backend, 4, 64 << 10);
    if (queue == nullptr) continue;
    const auto cached = Vfs::posix()->create(directory / backend + "-cached", false);
    const auto other = Vfs::posix()->create(directory / backend, queue->direct());
    if (!other.ok()) continue;
    fill_random(pool->address(0), 4 << 20, 1);
    fill_random(pool->address(1), 4 << 20, 2);
    for (std::uint64_t part = 0; part < 4; ++part) {
      const std::size_t begin = part << 20;
      const std::size_t size = std::min<std::size_t>(1 << 20, kBytes - begin);
      CHECK(queue
                ->submit({Operation::kWrite, cached.value(), pool->address(0) + begin, size, begin,
                          2 * part},
                         true)
                .ok());
      CHECK(queue
                ->submit({Operation::kWrite, other.value(), pool->address(1) + begin, 1 << 20,
                          begin, 2 * part + 1})
                .ok());
    }
    for (const Completion& completion : wait_for_all(*queue)) CHECK_EQ(completion.error, 0);
    CHECK_EQ(std::filesystem::file_size(directory / backend + "-cached"), kBytes);
    CHECK(std::memcmp(read_file(directory / backend).data(), pool->address(1), 4 << 20) == 0);
    CHECK(queue->submit({Operation::kRead, cached.value(), pool->address(2), kBytes, 0, 1}, true)
              .ok());
    CHECK_EQ(queue->wait().at(0).bytes, kBytes);
    CHECK(std::memcmp(pool->address(2), pool->address(0), kBytes) == 0);
    // Of a failure the other file learns nothing.
    CHECK(queue->submit({Operation::kWrite, -1, pool->address(0), 1 << 20, 0, 1}, true).ok());
    CHECK(queue->submit({Operation::kRead, other.value(), pool->address(2), 1 << 20, 0, 2}).ok());
    for (const Completion& completion : wait_for_all(*queue)) {
      CHECK_EQ(completion.error, completion.tag == 1 ? EBADF : 0);
    }
    CHECK(Vfs::posix()->close(cached.value()).ok());
    CHECK(Vfs::posix()->close(other.value()).ok());
  }
}

TEST(memory_outside_the_pool_is_written_too) {
  const TemporaryDirectory directory;
  const auto pool = Pool::create(4096, 2).value();
  const auto other = Pool::create(64 << 10, 1).value();
  fill_random(other->address(0), 64 << 10, 1);
  for (const char* backend : kBackends) {
    auto queue = make_queue(Vfs::posix(), pool, backend, 2, 16 << 10);
    if (queue == nullptr) continue;
    auto fd = Vfs::posix()->create(directory / backend, queue->direct());
    if (!fd.ok()) continue;
    CHECK(queue->submit({Operation::kWrite, fd.value(), other->address(0), 64 << 10, 0, 1}).ok());
    CHECK_EQ(queue->wait().at(0).error, 0);
    CHECK(std::memcmp(read_file(directory / backend).data(), other->address(0), 64 << 10) == 0);
    CHECK(Vfs::posix()->close(fd.value()).ok());
  }
}

// Registration of the pool fails then, and must cost no more than speed.
TEST(a_ring_works_where_the_pool_may_not_be_locked) {
  const TemporaryDirectory directory;
  if (make_queue(Vfs::posix(), Pool::create(4096, 1).value(), "io_uring", 1, 4096) == nullptr) {
    return check::skip("no io_uring");
  }
  const auto fd = Vfs::posix()->create(directory / "file", true);
  if (!fd.ok()) return check::skip("no O_DIRECT");
  const pid_t child = ::fork();
  if (child == 0) {
    const rlimit for_the_ring_only{64 << 10, 64 << 10};
    ::setrlimit(RLIMIT_MEMLOCK, &for_the_ring_only);
    if (::geteuid() == 0 && ::setuid(65534) != 0) ::_exit(2);  // root may lock all the same
    const auto pool = Pool::create(64 << 10, 64).value();
    auto queue = make_queue(Vfs::posix(), pool, "io_uring", 4, 16 << 10);
    if (queue == nullptr) ::_exit(3);
    const Request request{Operation::kWrite, fd.value(), pool->address(1), 64 << 10, 0, 1};
    ::_exit(queue->submit(request).ok() && queue->wait().at(0).error == 0 ? 0 : 4);
  }
  int status = -1;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  CHECK_EQ(std::filesystem::file_size(directory / "file"), 64u << 10);
  CHECK(Vfs::posix()->close(fd.value()).ok());
}

TEST(a_bad_request_or_option_is_an_argument_error) {
  const auto pool = Pool::create(4096, 1).value();
  const auto vfs = Vfs::posix();
  using Kind = Status::Kind;
  CHECK(Queue::create(vfs, pool, {"odd", 1, 4096}).status().kind() == Kind::kArgument);
  CHECK(Queue::create(vfs, pool, {"direct", 0, 4096}).status().kind() == Kind::kArgument);
  CHECK(Queue::create(vfs, pool, {"direct", 1025, 4096}).status().kind() == Kind::kArgument);
  CHECK(Queue::create(vfs, pool, {"direct", 1, 0}).status().kind() == Kind::kArgument);
  CHECK(Queue::create(vfs, pool, {"direct", 1, 5000}).status().kind() == Kind::kArgument);
  CHECK(Queue::create(vfs, pool, {"direct", 1, 2u << 30}).status().kind() == Kind::kArgument);
  auto queue = make_queue(vfs, pool, "direct", 1, 4096);
  std::byte* data = pool->address(0);
  CHECK(queue->submit({Operation::kWrite, 0, data + 1, 4096, 0, 0}).kind() == Kind::kArgument);
  CHECK(queue->submit({Operation::kWrite, 0, data, 100, 0, 0}).kind() == Kind::kArgument);
  CHECK(queue->submit({Operation::kWrite, 0, data, 4096, 512, 0}).kind() == Kind::kArgument);
  CHECK_EQ(queue->pending(), 0u);
}

TEST(a_bad_descriptor_fails_its_request_and_no_other) {
  const TemporaryDirectory directory;
  const auto pool = Pool::create(64 << 10, 2).value();
  for (const char* backend : kBackends) {
    auto queue = make_queue(Vfs::posix(), pool, backend, 2, 4096);
    if (queue == nullptr) continue;
    auto fd = Vfs::posix()->create(directory / backend, queue->direct());
    if (!fd.ok()) continue;
    CHECK(queue->submit({Operation::kWrite, -1, pool->address(0), 64 << 10, 0, 1}).ok());
    CHECK(queue->submit({Operation::kWrite, fd.value(), pool->address(1), 64 << 10, 0, 2}).ok());
    for (const Completion& completion : wait_for_all(*queue)) {
      CHECK_EQ(completion.error, completion.tag == 1 ? EBADF : 0);
      CHECK_EQ(completion.bytes, completion.tag == 1 ? 0u : 64u << 10);
    }
    CHECK(Vfs::posix()->close(fd.value()).ok());
  }
}

TEST(a_queue_destroyed_or_closed_with_requests_in_flight_lets_go_of_the_memory) {
  const TemporaryDirectory directory;
  for (const char* backend : kBackends) {
    for (int round = 0; round < 20; ++round) {
      auto pool = Pool::create(1 << 20, 4).value();
      auto queue = make_queue(Vfs::posix(), pool, backend, 3, 64 << 10);
      if (queue == nullptr) continue;
      const std::string path = directory / backend + std::to_string(round);
      auto fd = Vfs::posix()->create(path, queue->direct());
      const auto cached = Vfs::posix()->create(path + "-cached", false);
      if (!fd.ok()) continue;
      for (std::size_t slot = 0; slot < 4; ++slot) {
        Request request{Operation::kWrite, fd.value(), pool->address(slot), 1 << 20, slot << 20,
                        slot};
        CHECK(queue->submit(request).ok());
        request.fd = cached.value();
        CHECK(queue->submit(request, true).ok());
      }
      if (round % 2 == 1) {
        queue->close();
        CHECK_EQ(wait_for_all(*queue).size(), 8u);
        CHECK_EQ(std::filesystem::file_size(path), 4u << 20);
        CHECK_EQ(std::filesystem::file_size(path + "-cached"), 4u << 20);
      }
      queue.reset();
      pool.reset();
      CHECK(Vfs::posix()->close(fd.value()).ok());
      CHECK(Vfs::posix()->close(cached.value()).ok());
    }
  }
}

TEST(a_child_of_fork_can_destroy_the_queue_it_inherited) {
  const auto pool = Pool::create(4096, 1).value();
  for (const char* backend : kBackends) {
    auto queue = make_queue(Vfs::posix(), pool, backend, 4, 4096);
    if (queue == nullptr) continue;
    // So that it has the threads of cached files too.
    CHECK(queue->submit({Operation::kWrite, -1, pool->address(0), 4096, 0, 1}).ok());
    CHECK(queue->submit({Operation::kWrite, -1, pool->address(0), 4096, 0, 2}, true).ok());
    CHECK_EQ(wait_for_all(*queue).size(), 2u);
    in_child([&] {
      queue->close();
      queue.reset();
    });
  }
}

TEST(a_queue_without_a_thread_or_a_ring_is_an_error_that_says_so) {
  const auto pool = Pool::create(4096, 1).value();
  const auto fails = [&](const char* backend, int error, const char* part) {
    const Status status = Queue::create(Vfs::posix(), pool, {backend, 2, 4096}).status();
    CHECK_EQ(status.error(), error);
    CHECK(status.text().find(part) != std::string::npos);
  };
  in_child([&] {
    forbid_threads();
    for (const char* backend : kBackends) fails(backend, EAGAIN, "start a thread");
  });
  in_child([&] {
    forbid(SYS_eventfd2, EMFILE);
    fails("io_uring", EMFILE, "make an eventfd");
  });
  // EINVAL: as of a kernel that knows none of the flags, and then not even none.
  for (const int error : {EPERM, ENOSYS, EINVAL}) {
    in_child([&] {
      forbid(SYS_io_uring_setup, static_cast<unsigned>(error));
      fails("io_uring", error, "make an io_uring");
    });
  }
}

// Writes and reads through a ring whose buffers could not be registered.
TEST(a_ring_works_where_no_memory_is_registered) {
  const TemporaryDirectory directory;
  if (make_queue(Vfs::posix(), Pool::create(4096, 1).value(), "io_uring", 1, 4096) == nullptr) {
    return check::skip("no io_uring");
  }
  in_child([&] {
    forbid(SYS_io_uring_register, ENOMEM);
    CHECK(!written(directory / "file", "io_uring", 3, 64 << 10, random_pieces(1)).empty());
  });
}

}  // namespace holdfast
