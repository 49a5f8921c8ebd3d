#include "holdfast/listed.h"

#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace holdfast {
namespace {

constexpr std::string_view kEmpty = R"(,"tensors":[])";

nb::object made(PyObject* object) {
  if (object == nullptr) throw nb::python_error();
  return nb::steal(object);
}

// Hands `item` over to a list or a tuple that nobody else has seen yet.
template <int (*Set)(PyObject*, Py_ssize_t, PyObject*)>
void put(nb::handle into, std::size_t place, nb::object item) {
  const auto at = static_cast<Py_ssize_t>(place);
  if (Set(into.ptr(), at, item.release().ptr()) != 0) throw nb::python_error();
}

nb::object list_of(std::size_t count) {
  return made(PyList_New(static_cast<Py_ssize_t>(count)));
}

// Raises UnicodeDecodeError, also for half a surrogate pair and for needlessly long sequences.
nb::object text_of(std::string_view bytes) {
  return made(PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "strict"));
}

// The header with an empty list of tensors.
nb::object rest_of(std::string_view text, const Listed& listed) {
  const std::string_view pieces[] = {text.substr(0, listed.begin), kEmpty, text.substr(listed.end)};
  std::size_t size = 0;
  for (const std::string_view piece : pieces) size += piece.size();
  nb::object rest = made(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)));
  char* out = PyBytes_AsString(rest.ptr());
  for (const std::string_view piece : pieces) out += piece.copy(out, piece.size());
  return rest;
}

// Equal keys at one place of two paths in a row are one object: most paths begin alike.
nb::object paths_of(const Listed& listed) {
  nb::object paths = list_of(listed.tensors.size());
  std::span<const std::string_view> before;
  nb::handle last;
  std::size_t first = 0;
  for (std::size_t tensor = 0; tensor < listed.tensors.size(); ++tensor) {
    const std::size_t end = listed.tensors[tensor].path_end;
    const std::span keys(listed.keys.data() + first, end - first);
    nb::object path = made(PyTuple_New(static_cast<Py_ssize_t>(keys.size())));
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const bool is_same = i < before.size() && keys[i] == before[i];
      PyObject* known = is_same ? PyTuple_GetItem(last.ptr(), static_cast<Py_ssize_t>(i)) : nullptr;
      put<PyTuple_SetItem>(path, i, is_same ? nb::borrow(known) : text_of(keys[i]));
    }
    before = keys;
    last = path;
    first = end;
    put<PyList_SetItem>(paths, tensor, std::move(path));
  }
  return paths;
}

nb::object forms_of(const Listed& listed) {
  nb::object forms = list_of(listed.forms.size());
  std::size_t first = 0;
  for (std::size_t number = 0; number < listed.forms.size(); ++number) {
    const ListedForm& form = listed.forms[number];
    nb::object shape = list_of(form.shape_end - first);
    for (std::size_t i = first; i < form.shape_end; ++i) {
      put<PyList_SetItem>(shape, i - first, nb::int_(listed.shapes[i]));
    }
    first = form.shape_end;
    nb::object one = nb::make_tuple(text_of(form.dtype), std::move(shape), form.codec);
    put<PyList_SetItem>(forms, number, std::move(one));
  }
  return forms;
}

// The form of each tensor. Tensors of one form share the number's object.
nb::object form_of(const Listed& listed) {
  std::vector<nb::object> numbers;
  numbers.reserve(listed.forms.size());
  for (std::size_t i = 0; i < listed.forms.size(); ++i) numbers.push_back(nb::int_(i));
  nb::object form = list_of(listed.tensors.size());
  for (std::size_t i = 0; i < listed.tensors.size(); ++i) {
    put<PyList_SetItem>(form, i, numbers[listed.tensors[i].form]);
  }
  return form;
}

nb::object read(const nb::bytes& data) {
  const std::string_view text(data.c_str(), data.size());
  const auto listed = without_gil(text.size(), [&] { return read_listed(text); });
  if (!listed) return nb::none();
  try {
    return nb::make_tuple(rest_of(text, *listed), paths_of(*listed), form_of(*listed),
                          forms_of(*listed));
  } catch (const nb::python_error& error) {
    if (!error.matches(PyExc_UnicodeDecodeError)) throw;
    return nb::none();
  }
}

}  // namespace

void bind_listed(nb::module_& module) {
  module.def("read_listed", &read, "data"_a);
}

}  // namespace holdfast
