// How the core reports failure: values, no exceptions. Immutable; safe to copy between threads.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

namespace holdfast {

class [[nodiscard]] Status {
 public:
  enum class Kind : std::uint8_t {
    kOk,
    kSystem,    // a system call failed; error() is its errno
    kArgument,  // the caller asked for what cannot be
    kMemory,    // the memory is not there; error() is the errno
  };

  Status() = default;
  // `what` names the operation, the path and the offset; the text of `error` is appended.
  static Status system(int error, const std::string& what);
  static Status memory(int error, const std::string& what);
  static Status argument(std::string text);

  bool ok() const { return kind_ == Kind::kOk; }
  Kind kind() const { return kind_; }
  int error() const { return error_; }
  const std::string& text() const { return text_; }

 private:
  Status(Kind kind, int error, std::string text)
      : kind_(kind), error_(error), text_(std::move(text)) {}

  Kind kind_ = Kind::kOk;
  int error_ = 0;
  std::string text_;
};

// A value, or the Status that says why there is none. value() is meaningful only when ok().
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}          // NOLINT: implicit by design
  Result(Status status) : status_(std::move(status)) {}  // NOLINT
  bool ok() const { return status_.ok(); }
  const Status& status() const { return status_; }
  T& value() { return value_; }
  const T& value() const { return value_; }

 private:
  T value_{};
  Status status_;
};

// The system's text for an errno.
std::string error_text(int error);

}  // namespace holdfast
