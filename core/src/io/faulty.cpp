// The Vfs that misbehaves by rule. Rules are asked in order; the first that fires decides.
//   fail        the call is not made; its result is the errno `argument`
//   short       a transfer does at most `argument` bytes; nothing to other operations
//   torn        a transfer does its first `argument` bytes, then fails with EIO; others just fail
//   lie         the call is not made and succeeds: a descriptor of memory, zeros, an empty list
//   delay       `argument` milliseconds before the call; in a ring they hold up every later one
//   kill        SIGKILL to this process before the call; kill_after: after it
// On an O_DIRECT file amounts are what a device can do: short rounds up to 512 bytes and to at
// least 4 KiB (a read of none would say that the file ends there), torn rounds down to 4 KiB.
// close() always closes: a lying one would only leak.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <optional>
#include <thread>
#include <utility>

#include "holdfast/pool.h"
#include "holdfast/vfs.h"
#include "io/fork_lock.h"

namespace holdfast {
namespace {

constexpr std::uint64_t kSectorBytes = 512;

enum class Action { kFail, kShort, kTorn, kLie, kDelay, kKill, kKillAfter };
constexpr std::array<std::string_view, 7> kActionNames = {"fail",  "short", "torn",      "lie",
                                                          "delay", "kill",  "kill_after"};

struct Rule {
  std::optional<Operation> operation;  // none: every one
  std::uint64_t nth;
  bool persistent;
  Action action;
  std::uint64_t argument;
  std::uint64_t seen = 0;

  bool fires(const Call& call) {
    if (operation && *operation != call.operation) return false;
    ++seen;
    return nth > 0 && (persistent ? seen >= nth : seen == nth);
  }
};

bool is_transfer(const Call& call) {
  return call.operation == Operation::kWrite || call.operation == Operation::kRead;
}

bool is_direct(int fd) {
  const int flags = ::fcntl(fd, F_GETFL);
  return flags >= 0 && (flags & O_DIRECT) != 0;
}

void kill_this_process() {
  ::kill(::getpid(), SIGKILL);
  for (;;) ::pause();
}

std::int64_t lie_about(const Call& call) {
  switch (call.operation) {
    case Operation::kCreate:
    case Operation::kOpen: {
      const int fd = ::memfd_create("holdfast-lie", MFD_CLOEXEC);
      return fd < 0 ? -errno : fd;
    }
    case Operation::kRead:
      std::memset(call.data, 0, call.size);
      return static_cast<std::int64_t>(call.size);
    case Operation::kWrite:
      return static_cast<std::int64_t>(call.size);
    default:
      return 0;
  }
}

void shorten(Admission& admission, const Call& call, std::uint64_t bytes) {
  if (is_direct(call.fd)) {
    bytes = (std::max<std::uint64_t>(bytes, kBlockAlignBytes) + kSectorBytes - 1) / kSectorBytes *
            kSectorBytes;
    admission.size_seen = std::min(admission.size_seen, bytes);
    const std::uint64_t asked =
        (bytes + kBlockAlignBytes - 1) / kBlockAlignBytes * kBlockAlignBytes;
    admission.size = std::min(admission.size, asked);
  } else {
    admission.size = std::min(admission.size, bytes);
  }
}

void tear(Admission& admission, const Call& call, std::uint64_t bytes) {
  if (is_transfer(call) && is_direct(call.fd)) bytes = bytes / kBlockAlignBytes * kBlockAlignBytes;
  if (!is_transfer(call) || bytes == 0) {
    admission.skipped = true;
    admission.result = -EIO;
    return;
  }
  admission.size = std::min(admission.size, bytes);
  admission.error_after = EIO;
}

class FaultyVfs final : public Vfs {
 public:
  FaultyVfs(std::vector<Rule> rules, std::shared_ptr<Vfs> base)
      : base_(std::move(base)), rules_(std::move(rules)) {}

  Admission admit(const Call& call) override {
    const Rule rule = firing(call);
    switch (rule.action) {
      case Action::kFail:
        return {.skipped = true, .result = -static_cast<std::int64_t>(rule.argument)};
      case Action::kLie:
        return {.skipped = true, .result = lie_about(call), .size_seen = call.size};
      case Action::kKill:
        if (rule.nth > 0) kill_this_process();
        break;
      case Action::kDelay:
        std::this_thread::sleep_for(std::chrono::milliseconds(rule.argument));
        break;
      default:
        break;
    }
    Admission admission = base_->admit(call);
    if (admission.skipped) return admission;
    if (rule.action == Action::kShort && is_transfer(call)) shorten(admission, call, rule.argument);
    if (rule.action == Action::kTorn) tear(admission, call, rule.argument);
    if (rule.action == Action::kKillAfter) admission.kill_after = true;
    return admission;
  }

  std::int64_t settle(const Call& call, const Admission& admission, std::int64_t result) override {
    // What was not done is not for the base to see, but a descriptor that went is.
    if (!admission.skipped || call.operation == Operation::kClose) {
      result = base_->settle(call, admission, result);
    }
    if (admission.kill_after) kill_this_process();
    if (result < 0) return result;
    if (admission.error_after != 0) return -admission.error_after;
    if (is_transfer(call)) return std::min(result, static_cast<std::int64_t>(admission.size_seen));
    return result;
  }

  std::map<std::string, std::uint64_t> calls() const override {
    const ForkLock lock;
    return calls_;
  }

  std::vector<TraceEntry> trace() const override { return base_->trace(); }

 private:
  // The rule for this call; a delay of nothing when none fires.
  Rule firing(const Call& call) {
    const ForkLock lock;
    ++calls_[std::string(name_of(call.operation))];
    const Rule* first = nullptr;
    for (Rule& rule : rules_) {  // all of them: each counts its calls
      if (rule.fires(call) && first == nullptr) first = &rule;
    }
    return first != nullptr ? *first : Rule{{}, 0, false, Action::kDelay, 0};
  }

  std::shared_ptr<Vfs> base_;
  std::vector<Rule> rules_;
  std::map<std::string, std::uint64_t> calls_;
};

template <std::size_t count>
std::string listed(const std::array<std::string_view, count>& names) {
  std::string text;
  for (const std::string_view name : names) text.append(text.empty() ? "" : ", ").append(name);
  return text;
}

Result<Rule> parse(const FaultRule& rule) {
  const auto operation = std::find(kOperationNames.begin(), kOperationNames.end(), rule.operation);
  const auto action = std::find(kActionNames.begin(), kActionNames.end(), rule.action);
  if (operation == kOperationNames.end() && rule.operation != "*") {
    return Status::argument("rule for operation \"" + rule.operation + "\": there are * " +
                            listed(kOperationNames));
  }
  if (action == kActionNames.end()) {
    return Status::argument("rule with action \"" + rule.action + "\": there are " +
                            listed(kActionNames));
  }
  if (rule.action == "fail" && (rule.argument < 1 || rule.argument > 4095)) {
    return Status::argument("rule to fail with errno " + std::to_string(rule.argument) +
                            ": must be 1 to 4095");
  }
  Rule parsed{{}, rule.nth, rule.persistent, Action(action - kActionNames.begin()), rule.argument};
  if (rule.operation != "*") parsed.operation = Operation(operation - kOperationNames.begin());
  return parsed;
}

}  // namespace

Result<std::shared_ptr<Vfs>> Vfs::faulty(const std::vector<FaultRule>& rules,
                                         std::shared_ptr<Vfs> base) {
  std::vector<Rule> parsed;
  for (const FaultRule& rule : rules) {
    Result<Rule> one = parse(rule);
    if (!one.ok()) return one.status();
    parsed.push_back(one.value());
  }
  if (base == nullptr) base = posix();
  return std::shared_ptr<Vfs>(std::make_shared<FaultyVfs>(std::move(parsed), std::move(base)));
}

}  // namespace holdfast
