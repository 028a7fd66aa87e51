// The table of instructions: a row per mnemonic, and forms of those with operands of their own.

#pragma once

#include <string>
#include <unordered_map>
#include <vector>

#include "lanes.h"
#include "operands.h"

namespace ptx {

// The text of an instruction, split.
struct Words {
  std::string name;                // "shfl.sync.bfly.b32"
  std::vector<std::string> parts;  // of the name
  std::vector<std::string> arguments;
  bool has(const std::string& part) const;
};

using Form = void (*)(Operands& operands, const Words& words, Instruction& in);

// Operands by their width: h 2, w 4, q 8 bytes, p a predicate. The first is the result.
struct Row {
  Run run;
  std::string signature;
  u8 option;
  Defined defined;
};

class Table {
 public:
  static Table& instance();

  void add(const std::string& name, Run run, const std::string& signature, u8 option = 0,
           Defined defined = Defined::kByAll);
  // A function of one lane's values; its types say the widths of the operands.
  template <auto F>
  void add(const std::string& name, Defined defined = Defined::kByAll) {
    using Lanes = LanesOf<decltype(F), F>;
    add(name, Lanes::run, Lanes::signature(), 0, defined);
  }
  // Every name whose first part this is, and that has no row.
  void add_form(const std::string& first, Form form);

  void bind(Operands& operands, const Words& words, Instruction& in) const;

 private:
  Table();
  std::unordered_map<std::string, Row> rows_;
  std::unordered_map<std::string, Form> forms_;
};

// The groups, each in a file of its own.
void add_integers(Table& table);
void add_bits(Table& table);
void add_floats(Table& table);
void add_halves(Table& table);
void add_approximations(Table& table);
void add_predicates(Table& table);
void add_conversions(Table& table);
void add_moves(Table& table);
void add_memory(Table& table);
void add_copies(Table& table);
void add_bulk_copies(Table& table);
void add_exchanges(Table& table);
void add_synchronisation(Table& table);

// A form of cp.
void bind_bulk_copy(Operands& operands, const Words& words, Instruction& in);

}  // namespace ptx
