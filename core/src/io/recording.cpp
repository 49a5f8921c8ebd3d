// The Vfs that logs. Queue writes appear when their completion is seen, so a log entry before a
// "sync" entry was in the kernel's hands before that sync began.
#include <utility>

#include "holdfast/vfs.h"
#include "io/fork_lock.h"

namespace holdfast {
namespace {

bool changes_disk(Operation operation) {
  switch (operation) {
    case Operation::kOpen:
    case Operation::kClose:
    case Operation::kRead:
    case Operation::kSize:
    case Operation::kListDirectory:
      return false;
    default:
      return true;
  }
}

class RecordingVfs final : public Vfs {
 public:
  Admission admit(const Call& call) override {
    const ForkLock lock;
    ++calls_[std::string(name_of(call.operation))];
    // Forget the descriptor before the kernel may hand its number out again.
    if (call.operation == Operation::kClose) paths_.erase(call.fd);
    return Vfs::admit(call);
  }

  std::int64_t settle(const Call& call, const Admission&, std::int64_t result) override {
    if (result < 0) return result;
    const ForkLock lock;
    std::string path(call.path);
    if (call.operation == Operation::kCreate || call.operation == Operation::kOpen) {
      paths_[static_cast<int>(result)] = path;
    }
    if (!changes_disk(call.operation)) return result;
    if (call.fd >= 0) {
      const auto known = paths_.find(call.fd);
      if (known == paths_.end()) return result;  // opened elsewhere: the unnamed file of a probe
      path = known->second;
    }
    TraceEntry entry{call.operation, std::move(path), std::string(call.second), call.number, {}};
    if (call.operation == Operation::kWrite) entry.data.assign(call.data, call.data + result);
    trace_.push_back(std::move(entry));
    return result;
  }

  std::map<std::string, std::uint64_t> calls() const override {
    const ForkLock lock;
    return calls_;
  }

  std::vector<TraceEntry> trace() const override {
    const ForkLock lock;
    return trace_;
  }

 private:
  std::map<std::string, std::uint64_t> calls_;
  std::map<int, std::string> paths_;
  std::vector<TraceEntry> trace_;
};

}  // namespace

std::shared_ptr<Vfs> Vfs::recording() {
  return std::make_shared<RecordingVfs>();
}

}  // namespace holdfast
