// fastgen::Program: a recorded step as a list of operator calls, which runs without Python and without its lock.
#include <ATen/ScalarOps.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace fastgen {
namespace {

// An argument of a call: a constant; or the tensor in a slot; or a list with some of either.
struct Argument {
  enum class Kind { constant, slot, list, optional_list } kind;
  c10::IValue constant;
  int64_t slot = 0;
  std::vector<std::pair<int64_t, c10::IValue>> items; // the slot, or -1 and a constant
};

struct Call {
  c10::OperatorHandle op;
  std::vector<Argument> arguments;
  std::vector<int64_t> outputs; // slots, or -1 for what nobody reads; of the one list that is returned, if `is_list`
  bool is_list;
  std::vector<int64_t> freed; // slots that nobody reads any more: later tensors can use the memory
};

class Program : public torch::CustomClassHolder {
 public:
  // Arguments of the next call, in the order of the operator's schema.
  void add_constant(const c10::IValue& value) { next_.push_back({Argument::Kind::constant, value, 0, {}}); }

  // A number where the operator takes a tensor.
  void add_number(const c10::IValue& value) {
    at::Tensor number = at::scalar_to_tensor(value.toScalar());
    number.unsafeGetTensorImpl()->set_wrapped_number(true); // it does not decide the result's dtype
    add_constant(number);
  }

  void add_integers(std::vector<int64_t> values) { add_constant(c10::List<int64_t>(values)); }

  void add_no_numbers() { add_constant(c10::impl::GenericList(c10::OptionalType::create(c10::NumberType::get()))); }

  void add_slot(int64_t slot) { next_.push_back({Argument::Kind::slot, {}, slot, {}}); }

  void begin_list(bool is_optional) {
    next_.push_back({is_optional ? Argument::Kind::optional_list : Argument::Kind::list, {}, 0, {}});
  }

  void add_item(int64_t slot, const c10::IValue& constant) { next_.back().items.emplace_back(slot, constant); }

  void add_call(
      const std::string& name, const std::string& overload, std::vector<int64_t> outputs, bool is_list,
      std::vector<int64_t> freed) {
    const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
    TORCH_CHECK_VALUE(
        op.schema().arguments().size() == next_.size() &&
            op.schema().returns().size() == (is_list ? 1 : outputs.size()),
        name, " has other arguments or outputs than were given.");
    for (const Argument& argument : next_) {
      check_known(argument.kind == Argument::Kind::slot ? argument.slot : -1);
      for (const auto& item : argument.items) {
        check_known(item.first);
      }
    }
    if (!is_list) {
      for (const c10::Argument& output : op.schema().returns()) {
        TORCH_CHECK_VALUE(output.type()->kind() != c10::TypeKind::ListType, name, " returns a list.");
      }
    }
    for (const int64_t slot : outputs) {
      slots_ = std::max(slots_, slot + 1);
    }
    calls_.push_back({op, std::move(next_), std::move(outputs), is_list, std::move(freed)});
    next_.clear();
  }

  // Runs all calls; returns what is in these slots then.
  std::vector<at::Tensor> run(const std::vector<int64_t>& results) const {
    std::vector<c10::IValue> slots(slots_);
    torch::jit::Stack stack;
    for (const Call& call : calls_) {
      stack.clear();
      for (const Argument& argument : call.arguments) {
        stack.push_back(value_of(argument, slots));
      }
      call.op.callBoxed(stack);
      if (call.is_list) {
        const std::vector<at::Tensor> list = stack[0].toTensorVector();
        for (size_t i = 0; i < call.outputs.size(); ++i) {
          put(slots, call.outputs[i], list.at(i));
        }
      } else {
        for (size_t i = 0; i < call.outputs.size(); ++i) {
          put(slots, call.outputs[i], std::move(stack[i]));
        }
      }
      for (const int64_t slot : call.freed) {
        slots[slot] = c10::IValue();
      }
    }
    std::vector<at::Tensor> found;
    for (const int64_t slot : results) {
      found.push_back(slots[slot].toTensor());
    }
    return found;
  }

 private:
  void check_known(int64_t slot) const { TORCH_CHECK_VALUE(slot < slots_, "slot ", slot, " is of no call so far."); }

  static void put(std::vector<c10::IValue>& slots, int64_t slot, c10::IValue value) {
    if (slot >= 0) {
      slots[slot] = std::move(value);
    }
  }

  static c10::IValue value_of(const Argument& argument, const std::vector<c10::IValue>& slots) {
    const auto item = [&](const std::pair<int64_t, c10::IValue>& each) -> const c10::IValue& {
      return each.first >= 0 ? slots[each.first] : each.second;
    };
    switch (argument.kind) {
      case Argument::Kind::constant:
        return argument.constant;
      case Argument::Kind::slot:
        return slots[argument.slot];
      case Argument::Kind::list: {
        c10::List<at::Tensor> list;
        for (const auto& each : argument.items) {
          list.push_back(item(each).toTensor());
        }
        return list;
      }
      default: {
        c10::List<std::optional<at::Tensor>> list;
        for (const auto& each : argument.items) {
          list.push_back(item(each).toOptional<at::Tensor>());
        }
        return list;
      }
    }
  }

  std::vector<Call> calls_;
  std::vector<Argument> next_;
  int64_t slots_ = 0;
};

} // namespace

TORCH_LIBRARY_FRAGMENT(fastgen, m) {
  m.class_<Program>("Program")
      .def(torch::init<>())
      .def("add_constant", &Program::add_constant)
      .def("add_number", &Program::add_number)
      .def("add_integers", &Program::add_integers)
      .def("add_no_numbers", &Program::add_no_numbers)
      .def("add_slot", &Program::add_slot)
      .def("begin_list", &Program::begin_list)
      .def("add_item", &Program::add_item)
      .def("add_call", &Program::add_call)
      .def("run", &Program::run);
}

} // namespace fastgen
