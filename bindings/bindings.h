// What the binding files share. Everything here is called with the GIL held.
#pragma once

#include <Python.h>
#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "holdfast/status.h"

namespace holdfast {

void bind_checksum(nanobind::module_& module);
void bind_chunks(nanobind::module_& module);
void bind_compact(nanobind::module_& module);
void bind_cpus(nanobind::module_& module);
void bind_excp(nanobind::module_& module);
void bind_listed(nanobind::module_& module);
void bind_lossless(nanobind::module_& module);
void bind_pool(nanobind::module_& module);
void bind_vfs(nanobind::module_& module);
void bind_queue(nanobind::module_& module);
void bind_reads(nanobind::module_& module);
void bind_replay(nanobind::module_& module);
void bind_segment(nanobind::module_& module);
void bind_table(nanobind::module_& module);

// Raises what the Status says: StoreError or NoSpaceError, OptionError, MemoryError.
[[noreturn]] void raise(const Status& status);

inline void check(const Status& status) {
  if (!status.ok()) raise(status);
}

template <class T>
T value_of(Result<T> result) {
  if (!result.ok()) raise(result.status());
  return std::move(result.value());
}

inline std::byte* memory_at(std::uintptr_t address) {
  return reinterpret_cast<std::byte*>(address);
}

// Bytes that a Python object lends while this lives. Destroy with the GIL held.
class BufferView {
 public:
  explicit BufferView(nanobind::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nanobind::python_error();
  }
  ~BufferView() { PyBuffer_Release(&view_); }
  BufferView(const BufferView&) = delete;
  BufferView& operator=(const BufferView&) = delete;
  const void* data() const { return view_.buf; }
  std::size_t size() const { return static_cast<std::size_t>(view_.len); }

 private:
  Py_buffer view_{};
};

// Runs `body` without the GIL and returns what it returns.
template <class Body>
auto without_gil(Body body) {
  nanobind::gil_scoped_release released;
  return body();
}

// The same for work on so many bytes; to get the GIL back takes longer than work on a few.
template <class Body>
auto without_gil(std::size_t bytes, Body body) {
  constexpr std::size_t kManyBytes = 32 << 10;
  return bytes < kManyBytes ? body() : without_gil(body);
}

}  // namespace holdfast
