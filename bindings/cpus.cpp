#include "holdfast/cpus.h"

#include <string_view>

#include "bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace holdfast {

namespace {

// Not by nanobind: as Python ends, PyEval_RestoreThread may end this thread, by an exception that
// nothing on its way may catch.
PyObject* wait_for(PyObject*, PyObject* given) {
  if (!nb::isinstance<Waiter>(given)) {
    PyErr_SetString(PyExc_TypeError, "expected a Waiter");
    return nullptr;
  }
  Waiter* waiter = nb::inst_ptr<Waiter>(given);
  for (;;) {
    PyThreadState* const state = PyEval_SaveThread();
    const bool is_woken = waiter->wait();
    PyEval_RestoreThread(state);
    if (is_woken) Py_RETURN_TRUE;
    if (PyErr_CheckSignals() != 0) return nullptr;
  }
}

PyMethodDef methods[] = {{"wait_for", wait_for, METH_O, nullptr}, {}};

}  // namespace

// With the GIL held: a worker cannot begin a job between the look at its id and the call.
void bind_cpus(nb::module_& module) {
  module.def(
      "wake_here",
      [](int thread) {
        const std::string cpus = wake_here(thread);
        return nb::bytes(cpus.data(), cpus.size());
      },
      "thread"_a);
  module.def(
      "run_on",
      [](const nb::bytes& cpus) { run_on(std::string_view(cpus.c_str(), cpus.size())); },
      "cpus"_a);
  nb::class_<Waiter>(module, "Waiter").def(nb::init<>()).def("wake", &Waiter::wake);
  PyModule_AddFunctions(module.ptr(), methods);
}

}  // namespace holdfast
