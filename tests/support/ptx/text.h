// Pieces of text of a module.

#pragma once

#include <string>
#include <vector>

#include "types.h"

namespace ptx {

bool is_space(char c);
std::string trim(const std::string& text);
bool starts_with(const std::string& text, const std::string& with);

// The parts between separators.
std::vector<std::string> split(const std::string& text, char separator);
// The parts between commas that stand outside of brackets, trimmed.
std::vector<std::string> split_list(const std::string& text);

// The position of the first character that is no space, from a position on.
size_t skip_space(const std::string& text, size_t from);
// The position of the bracket that closes the one at `from`.
size_t closing(const std::string& text, size_t from);

// The bytes of a type, "u32" or ".u32"; 0 where it names no number of bits.
int bytes_of_type(const std::string& type);

// A variable's declaration, ".param .align 8 .b8 name[24]".
struct Declaration {
  std::string name;
  u64 size = 0, align = 1;
  bool has_no_size = false;  // name[]
};
Declaration declaration(const std::string& text);

std::string without_comments(std::string text);
std::string hex(u64 number);

}  // namespace ptx
