// The one place where a Status becomes a Python exception.
#include <cerrno>

#include "bindings.h"

namespace nb = nanobind;

namespace holdfast {
namespace {

const char* class_for(const Status& status) {
  if (status.kind() == Status::Kind::kArgument) return "OptionError";
  const int error = status.error();
  const bool full = error == ENOSPC || error == EDQUOT || error == EFBIG;
  return full ? "NoSpaceError" : "StoreError";
}

}  // namespace

void raise(const Status& status) {
  if (status.kind() == Status::Kind::kMemory) {
    PyErr_SetString(PyExc_MemoryError, status.text().c_str());
    throw nb::python_error();
  }
  // Only now: importing the core must import nothing else.
  nb::object type = nb::module_::import_("holdfast.errors").attr(class_for(status));
  nb::object error = type(nb::str(status.text().data(), status.text().size()));
  if (status.kind() == Status::Kind::kSystem) {
    error.attr("errno") = status.error();
    error.attr("__cause__") =
        nb::handle(PyExc_OSError)(status.error(), error_text(status.error()).c_str());
  }
  PyErr_SetObject(type.ptr(), error.ptr());
  throw nb::python_error();
}

}  // namespace holdfast
