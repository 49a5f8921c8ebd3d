#include "holdfast/queue.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include "bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace holdfast {
namespace {

std::shared_ptr<Queue> make_queue(std::shared_ptr<Vfs> vfs, std::string backend,
                                  std::shared_ptr<Pool> pool, std::size_t depth,
                                  std::size_t block_bytes) {
  const QueueOptions options{std::move(backend), depth, block_bytes};
  auto queue = value_of(
      without_gil([&] { return Queue::create(std::move(vfs), std::move(pool), options); }));
  // The last reference may go with the GIL held: waiting for the disk must not hold everyone up.
  return std::shared_ptr<Queue>(queue.release(), [](Queue* last) {
    nb::gil_scoped_release released;
    delete last;
  });
}

auto submitter(Operation operation) {
  return [operation](Queue& queue, int fd, std::uintptr_t address, std::size_t size,
                     std::uint64_t offset, std::uint64_t tag, bool cached) {
    const Request request{operation, fd, memory_at(address), size, offset, tag};
    check(without_gil([&] { return queue.submit(request, cached); }));
  };
}

nb::list wait_for(Queue& queue) {
  nb::list done;
  for (const Completion& completion : without_gil([&] { return queue.wait(); })) {
    done.append(nb::make_tuple(completion.tag, completion.bytes, completion.error));
  }
  return done;
}

}  // namespace

void bind_queue(nb::module_& module) {
  nb::class_<Queue>(module, "Queue")
      .def(nb::new_(&make_queue), "vfs"_a, "backend"_a, "pool"_a, "depth"_a = 16,
           "block_bytes"_a = 2 << 20)
      .def_prop_ro("backend", &Queue::backend)
      .def_prop_ro("direct", &Queue::direct)
      .def_prop_ro("pending", &Queue::pending)
      .def_prop_ro("fetch", [](const Queue&) { return nb::none(); })
      .def("submit_write", submitter(Operation::kWrite), "fd"_a, "address"_a, "size"_a, "offset"_a,
           "tag"_a, "cached"_a = false)
      .def("submit_read", submitter(Operation::kRead), "fd"_a, "address"_a, "size"_a, "offset"_a,
           "tag"_a, "cached"_a = false)
      .def("wait", wait_for)
      .def("close", &Queue::close, nb::call_guard<nb::gil_scoped_release>());
  module.def(
      "probe",
      [](const std::string& directory, std::shared_ptr<Vfs> vfs) {
        return value_of(without_gil([&] { return probe(directory, std::move(vfs)); }));
      },
      "directory"_a, "vfs"_a = nb::none());
}

}  // namespace holdfast
