// The statements of a function's body, in their order.

#pragma once

#include <string>
#include <vector>

#include "program.h"

namespace ptx {

enum class Part : u8 { kOpen, kClose, kLabel, kDirective, kInstruction };

struct Statement {
  Part part;
  std::string text;  // of a label: its name
  Source source;
};

// The statements of the body that opens at this position.
std::vector<Statement> statements_of(const std::string& text, size_t open);

// The parts of a call: "call.uni (returned), function, (argument, argument)".
struct Call {
  std::string function, returned;
  std::vector<std::string> arguments;
};
bool is_call(const Statement& statement);
Call call_of(const std::string& text);

}  // namespace ptx
