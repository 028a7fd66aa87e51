#include "parser.h"

#include <algorithm>
#include <stdexcept>

#include "operands.h"
#include "statements.h"
#include "table.h"
#include "text.h"

namespace ptx {
namespace {

constexpr size_t kMostText = 200;  // characters of an instruction that a report shows

// A function that a kernel calls. Its parameters and its result have places of their own in each
// lane's memory of arguments: functions of a device do not call themselves.
struct Function {
  u32 entry = kNone, slot = 0;
  std::vector<std::pair<std::string, u64>> parameters;  // address
  std::string returned;
  u64 returned_at = 0;
};

class KernelParser {
 public:
  KernelParser(const Module& module, Kernel& kernel)
      : module_(module), text_(module.text), kernel_(kernel), operands_(module, kernel) {}

  void parse() {
    parse_entry();
    while (!to_do_.empty()) {
      const std::string name = to_do_.back();
      to_do_.pop_back();
      parse_function(name);
    }
    for (const auto& [index, name] : calls_) kernel_.code[index].target = functions_.at(name).entry;
    place_dynamic_shared();
    kernel_.register_bytes = static_cast<u32>(round_up(kernel_.register_bytes, 64));
    kernel_.argument_bytes = static_cast<u32>(round_up(kernel_.argument_bytes, 16));
    kernel_.local_bytes = static_cast<u32>(round_up(kernel_.local_bytes, 16));
    kernel_.functions = static_cast<u32>(functions_.size());
  }

 private:
  void parse_entry() {
    size_t at = text_.find(kernel_.name, module_.functions.at(kernel_.name));
    at = skip_space(text_, at + kernel_.name.size());
    if (text_[at] == '(') {
      const size_t end = closing(text_, at);
      for (const auto& each : split_list(text_.substr(at + 1, end - at - 1))) add_parameter(each);
      at = end + 1;
    }
    const size_t body = text_.find('{', at);
    const std::string limits = text_.substr(at, body - at);
    for (const char* name : {".maxntid", ".reqntid"}) {
      const size_t threads = limits.find(name);
      if (threads == std::string::npos) continue;
      kernel_.most_threads = static_cast<u32>(std::stoul(limits.substr(threads + 8)));
    }
    parse_body(body, nullptr);
  }

  void add_parameter(const std::string& text) {
    const Declaration made = declaration(text);
    const u64 place = round_up(kernel_.parameter_bytes, made.align);
    kernel_.parameters.push_back({made.name, static_cast<u32>(place), static_cast<u32>(made.size)});
    kernel_.parameter_bytes = static_cast<u32>(place + made.size);
    operands_.declare_at(made.name, kParameterWindow | place);
  }

  u64 place_argument(const Declaration& made) {
    const u64 place = round_up(kernel_.argument_bytes, std::max<u64>(made.align, 8));
    kernel_.argument_bytes = static_cast<u32>(place + made.size);
    return kArgumentWindow | place;
  }

  // A called function. Its body is parsed later.
  const Function& function(const std::string& name) {
    const auto known = functions_.find(name);
    if (known != functions_.end()) return known->second;
    const auto found = module_.functions.find(name);
    if (found == module_.functions.end()) throw std::runtime_error("no body of " + name);
    Function made;
    made.slot = static_cast<u32>(functions_.size());
    size_t at = skip_space(text_, text_.find(".func", found->second) + 5);
    if (text_[at] == '(') {
      const size_t end = closing(text_, at);
      const Declaration returned = declaration(text_.substr(at + 1, end - at - 1));
      made.returned = returned.name;
      made.returned_at = place_argument(returned);
      at = end + 1;
    }
    at = skip_space(text_, text_.find(name, at) + name.size());
    if (text_[at] == '(') {
      for (const auto& each : split_list(text_.substr(at + 1, closing(text_, at) - at - 1))) {
        const Declaration parameter = declaration(each);
        made.parameters.emplace_back(parameter.name, place_argument(parameter));
      }
    }
    to_do_.push_back(name);
    return functions_[name] = made;
  }

  void parse_function(const std::string& name) {
    Function& made = functions_.at(name);
    made.entry = static_cast<u32>(kernel_.code.size());
    operands_.open();
    for (const auto& [parameter, address] : made.parameters) {
      operands_.declare_at(parameter, address);
    }
    if (!made.returned.empty()) operands_.declare_at(made.returned, made.returned_at);
    size_t at = skip_space(text_, text_.find(".func", module_.functions.at(name)) + 5);
    if (text_[at] == '(') at = closing(text_, at) + 1;
    at = skip_space(text_, text_.find(name, at) + name.size());
    if (text_[at] == '(') at = closing(text_, at) + 1;
    const u32 slot = made.slot;
    parse_body(text_.find('{', at), &slot);
    operands_.close();
  }

  // `slot` belongs to a function. It is null for the kernel itself.
  void parse_body(size_t open, const u32* slot) {
    const std::vector<Statement> statements = statements_of(text_, open);
    labels_.clear();
    jumps_.clear();
    operands_.open();
    for (size_t i = 0; i < statements.size(); ++i) {
      try {
        parse_statement(statements, i, slot);
      } catch (const std::exception& error) {
        throw std::runtime_error(module_.path + ":" + std::to_string(statements[i].source.line) +
                                 ": " + error.what() + ": " + statements[i].text);
      }
    }
    operands_.close();
    for (const auto& [index, label] : jumps_) kernel_.code[index].target = labels_.at(label);
    add_end(slot);
  }

  void parse_statement(const std::vector<Statement>& statements, size_t i, const u32* slot) {
    const Statement& statement = statements[i];
    switch (statement.part) {
      case Part::kOpen:
        operands_.open();
        bind_arguments(statements, i);
        break;
      case Part::kClose:
        operands_.close();
        break;
      case Part::kLabel:
        labels_[statement.text] = static_cast<u32>(kernel_.code.size());
        break;
      case Part::kDirective:
        parse_directive(statement.text);
        break;
      case Part::kInstruction:
        parse_instruction(statement, slot);
    }
  }

  // The scope of a call declares its arguments, which get the places of the function's parameters.
  void bind_arguments(const std::vector<Statement>& statements, size_t open) {
    int depth = 0;
    for (size_t i = open; i < statements.size(); ++i) {
      depth += statements[i].part == Part::kOpen;
      depth -= statements[i].part == Part::kClose;
      if (depth == 0) return;
      if (depth != 1 || !is_call(statements[i])) continue;
      const Call call = call_of(statements[i].text);
      const Function& called = function(call.function);
      if (call.arguments.size() != called.parameters.size()) {
        throw std::runtime_error("a call with another number of arguments");
      }
      for (size_t k = 0; k < call.arguments.size(); ++k) {
        operands_.declare_at(call.arguments[k], called.parameters[k].second);
      }
      if (!call.returned.empty()) operands_.declare_at(call.returned, called.returned_at);
    }
  }

  void parse_directive(const std::string& text) {
    if (starts_with(text, ".reg")) {
      operands_.declare_registers(trim(text.substr(4)));
    } else if (!starts_with(text, ".param") && !starts_with(text, ".pragma")) {
      operands_.declare_variable(text);
    }
  }

  void parse_instruction(const Statement& statement, const u32* slot) {
    Instruction in;
    in.source = statement.source;
    in.text = static_cast<u32>(kernel_.texts.size());
    kernel_.texts.push_back(statement.text.substr(0, kMostText));
    std::string rest = statement.text;
    if (rest[0] == '@') rest = take_predicate(rest, in);
    const size_t space = rest.find(' ');
    const std::string name = rest.substr(0, space);
    const std::string arguments = space == std::string::npos ? "" : trim(rest.substr(space));
    const auto index = static_cast<u32>(kernel_.code.size());
    if (name == "bra" || name == "bra.uni") {
      in.kind = Kind::kBranch;
      jumps_.emplace_back(index, arguments);
    } else if (name == "call" || name == "call.uni") {
      const Call call = call_of(rest);
      in.kind = Kind::kCall;
      in.slot = function(call.function).slot;
      calls_.emplace_back(index, call.function);
    } else if (name == "ret" || name == "ret.uni" || name == "exit") {
      in.kind = slot != nullptr && name != "exit" ? Kind::kReturn : Kind::kExit;
      if (slot != nullptr) in.slot = *slot;
    } else {
      Table::instance().bind(operands_, {name, split(name, '.'), split_list(arguments)}, in);
    }
    if (operands_.has_named_dynamic()) in_dynamic_.push_back(index);
    kernel_.code.push_back(in);
  }

  // "@!%p1 bra L": returns what stands behind the predicate.
  std::string take_predicate(const std::string& text, Instruction& in) {
    const size_t space = text.find(' ');
    std::string name = text.substr(1, space - 1);
    in.has_predicate = true;
    in.negated = name[0] == '!';
    if (in.negated) name = name.substr(1);
    in.predicate = operands_.reg(name);
    return trim(text.substr(space));
  }

  // A body that runs off its end returns.
  void add_end(const u32* slot) {
    Instruction end;
    end.kind = slot != nullptr ? Kind::kReturn : Kind::kExit;
    if (slot != nullptr) end.slot = *slot;
    if (!kernel_.code.empty()) end.source = kernel_.code.back().source;
    end.text = static_cast<u32>(kernel_.texts.size());
    kernel_.texts.push_back("(end)");
    kernel_.code.push_back(end);
  }

  // Dynamic shared memory lies behind the variables.
  void place_dynamic_shared() {
    kernel_.dynamic_shared = static_cast<u32>(round_up(kSharedBase + kernel_.static_shared, 16));
    for (const u32 index : in_dynamic_) {
      kernel_.code[index].number += kernel_.dynamic_shared;
      kernel_.code[index].address.offset += kernel_.dynamic_shared;
    }
  }

  const Module& module_;
  const std::string& text_;
  Kernel& kernel_;
  Operands operands_;
  std::map<std::string, Function> functions_;
  std::vector<std::string> to_do_;
  std::vector<std::pair<u32, std::string>> calls_, jumps_;  // instruction, where it goes
  std::unordered_map<std::string, u32> labels_;
  std::vector<u32> in_dynamic_;
};

}  // namespace

void parse_kernel(const Module& module, Kernel& kernel) { KernelParser(module, kernel).parse(); }

}  // namespace ptx
