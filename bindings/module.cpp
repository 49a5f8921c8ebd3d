// The one place where C++ meets Python: each bind_* lies beside the header it binds.
// The contract, docstrings included, is src/holdfast/_core.pyi.
#include "bindings.h"

NB_MODULE(_core, module) {
  // The core's threads, and torch itself, belong to the main interpreter.
  if (PyInterpreterState_GetID(PyInterpreterState_Get()) != 0) {
    throw nanobind::import_error("holdfast cannot run in a subinterpreter; use the main one");
  }
  // An error that a program keeps until its end keeps what its frames held: no leak of ours.
  nanobind::set_leak_warnings(false);
  module.doc() = "Native core of holdfast; see _core.pyi.";
  holdfast::bind_checksum(module);
  holdfast::bind_chunks(module);
  holdfast::bind_excp(module);
  holdfast::bind_listed(module);
  holdfast::bind_lossless(module);
  holdfast::bind_compact(module);
  holdfast::bind_cpus(module);
  holdfast::bind_pool(module);
  holdfast::bind_vfs(module);
  holdfast::bind_queue(module);
  holdfast::bind_reads(module);
  holdfast::bind_replay(module);
  holdfast::bind_segment(module);
  holdfast::bind_table(module);
}
