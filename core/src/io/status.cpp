#include "holdfast/status.h"

#include <system_error>

namespace holdfast {

std::string error_text(int error) {
  return std::generic_category().message(error);
}

Status Status::system(int error, const std::string& what) {
  return {Kind::kSystem, error, what + ": " + error_text(error)};
}

Status Status::memory(int error, const std::string& what) {
  return {Kind::kMemory, error, what + ": " + error_text(error)};
}

Status Status::argument(std::string text) {
  return {Kind::kArgument, 0, std::move(text)};
}

}  // namespace holdfast
