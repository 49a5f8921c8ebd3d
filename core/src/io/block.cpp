#include "io/block.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <thread>
#include <utility>

namespace holdfast {
namespace {

constexpr std::chrono::microseconds kAgainDelay(500);
// Copied into the page cache by one call. For more the kernel takes larger pieces of memory, which
// a virtual machine may have to get from its host first: such writes took three times as long.
constexpr std::size_t kCopyBytes = 256 << 10;

}  // namespace

Call Block::next(bool direct) const {
  // After an unaligned short result O_DIRECT must go back: the bytes before are the same ones
  // again.
  const std::size_t from = direct ? done / kBlockAlignBytes * kBlockAlignBytes : done;
  const Request& request = open->request;
  const bool copied = !direct && request.operation == Operation::kWrite;
  return {.operation = request.operation,
          .fd = request.fd,
          .number = request.offset + begin + from,
          .data = request.data + begin + from,
          .size = copied ? std::min(size - from, kCopyBytes) : size - from};
}

bool Block::take(const Call& call, std::int64_t result) {
  const bool again = result == -EINTR || result == -EAGAIN;
  if (result < 0 && !again) {
    error = static_cast<int>(-result);
    return true;
  }
  const std::size_t from = call.number - open->request.offset - begin;
  const std::size_t reached = from + (result > 0 ? static_cast<std::size_t>(result) : 0);
  if (reached > done) {
    done = std::min(reached, size);
    retries = 0;
    return done == size;
  }
  if (!again && call.operation == Operation::kRead) return true;  // the end of the file
  if (++retries <= kRetriesMax) {
    // The kernel is short of something: retries at once would be over before it has it again.
    if (result == -EAGAIN) std::this_thread::sleep_for(kAgainDelay);
    return false;
  }
  error = again ? static_cast<int>(-result) : EIO;
  return true;
}

Completion carry_out(const Request& request, Vfs& vfs) {
  Block block{std::make_shared<OpenRequest>(OpenRequest{request, Lane::kCached, request.size}), 0,
              request.size};
  for (bool over = request.size == 0; !over;) {
    const Call call = block.next(false);
    over = block.take(call, vfs.transfer(call));
  }
  return {request.tag, block.done, block.error};
}

void Blocks::add_whole(const Completion& completion) {
  const std::lock_guard lock(mutex_);
  ++pending_;
  completions_.push_back(completion);
}

void Blocks::add(const Request& request, Lane lane) {
  const std::lock_guard lock(mutex_);
  ++pending_;
  if (request.size == 0) {
    completions_.push_back({request.tag, 0, 0});
    return;
  }
  auto& [requests, available] = waiting(lane);
  requests.push_back(std::make_shared<OpenRequest>(OpenRequest{request, lane, request.size}));
  if (request.size <= block_bytes_) {
    available.notify_one();
  } else {
    available.notify_all();
  }
}

std::optional<Block> Blocks::cut(Requests& requests) {
  if (requests.empty()) return std::nullopt;
  const std::shared_ptr<OpenRequest> open = requests.front();
  const std::size_t begin = open->bytes_begun;
  const std::size_t size = std::min(block_bytes_, open->request.size - begin);
  open->bytes_begun += size;
  ++open->blocks_begun;
  if (open->bytes_begun == open->request.size) requests.pop_front();
  return Block{open, begin, size};
}

std::optional<Block> Blocks::pop(Lane lane) {
  std::unique_lock lock(mutex_);
  auto& [requests, available] = waiting(lane);
  available.wait(lock, [&] { return !requests.empty() || stopped_; });
  return cut(requests);
}

std::optional<Block> Blocks::try_pop(bool& stopped) {
  const std::lock_guard lock(mutex_);
  stopped = stopped_;
  return cut(waiting(Lane::kMain).requests);
}

void Blocks::finish(const Block& block) {
  const std::lock_guard lock(mutex_);
  OpenRequest& open = *block.open;
  const std::size_t reached = block.begin + block.done;
  if (block.done < block.size && reached < open.bytes_good) {
    open.bytes_good = reached;
    if (block.error != 0) open.error = block.error;
  } else if (open.error == 0) {
    open.error = block.error;
  }
  --open.blocks_begun;
  if (open.bytes_good < open.request.size && open.bytes_begun < open.request.size) {
    open.bytes_begun = open.request.size;
    waiting(open.lane).requests.pop_front();  // being partly begun, it is the first
  }
  complete_if_over(open);
}

void Blocks::complete_if_over(const OpenRequest& open) {
  if (open.blocks_begun > 0 || open.bytes_begun < open.request.size) return;
  completions_.push_back({open.request.tag, open.bytes_good, open.error});
  finished_.notify_all();
}

void Blocks::stop() {
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  for (Waiting& lane : lanes_) lane.available.notify_all();
}

void Blocks::cancel() {
  const std::lock_guard lock(mutex_);
  for (Waiting& lane : lanes_) {
    for (const auto& open : std::exchange(lane.requests, {})) {
      open->bytes_good = std::min(open->bytes_good, open->bytes_begun);
      if (open->error == 0) open->error = ECANCELED;
      open->bytes_begun = open->request.size;
      complete_if_over(*open);
    }
  }
}

std::size_t Blocks::pending() const {
  const std::lock_guard lock(mutex_);
  return pending_;
}

std::vector<Completion> Blocks::wait() {
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [&] { return !completions_.empty() || pending_ == 0; });
  pending_ -= completions_.size();
  return std::exchange(completions_, {});
}

}  // namespace holdfast
