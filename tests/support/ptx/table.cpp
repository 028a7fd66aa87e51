#include "table.h"

#include <algorithm>
#include <stdexcept>

namespace ptx {
namespace {

u8 width_of(char letter) {
  switch (letter) {
    case 'h':
      return 2;
    case 'w':
      return 4;
    case 'q':
      return 8;
    default:
      return 0;
  }
}

void bind_row(Operands& operands, const Words& words, const Row& row, Instruction& in) {
  if (words.arguments.size() != row.signature.size()) {
    throw std::runtime_error("a number of operands but " + std::to_string(row.signature.size()));
  }
  Operand* const places[] = {&in.d, &in.a, &in.b, &in.c, &in.e};
  for (size_t i = 0; i < words.arguments.size(); ++i) {
    const u8 width = width_of(row.signature[i]);
    const std::string& word = words.arguments[i];
    *places[i] = i == 0 ? operands.reg(word) : operands.value(word, width);
    if (places[i]->width != width) throw std::runtime_error("the width of " + word);
  }
  in.run = row.run;
  in.option = row.option;
  in.defined = row.defined;
}

}  // namespace

bool Words::has(const std::string& part) const {
  return std::find(parts.begin(), parts.end(), part) != parts.end();
}

Table::Table() {
  for (const auto add_group : {add_integers, add_bits, add_floats, add_halves, add_approximations,
                               add_predicates, add_conversions, add_moves, add_memory, add_copies,
                               add_bulk_copies, add_exchanges, add_synchronisation}) {
    add_group(*this);
  }
}

Table& Table::instance() {
  static Table& table = *new Table;
  return table;
}

void Table::add(const std::string& name, Run run, const std::string& signature, u8 option,
                Defined defined) {
  rows_[name] = {run, signature, option, defined};
}

void Table::add_form(const std::string& first, Form form) { forms_[first] = form; }

void Table::bind(Operands& operands, const Words& words, Instruction& in) const {
  const auto row = rows_.find(words.name);
  if (row != rows_.end()) return bind_row(operands, words, row->second, in);
  const auto form = forms_.find(words.parts[0]);
  if (form == forms_.end()) throw std::runtime_error("unknown instruction " + words.name);
  form->second(operands, words, in);
}

}  // namespace ptx
