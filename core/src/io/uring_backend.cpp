// One thread that owns an io_uring: it makes the ring, submits to it and reaps it (SINGLE_ISSUER),
// and is woken by a read of an eventfd that is itself in the ring. No SQPOLL or IOPOLL: a save is
// thousands of large operations, and a polling core is one the training loses.
//
// Memory that the kernel may still read or write belongs to it: a block is handed back once its
// completion was seen, or when the kernel never took its entry. This holds for a broken ring too.
#include <liburing.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <future>
#include <system_error>
#include <thread>

#include "io/backend.h"
#include "io/descriptor.h"
#include "io/io_thread.h"

namespace holdfast {
namespace {

constexpr std::size_t kRegisteredBytesMax = 1 << 30;  // of one buffer, says io_uring_register(2)
constexpr std::size_t kRegisteredCountMax = 1 << 14;

// Absent from older <linux/io_uring.h>; kernels that do not know a flag answer EINVAL.
constexpr unsigned kSetupCoopTaskrun = 1U << 8;    // Linux 5.19
constexpr unsigned kSetupSingleIssuer = 1U << 12;  // Linux 6.0
constexpr unsigned kSetupDeferTaskrun = 1U << 13;  // Linux 6.1
constexpr std::array kSetupFlags = {kSetupSingleIssuer | kSetupDeferTaskrun, kSetupCoopTaskrun, 0U};

// Between two looks at a ring that cannot even wait; and how many before 8 bytes are left to it.
constexpr std::chrono::milliseconds kLookDelay(1);
constexpr int kLooksMax = 1000;

// Tears the ring down, unless it was never made.
class Ring {
 public:
  ~Ring() {
    if (made_) io_uring_queue_exit(&ring_);
  }
  // 0 or an errno.
  int make(unsigned entries) {
    int result = 0;
    for (const unsigned flags : kSetupFlags) {
      result = io_uring_queue_init(entries, &ring_, flags);
      if (result != -EINVAL) break;
    }
    made_ = result == 0;
    return -result;
  }
  io_uring* get() { return &ring_; }

 private:
  io_uring ring_{};
  bool made_ = false;
};

// One operation in flight.
struct Flight {
  Block block;
  Call call;
  Admission admission;
  std::uint64_t entry = 0;  // in the ring, counted from 1; 0 for none
};

class UringBackend final : public Backend {
 public:
  UringBackend(Blocks& blocks, Vfs& vfs, const Pool& pool, std::size_t depth)
      : blocks_(blocks), vfs_(vfs), pool_(pool), flights_(depth) {}

  ~UringBackend() override {
    wake();
    if (thread_.joinable()) thread_.join();
  }

  // Returns once the thread has its ring, or could not make one.
  Status start() {
    const StandardPlaces taken;  // until the ring has its own, too
    wake_fd_ = Descriptor(::eventfd(0, EFD_CLOEXEC));
    if (wake_fd_.get() < 0) return Status::system(errno, "make an eventfd");
    std::promise<int> made;
    std::future<int> error = made.get_future();
    try {
      thread_ = start_io_thread([this, &made] { run(made); });
    } catch (const std::system_error& failure) {
      return Status::system(failure.code().value(), "start a thread");
    }
    if (const int found = error.get(); found != 0) return Status::system(found, "make an io_uring");
    return {};
  }

  void wake() override {
    const std::uint64_t one = 1;
    // Fails only when 2^64 - 2 wake-ups are unread: the thread is awake then.
    [[maybe_unused]] const ssize_t written = ::write(wake_fd_.get(), &one, sizeof one);
  }

 private:
  void run(std::promise<int>& made) {
    // One more entry than flights: the read of the eventfd.
    const int error = ring_.make(static_cast<unsigned>(flights_.size()) + 1);
    if (error == 0) prepare();
    made.set_value(error);
    if (error != 0) return;
    while (broken_ == 0 && launch()) submit_and_wait();
    if (broken_ != 0) fail_everything();
    end_listening();
  }

  void submit_and_wait() {
    const int result = io_uring_submit_and_wait(ring_.get(), 1);
    if (result < 0 && result != -EINTR && result != -EAGAIN && result != -EBUSY) {
      broken_ = -result;
    }
    reap();
  }

  // Waits for something that the kernel has, and gives it nothing more. Completions may come even
  // where the call fails.
  void wait() {
    io_uring_cqe* cqe = nullptr;
    if (io_uring_wait_cqe(ring_.get(), &cqe) != 0) std::this_thread::sleep_for(kLookDelay);
    reap();
  }

  void prepare() {
    register_pool();
    for (Flight& flight : flights_) idle_.push_back(&flight);
    listen();
  }

  // Saves the kernel from pinning the pages at every operation. RLIMIT_MEMLOCK may forbid it (8 MiB
  // is a common limit), which must only cost speed.
  void register_pool() {
    std::vector<iovec> parts;
    for (std::size_t begin = 0; begin < pool_.size(); begin += kRegisteredBytesMax) {
      parts.push_back(
          {pool_.memory() + begin, std::min(kRegisteredBytesMax, pool_.size() - begin)});
    }
    if (parts.size() > kRegisteredCountMax) return;
    const auto count = static_cast<unsigned>(parts.size());
    registered_ = io_uring_register_buffers(ring_.get(), parts.data(), count) == 0;
  }

  // The index of the registered buffer that holds the whole of `call`, or -1.
  int buffer_of(const Call& call) const {
    const auto address = reinterpret_cast<std::uintptr_t>(call.data);
    const auto memory = reinterpret_cast<std::uintptr_t>(pool_.memory());
    if (!registered_ || address < memory || address - memory >= pool_.size()) return -1;
    const std::size_t at = address - memory;
    if (call.size > pool_.size() - at) return -1;
    const std::size_t index = at / kRegisteredBytesMax;
    return (at + call.size - 1) / kRegisteredBytesMax == index ? static_cast<int>(index) : -1;
  }

  void listen() {
    io_uring_sqe* sqe = next_entry(listening_);
    io_uring_prep_read(sqe, wake_fd_.get(), wake_count_.get(), sizeof *wake_count_, 0);
    io_uring_sqe_set_data(sqe, nullptr);
  }

  // The eventfd is read into memory of ours: that goes only when the kernel has done so.
  void end_listening() {
    ending_ = true;
    wake();
    for (int look = 0; listening_ != 0 && look < kLooksMax; ++look) {
      broken_ == 0 ? submit_and_wait() : wait();
    }
    if (listening_ != 0) static_cast<void>(wake_count_.release());
  }

  // Never null: the ring has one entry for each flight and one for the eventfd.
  io_uring_sqe* next_entry(std::uint64_t& number) {
    number = ++entries_;
    return io_uring_get_sqe(ring_.get());
  }

  // Starts blocks while there are any and there is room; false when all work is done for ever.
  bool launch() {
    bool stopped = false;
    while (!idle_.empty()) {
      const auto block = blocks_.try_pop(stopped);
      if (!block) break;
      Flight* flight = idle_.back();
      idle_.pop_back();
      flight->block = *block;
      fly(*flight);
    }
    return !stopped || idle_.size() < flights_.size();
  }

  // Asks for what is left of the block; ends the flight if the Vfs says there is nothing to do.
  void fly(Flight& flight) {
    for (bool over = false; !over;) {
      flight.call = flight.block.next(/*direct=*/true);
      flight.admission = vfs_.admit(flight.call);
      if (!flight.admission.skipped) return prepare_entry(flight);
      const std::int64_t result =
          vfs_.settle(flight.call, flight.admission, flight.admission.result);
      over = flight.block.take(flight.call, result);
    }
    land(flight);
  }

  void prepare_entry(Flight& flight) {
    const Call& call = flight.call;
    const auto size = static_cast<unsigned>(flight.admission.size);
    const int buffer = buffer_of(call);
    const bool write = call.operation == Operation::kWrite;
    io_uring_sqe* sqe = next_entry(flight.entry);
    if (buffer >= 0 && write) {
      io_uring_prep_write_fixed(sqe, call.fd, call.data, size, call.number, buffer);
    } else if (buffer >= 0) {
      io_uring_prep_read_fixed(sqe, call.fd, call.data, size, call.number, buffer);
    } else if (write) {
      io_uring_prep_write(sqe, call.fd, call.data, size, call.number);
    } else {
      io_uring_prep_read(sqe, call.fd, call.data, size, call.number);
    }
    io_uring_sqe_set_data(sqe, &flight);
  }

  void land(Flight& flight) {
    flight.entry = 0;
    blocks_.finish(flight.block);
    idle_.push_back(&flight);
  }

  void reap() {
    io_uring_cqe* cqe = nullptr;
    while (io_uring_peek_cqe(ring_.get(), &cqe) == 0) {
      auto* flight = static_cast<Flight*>(io_uring_cqe_get_data(cqe));
      const int result = cqe->res;
      io_uring_cqe_seen(ring_.get(), cqe);
      if (flight != nullptr) {
        arrive(*flight, result);
        continue;
      }
      listening_ = 0;
      const bool heard = result >= 0 || result == -EINTR || result == -EAGAIN;
      if (!heard) broken_ = -result;  // a kernel before 5.6, without IORING_OP_READ
      if (broken_ == 0 && !ending_) listen();
    }
  }

  void arrive(Flight& flight, int result) {
    const std::int64_t seen = vfs_.settle(flight.call, flight.admission, result);
    const bool over = flight.block.take(flight.call, seen);
    if (!over && broken_ == 0) return fly(flight);
    if (!over) flight.block.error = broken_;
    land(flight);
  }

  // The ring takes nothing any more, which no running kernel was seen to do. What it has not taken
  // fails with what it said, so that nobody waits for ever; what it has is waited for, however long
  // that takes: its memory may still be read and written.
  void fail_everything() {
    const std::uint64_t taken = entries_ - io_uring_sq_ready(ring_.get());
    if (listening_ > taken) listening_ = 0;
    for (Flight& flight : flights_) {
      if (flight.entry <= taken) continue;
      flight.block.error = broken_;
      land(flight);
    }
    while (idle_.size() < flights_.size()) wait();
    while (auto block = blocks_.pop(Lane::kMain)) {
      block->error = broken_;
      blocks_.finish(*block);
    }
  }

  Blocks& blocks_;
  Vfs& vfs_;
  const Pool& pool_;
  Descriptor wake_fd_;
  std::unique_ptr<std::uint64_t> wake_count_ = std::make_unique<std::uint64_t>();
  std::vector<Flight> flights_;
  std::vector<Flight*> idle_;
  std::uint64_t entries_ = 0;    // prepared so far
  std::uint64_t listening_ = 0;  // the entry that reads the eventfd; 0 for none
  bool registered_ = false;
  bool ending_ = false;
  int broken_ = 0;
  Ring ring_;
  std::thread thread_;
};

}  // namespace

Result<std::unique_ptr<Backend>> make_uring_backend(Blocks& blocks, Vfs& vfs, const Pool& pool,
                                                    std::size_t depth) {
  auto backend = std::make_unique<UringBackend>(blocks, vfs, pool, depth);
  Status status = backend->start();
  if (!status.ok()) return status;
  return std::unique_ptr<Backend>(std::move(backend));
}

}  // namespace holdfast
