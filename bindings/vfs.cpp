#include "holdfast/vfs.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <tuple>

#include "bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace holdfast {
namespace {

using Rule = std::tuple<std::string, std::uint64_t, bool, std::string, std::uint64_t>;

std::shared_ptr<Vfs> make_faulty(const std::vector<Rule>& rules, std::shared_ptr<Vfs> base) {
  std::vector<FaultRule> parsed;
  for (const auto& [operation, nth, persistent, action, argument] : rules) {
    parsed.push_back({operation, nth, persistent, action, argument});
  }
  return value_of(Vfs::faulty(parsed, std::move(base)));
}

nb::list trace_of(const Vfs& vfs) {
  nb::list entries;
  for (const TraceEntry& entry : vfs.trace()) {
    const std::string_view name = name_of(entry.operation);
    entries.append(nb::make_tuple(nb::str(name.data(), name.size()), entry.path, entry.second,
                                  entry.number, nb::bytes(entry.data.data(), entry.data.size())));
  }
  return entries;
}

void write_buffer(Vfs& vfs, int fd, nb::handle data, std::uint64_t offset) {
  const BufferView view(data);
  check(without_gil([&] { return vfs.write(fd, view.data(), view.size(), offset); }));
}

nb::object read_bytes(Vfs& vfs, int fd, std::size_t size, std::uint64_t offset) {
  // A size from a damaged file must not become an allocation.
  size = std::min<std::uint64_t>(size, without_gil([&] { return bytes_after(fd, offset); }));
  nb::object bytes = nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)));
  if (!bytes.is_valid()) throw nb::python_error();
  char* data = PyBytes_AsString(bytes.ptr());
  const std::size_t done = value_of(without_gil([&] { return vfs.read(fd, data, size, offset); }));
  if (done == size) return bytes;
  return nb::bytes(data, done);
}

// Any bytes can be a name: those that are not UTF-8 come as os.fsdecode gives them.
nb::object file_name(const std::string& name) {
  return nb::steal(PyUnicode_DecodeFSDefaultAndSize(name.data(), Py_ssize_t(name.size())));
}

nb::list entries_of(Vfs& vfs, const std::string& root, const std::string& name) {
  nb::list entries;
  const auto found = value_of(without_gil([&] { return vfs.list_beneath(root, name); }));
  for (const auto& entry : found)
    entries.append(nb::make_tuple(file_name(entry.name), entry.kind, entry.size));
  return entries;
}

// A method that calls Vfs::method without the GIL, then raises or returns its value.
template <class... Arguments>
auto checked(Status (Vfs::*method)(Arguments...)) {
  return [method](Vfs& vfs, std::decay_t<Arguments>... arguments) {
    check(without_gil([&] { return (vfs.*method)(arguments...); }));
  };
}

template <class T, class... Arguments>
auto checked(Result<T> (Vfs::*method)(Arguments...)) {
  return [method](Vfs& vfs, std::decay_t<Arguments>... arguments) {
    return value_of(without_gil([&] { return (vfs.*method)(arguments...); }));
  };
}

}  // namespace

void bind_vfs(nb::module_& module) {
  module.def(
      "look_anew", [](const std::string& path) { without_gil([&] { look_anew(path); }); },
      "path"_a);
  module.def(
      "above_with",
      [](const std::string& path, const std::string& name, nb::bytes beginning) {
        const std::string_view begins(beginning.c_str(), beginning.size());
        return value_of(without_gil([&] { return above_with(path, name, begins); }));
      },
      "path"_a, "name"_a, "beginning"_a);
  nb::class_<Vfs>(module, "Vfs")
      .def_static("posix", &Vfs::posix)
      .def_static("recording", &Vfs::recording)
      .def_static("faulty", make_faulty, "rules"_a, "base"_a = nb::none())
      .def("calls", &Vfs::calls)
      .def("trace", trace_of)
      .def("create", checked(&Vfs::create), "path"_a, "direct"_a = false)
      .def("open", checked(&Vfs::open), "path"_a, "direct"_a = false)
      .def("open_beneath", checked(&Vfs::open_beneath), "root"_a, "name"_a, "direct"_a = false)
      .def("close", checked(&Vfs::close), "fd"_a)
      .def("write", write_buffer, "fd"_a, "data"_a, "offset"_a)
      .def(
          "start_sync", [](Vfs& vfs, int fd) { without_gil([&] { vfs.start_sync(fd); }); }, "fd"_a)
      .def(
          "start_read", [](Vfs& vfs, int fd) { without_gil([&] { vfs.start_read(fd); }); }, "fd"_a)
      .def(
          "wants_direct",
          [](Vfs&, int fd, std::uint64_t size) {
            return without_gil([&] { return !Vfs::is_cached(fd, size); });
          },
          "fd"_a, "size"_a)
      .def("read", read_bytes, "fd"_a, "size"_a, "offset"_a)
      .def("size", checked(&Vfs::size), "fd"_a)
      .def("allocate", checked(&Vfs::allocate), "fd"_a, "size"_a)
      .def("truncate", checked(&Vfs::truncate), "fd"_a, "size"_a)
      .def("sync", checked(&Vfs::sync), "fd"_a)
      .def("sync_directory", checked(&Vfs::sync_directory), "path"_a)
      .def("link", checked(&Vfs::link), "source"_a, "target"_a)
      .def("rename", checked(&Vfs::rename), "source"_a, "target"_a)
      .def("unlink", checked(&Vfs::unlink), "path"_a)
      .def("make_directory", checked(&Vfs::make_directory), "path"_a)
      .def("remove_directory", checked(&Vfs::remove_directory), "path"_a)
      .def("list_directory", entries_of, "path"_a, "name"_a = "");
}

}  // namespace holdfast
