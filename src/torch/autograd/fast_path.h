// What Python calls where nothing but kernels and autograd would see a line's tensors: the same without the dispatcher,
// whose way in and out of boxes takes longer than a small kernel. Of CPython it takes what all versions have alike.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <string>
#include <vector>

#include "src/torch/autograd/autograd_function.h"

namespace onepass::autograd {

struct without_gil {
  PyThreadState* thread = PyEval_SaveThread();
  ~without_gil() { PyEval_RestoreThread(thread); }
};

// Autocast casts what a contraction takes, which is Python's to do; nothing else. Python also says that there are no
// kernels of a dtype.
inline bool is_plain(const line_signature& signature, at::TensorList tensors) {
  if (static_cast<int>(tensors.size()) != 1 + signature.operands || at::impl::torch_function_mode_enabled())
    return false;
  if (!is_floating(static_cast<dtype>(dtype_of(tensors[0])))) return false;
  const c10::DispatchKeySet casts = signature.weight < 0 ? c10::autocast_dispatch_keyset : c10::DispatchKeySet();
  return reaches_kernels(tensors, c10::autograd_dispatch_keyset_with_ADInplaceOrView | casts) &&
         std::none_of(tensors.begin(), tensors.end(), [](const Tensor& t) { return t._fw_grad(0).defined(); });
}

// Whether nothing would have to be compiled, which is Python's to see to.
inline bool is_ready(const line_signature& signature, at::TensorList tensors) {
  if (!tensors[0].is_cpu()) return true;
  std::uint64_t boolean = 0;
  for (std::size_t i = 1; i < tensors.size(); ++i)
    boolean |= std::uint64_t{tensors[i].scalar_type() == at::kBool} << (i - 1);
  const at::ScalarType x = tensors[0].scalar_type();
  const bool is_one =
      signature.weight < 0 || tensors[1 + static_cast<std::size_t>(signature.weight)].scalar_type() == x;
  return library.is_ready_on_cpu(signature, boolean, is_one ? static_cast<int>(dtype_of(tensors[0])) : 0);
}

inline std::vector<Tensor> run(const line_signature& signature, at::TensorList tensors, const std::string& line) {
  const without_gil released;
  const bool recorded = at::GradMode::is_enabled() &&
                        std::any_of(tensors.begin(), tensors.end(), [](const Tensor& t) { return t.requires_grad(); });
  return recorded ? Fused::apply(tensors, Fused::options{line, {}}) : run_kernels(signature, tensors, {}, false);
}

// given: a line without dropout, x, the operands. The result, in a tuple where values are kept; None for a call that is
// not for it.
inline PyObject* front(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  std::vector<Tensor> tensors;
  tensors.reserve(static_cast<std::size_t>(count));
  for (PyObject* const* t = given + 1; t != given + count; ++t) {
    if (!THPVariable_CheckExact(*t)) Py_RETURN_NONE;
    tensors.push_back(THPVariable_Unpack(*t));
  }
  const std::string line = PyUnicode_AsUTF8AndSize(given[0], nullptr);
  const known_line known(line);
  if (!is_plain(known.signature(), tensors) || !is_ready(known.signature(), tensors)) Py_RETURN_NONE;
  const std::vector<Tensor> results = run(known.signature(), tensors, line);
  if (results.size() == 1) return THPVariable_Wrap(results[0]);
  PyObject* all = PyTuple_New(static_cast<Py_ssize_t>(results.size()));
  for (std::size_t i = 0; i < results.size(); ++i)
    PyTuple_SetItem(all, static_cast<Py_ssize_t>(i), THPVariable_Wrap(results[i]));
  return all;
  END_HANDLE_TH_ERRORS
}

}  // namespace onepass::autograd

extern "C" __attribute__((visibility("default"))) PyObject* onepass_front() {
  static PyMethodDef method{"front", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(onepass::autograd::front)),
                            METH_FASTCALL, nullptr};
  return PyCFunction_NewEx(&method, nullptr, nullptr);
}
