// Matrix products by the vendor's library, through torch.
#pragma once

#include "src/cpu/gemm/matrix.h"
#include "src/torch/tensor.h"

namespace onepass::binding {

cpu::matrix matrix_of(const Tensor&);  // of two dimensions, on the CPU

// (..., columns) as (rows, columns).
Tensor as_matrix(const Tensor&, std::int64_t columns);
Tensor transposed(const Tensor&);  // the last two dimensions

Tensor empty_product(const Tensor& like, std::int64_t columns, dtype);
// Of the shape and dtype of x's product with the rows of a matrix, or with those of its batch's, without memory of that
// size.
Tensor shape_of_product(const Tensor& x, const Tensor& matrix);

// result = a b, plus what is added: a bias, or the result itself.
void multiply(const Tensor& result, const Tensor& a, const Tensor& b, const Tensor* added = nullptr);

// Of [batches, rows, columns] each.
void multiply_batches(const Tensor& result, const Tensor& a, const Tensor& b, const Tensor* added = nullptr);

// The same; on the CPU small products are computed here.
void product_into(const Tensor& result, const Tensor& a, const Tensor& b, const Tensor* bias = nullptr);

// a (rows, K) times b (K, columns), and a bias [columns] if given, of one dtype, where `rows` are those of `like`
// (..., K): (..., columns), fresh. Autocast does not touch it.
Tensor matrix_product(const Tensor& a, const Tensor& b, const Tensor& like, const Tensor* bias = nullptr);

}  // namespace onepass::binding
