// A ring that breaks under requests in flight: the linker puts the functions below in the place of
// liburing's. The kernel fills a request's memory when the test writes to its pipe, and not before.
#include <fcntl.h>
#include <liburing.h>

#include <atomic>
#include <chrono>
#include <future>

#include "check.h"
#include "files.h"

namespace holdfast {
namespace {

constexpr std::size_t kBytes = 4096;
constexpr auto kMoment = std::chrono::milliseconds(50);  // in which what is wrong would happen

std::atomic<int> submissions = 0;            // calls begun
std::atomic<int> fail_submissions_from = 0;  // the first that fails, from 1; 0: none
std::atomic<bool> fail_waits = false;        // those that would have to ask the kernel
std::atomic<int> failed_waits = 0;
std::atomic<unsigned> left_in_flight = 0;  // as the last ring was torn down

// Each entry that the kernel takes has one completion.
unsigned in_flight(const io_uring& ring) {
  return __atomic_load_n(ring.sq.khead, __ATOMIC_ACQUIRE) -
         __atomic_load_n(ring.cq.ktail, __ATOMIC_ACQUIRE);
}

}  // namespace

extern "C" {

int __real_io_uring_submit_and_wait(io_uring* ring, unsigned count);
int __wrap_io_uring_submit_and_wait(io_uring* ring, unsigned count) {
  const int number = ++submissions;
  submissions.notify_all();
  const int from = fail_submissions_from;
  return from != 0 && number >= from ? -EBADFD : __real_io_uring_submit_and_wait(ring, count);
}

int __real___io_uring_get_cqe(io_uring* ring, io_uring_cqe** cqe, unsigned submit, unsigned count,
                              sigset_t* mask);
int __wrap___io_uring_get_cqe(io_uring* ring, io_uring_cqe** cqe, unsigned submit, unsigned count,
                              sigset_t* mask) {
  if (count > 0 && fail_waits) {
    ++failed_waits;
    failed_waits.notify_all();
    return -EBADFD;
  }
  return __real___io_uring_get_cqe(ring, cqe, submit, count, mask);
}

void __real_io_uring_queue_exit(io_uring* ring);
void __wrap_io_uring_queue_exit(io_uring* ring) {
  left_in_flight = in_flight(*ring);
  __real_io_uring_queue_exit(ring);
}

}  // extern "C"

namespace {

void wait_until(std::atomic<int>& number, int least) {
  for (int seen = number; seen < least; seen = number) number.wait(seen);
}

// A queue whose request 1 is in the kernel's hands: it reads a pipe that is empty.
struct Reader {
  explicit Reader(const char* bytes) : bytes_(kBytes, *bytes) {
    submissions = fail_submissions_from = failed_waits = 0;
    fail_waits = false;
    left_in_flight = 0;
    queue = make_queue(Vfs::posix(), pool, "io_uring", 4, kBytes);
    if (queue == nullptr) {
      check::skip("no io_uring");
      return;
    }
    CHECK_EQ(::pipe2(pipe, O_CLOEXEC), 0);
    wait_until(submissions, 1);
    CHECK(queue->submit({Operation::kRead, pipe[0], pool->address(0), kBytes, 0, 1}).ok());
    wait_until(submissions, 2);  // woken, the ring's thread hands over the request and waits again
  }
  ~Reader() {
    for (const int end : pipe) ::close(end);
  }

  void break_ring() {
    fail_submissions_from = submissions + 1;
    CHECK(queue->submit({Operation::kRead, pipe[0], pool->address(1), kBytes, 0, 2}).ok());
  }
  void fill() { CHECK_EQ(::write(pipe[1], bytes_.data(), kBytes), ssize_t{kBytes}); }
  bool is_filled(std::size_t slot) const {
    return std::memcmp(pool->address(slot), bytes_.data(), kBytes) == 0;
  }

  std::shared_ptr<Pool> pool = Pool::create(kBytes, 2).value();
  std::unique_ptr<Queue> queue;
  int pipe[2] = {-1, -1};

 private:
  std::string bytes_;
};

template <class Body>
bool takes_a_moment(std::future<Body>& future) {
  return future.wait_for(kMoment) == std::future_status::timeout;
}

}  // namespace

TEST(a_broken_ring_hands_nothing_back_that_the_kernel_may_still_write) {
  Reader reader("a");
  if (reader.queue == nullptr) return;
  reader.break_ring();
  const auto first = reader.queue->wait();
  CHECK_EQ(first.size(), 1u);
  CHECK_EQ(first.at(0).tag, 2u);  // which the ring did not take
  CHECK_EQ(first.at(0).error, EBADFD);
  CHECK_EQ(reader.queue->pending(), 1u);
  auto rest = std::async(std::launch::async, [&] { return reader.queue->wait(); });
  CHECK(takes_a_moment(rest));
  reader.fill();
  const auto second = rest.get();
  CHECK_EQ(second.size(), 1u);
  CHECK_EQ(second.at(0).tag, 1u);
  CHECK_EQ(second.at(0).error, 0);  // the kernel has done it
  CHECK_EQ(second.at(0).bytes, kBytes);
  CHECK(reader.is_filled(0));
  CHECK(!reader.is_filled(1));
  CHECK(reader.queue
            ->submit({Operation::kRead, reader.pipe[0], reader.pool->address(0), kBytes, 0, 3})
            .ok());
  CHECK_EQ(reader.queue->wait().at(0).error, EBADFD);
  reader.queue.reset();
  CHECK_EQ(left_in_flight, 0u);
}

TEST(a_queue_with_a_broken_ring_is_not_destroyed_before_the_kernel_has_done) {
  for (const bool closed : {false, true}) {
    Reader reader("b");
    if (reader.queue == nullptr) return;
    reader.break_ring();
    auto end = std::async(std::launch::async, [&] {
      if (closed) reader.queue->close();
      reader.queue.reset();
      return reader.is_filled(0);
    });
    CHECK(takes_a_moment(end));
    reader.fill();
    CHECK(end.get());
    CHECK_EQ(left_in_flight, 0u);
  }
}

TEST(a_ring_that_cannot_even_wait_hands_nothing_back_before_its_time) {
  Reader reader("c");
  if (reader.queue == nullptr) return;
  fail_waits = true;
  reader.break_ring();
  CHECK_EQ(reader.queue->wait().at(0).tag, 2u);
  auto rest = std::async(std::launch::async, [&] { return reader.queue->wait(); });
  wait_until(failed_waits, 3);
  CHECK(takes_a_moment(rest));
  reader.fill();
  fail_waits = false;
  CHECK_EQ(rest.get().at(0).bytes, kBytes);
  CHECK(reader.is_filled(0));
}

TEST(a_ring_is_torn_down_when_the_kernel_has_nothing_of_it) {
  Reader reader("d");
  if (reader.queue == nullptr) return;
  auto end = std::async(std::launch::async, [&] { reader.queue->close(); });
  wait_until(submissions, 3);  // the ring's thread was woken, and listens again
  CHECK(takes_a_moment(end));
  reader.fill();
  end.get();
  CHECK_EQ(reader.queue->wait().at(0).error, 0);
  CHECK(reader.is_filled(0));
  CHECK_EQ(left_in_flight, 0u);
}

}  // namespace holdfast
