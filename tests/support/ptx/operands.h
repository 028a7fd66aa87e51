// Resolves the operands of a kernel's instructions: registers, constants, variables.

#pragma once

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "program.h"

namespace ptx {

class Operands {
 public:
  Operands(const Module& module, Kernel& kernel);

  // Scopes of registers and variables, as braces make them.
  void open();
  void close();
  void declare_registers(const std::string& declaration);  // "b32 %r<5>"
  void declare_variable(const std::string& declaration);   // of local or shared memory
  void declare_at(const std::string& name, u64 address);   // a parameter

  bool is_register(const std::string& word) const;
  // Each of these throws where it finds no such operand.
  Operand reg(const std::string& word) const;
  Operand value(const std::string& word,
                u8 width);  // a register, a constant, or a special register
  Address address(const std::string& brackets);
  u64 address_of(const std::string& name);
  static std::vector<std::string> elements(const std::string& braces);

  // True if an address since the last call lies in dynamic shared memory. The place of that memory
  // is known after the whole kernel has been read.
  bool has_named_dynamic();

 private:
  struct Scope {
    std::unordered_map<std::string, Operand> registers;
    std::unordered_map<std::string, u64> variables;
    std::unordered_map<std::string, Symbol> shared;
  };

  const Operand* find_register(const std::string& word) const;
  const Symbol* find_symbol(const std::string& name) const;
  Operand place(u8 width, size_t bytes);
  Operand constant(const std::string& word, u8 width);
  Operand special(const std::string& word);
  u64 address_in_shared(const std::string& name, const Symbol& symbol);

  const Module& module_;
  Kernel& kernel_;
  std::vector<Scope> scopes_;
  std::unordered_map<std::string, Operand> constants_;
  std::unordered_map<std::string, u64> shared_places_;
  bool has_named_dynamic_ = false;
};

}  // namespace ptx
