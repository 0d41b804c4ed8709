// What Python asks of the library without tensors, through ctypes: text in, JSON out. Nothing here throws.
#pragma once

#include <cstdint>

#define ONEPASS_API extern "C" __attribute__((visibility("default")))

// Every result is valid until the calling thread's next call. Errors come back as {"error": kind, "message": text}.
ONEPASS_API const char* onepass_words();
// A user's word (src/line/defined.h); operand: "none", "column" or "tensor"; parameters with commas.
ONEPASS_API const char* onepass_define_word(const char* name, const char* kind, const char* operand,
                                            const char* operand_name, const char* parameters, int sums,
                                            int flops_forward, int flops_backward, bool maps_zero_to_zero,
                                            bool needs_elements, double of_nothing, const char* formula,
                                            const char* meaning, const char* source);
ONEPASS_API const char* onepass_undefine_word(const char* name);
ONEPASS_API const char* onepass_dtypes();  // PyTorch's names, number 1 first
ONEPASS_API const char* onepass_describe(const char* line);
ONEPASS_API const char* onepass_cost(const char* line, std::int64_t rows, std::int64_t columns,
                                     std::int64_t columns_behind, std::int64_t matrices, int dtype);
// An error where a line without a contraction takes no x of these sizes.
ONEPASS_API const char* onepass_check_shape(const char* line, const std::int64_t* sizes, int dim);
// The strategies of a line with `linear` or `scores` on a CUDA chip, as "sm_90a" or "cuda:0", or on the "cpu", and
// which is taken.
ONEPASS_API const char* onepass_strategies(const char* line, std::int64_t rows, std::int64_t columns,
                                           std::int64_t columns_behind, std::int64_t matrices, int dtype, bool saves,
                                           const char* chip);
// What forward of a line without them launches on a CUDA chip, in order.
ONEPASS_API const char* onepass_launches(const char* line, std::int64_t rows, std::int64_t columns, int dtype,
                                         bool saves, const char* chip);
// Where an attention that torch's engines can compute is a line here: on CUDA and on the CPU.
ONEPASS_API const char* onepass_beside_engines();
ONEPASS_API const char* onepass_gradients(const char* line, int dtype, const std::int64_t* operand_types,
                                          std::uint64_t wanted);
ONEPASS_API const char* onepass_common_lines();
ONEPASS_API const char* onepass_cpu_prepare(const char* line, std::uint64_t boolean_masks, int dtype, bool may_compile);
ONEPASS_API void onepass_interrupt();  // what is being compiled, in whatever thread
ONEPASS_API const char* onepass_cuda_prebuild(const char* line, const char* arch, int dtype, int operand_dtype,
                                              std::int64_t columns);
// dlopen's handle, with which the operator onepass::differentiable exists; 0 where it must be compiled, and may not be.
ONEPASS_API const char* onepass_open_autograd(const char* torch_root, const char* torch_version,
                                              const char* python_include, bool may_compile);
// Ways that `onepass tune` tries (src/cuda/row/tuned.h): "listen" and "stop"; kernels "launched" meanwhile, and calls
// "heard", whose keys the others take; "ways" of a key, and those near a way; "build" one, "use" or "keep" it, or the
// table's where way is "".
ONEPASS_API const char* onepass_tuning(const char* action, const char* key, const char* way, const char* label);
ONEPASS_API const char* onepass_cache(const char* action);
ONEPASS_API const char* onepass_info();
ONEPASS_API void onepass_configure(const char* include_dir, const char* library_dir, const char* (*find_nvrtc)(),
                                   void (*warn)(const char*));
