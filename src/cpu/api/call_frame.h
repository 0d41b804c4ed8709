// A call of the C++ API on its way into `arguments`: what is wrong with a tensor is refused by its name.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "onepass/core.h"
#include "src/cpu/panel.h"
#include "src/plan/frame.h"

namespace onepass {

using sizes_of = std::vector<std::int64_t>;

[[noreturn]] void refuse(const std::string& why);
void require_type(const tensor&, dtype expected, const std::string& name);
void require_sizes(const tensor&, const sizes_of& expected, const std::string& name);
void require_there(const tensor&, const std::string& name);

sizes_of strides_of(const tensor&);
bool is_contiguous(const tensor&);
std::string text(const sizes_of&);
void copy(const tensor& from, const tensor& to);  // of one shape and dtype

class call_frame : public spec::frame {
 public:
  call_frame(const spec::line&, const tensor& x);

  // gives_result: else that is in someone else's hands, who has the frame's rows.
  void enter_forward(const values&, bool gives_result);
  // What backward reads, without the tensors that are `elsewhere`.
  void enter_backward(const values&, const gradients&, const std::vector<spec::role>& elsewhere = {});
  // What the plan says of the tensors to be written, by input; those of columns come back apart.
  std::vector<view> enter_gradients(const spec::gradients&, const std::vector<const tensor*>& of_input);
  void lay_out(bool keeps_rows = false);
  void add_channels() const;  // behind the kernels: of channels, whose gradients they give for each column
  cpu::row_call call();       // whose kernels are compiled at first use

  // The result's gradient as it was entered: zeros where there is none.
  const tensor& result_gradient() const { return result_gradient_; }
  const sizes_of& sizes() const { return sizes_; }

 private:
  void whole(const tensor& t, dtype its, view& out, const std::string& name);           // of x's shape
  void number(const tensor& t, spec::result_type, view& out, const std::string& name);  // one a row, or scales
  tensor gradient(const tensor& t, spec::role what, int i, view& out, const std::string& name);
  sizes_of sizes_of_numbers() const;
  void operand(int i, const tensor& t, bool is_read);
  void target(int i, const tensor& t, bool is_read, const std::string& name);  // one integer a row
  void enter_number(const tensor& t, view& out, const std::string& name, int group = 0);
  void require_column(int i, const tensor& t, const std::string& name) const;
  view column(const tensor& t, const std::string& name) const;  // or of channels
  void statistics(const tensor& t);                             // where the tensor of row statistics is wanted
  void dropout_state(const int64* state);
  void enter(const tensor& t, view& out, const std::string& name);  // its shape is right

  const sizes_of sizes_;
  struct channel_sums {
    std::vector<double> columns;
    view of_channels;
    int64 channels;
  };
  std::deque<channel_sums> channel_sums_;
  double zero_ = 0;
  tensor result_gradient_;
  std::deque<sizes_of> held_;  // what tensors_ points to
  std::vector<std::string> names_;
  std::shared_ptr<const cpu_kernels> kernels_;
};

// Input 0 is x, the others are the operands.
std::string gradient_name(int input);
// The inputs whose gradients are there to be written, and the facts that plans want.
std::vector<const tensor*> gradients_by_input(const spec::line&, const gradients&);
std::uint64_t wanted_of(const spec::line&, const values&, const gradients&, const sizes_of& x);
std::vector<spec::operand_facts> facts_of(const values&, const sizes_of& x);
// Inputs that share a gradient, or have the upstream one, get copies.
void copy_shared(const spec::gradients&, const tensor& upstream, const std::vector<const tensor*>& of_input);

// A line without products (rows.cc), with `linear`, and with `scores` (products.cc).
void forward_of_rows(const spec::line&, const values&);
void backward_of_rows(const spec::line&, const values&, const gradients&);

}  // namespace onepass
