#include "text.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <sstream>
#include <stdexcept>

namespace ptx {
namespace {

bool opens(char c) { return c == '{' || c == '[' || c == '('; }
bool closes(char c) { return c == '}' || c == ']' || c == ')'; }

// Takes "[24]" off a name.
u64 take_count(Declaration& made) {
  const size_t bracket = made.name.find('[');
  if (bracket == std::string::npos) return 1;
  const size_t end = made.name.find(']', bracket);
  const std::string count = made.name.substr(bracket + 1, end - bracket - 1);
  made.name.resize(bracket);
  made.has_no_size = count.empty();
  return count.empty() ? 0 : std::stoull(count);
}

}  // namespace

bool is_space(char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; }

std::string trim(const std::string& text) {
  size_t first = 0, end = text.size();
  while (first < end && is_space(text[first])) ++first;
  while (end > first && is_space(text[end - 1])) --end;
  return text.substr(first, end - first);
}

bool starts_with(const std::string& text, const std::string& with) {
  return text.compare(0, with.size(), with) == 0;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  for (size_t from = 0;;) {
    const size_t to = text.find(separator, from);
    parts.push_back(text.substr(from, to - from));
    if (to == std::string::npos) return parts;
    from = to + 1;
  }
}

std::vector<std::string> split_list(const std::string& text) {
  std::vector<std::string> parts;
  std::string part;
  int depth = 0;
  for (const char c : text) {
    depth += opens(c) - closes(c);
    if (c == ',' && depth == 0) {
      parts.push_back(trim(part));
      part.clear();
    } else {
      part += c;
    }
  }
  if (!trim(part).empty()) parts.push_back(trim(part));
  return parts;
}

size_t skip_space(const std::string& text, size_t from) {
  while (from < text.size() && is_space(text[from])) ++from;
  return from;
}

size_t closing(const std::string& text, size_t from) {
  int depth = 0;
  for (size_t i = from; i < text.size(); ++i) {
    depth += opens(text[i]) - closes(text[i]);
    if (depth == 0) return i;
  }
  throw std::runtime_error("a bracket that is never closed");
}

int bytes_of_type(const std::string& type) {
  const size_t digits = type.find_first_of("0123456789");
  return digits == std::string::npos ? 0 : std::stoi(type.substr(digits)) / 8;
}

Declaration declaration(const std::string& text) {
  std::istringstream words(text);
  std::string word;
  Declaration made;
  u64 align = 0, bytes = 0;
  bool of_pointee = false;  // ".ptr .global .align 16" is the alignment of the target
  while (words >> word) {
    if (word == ".ptr") {
      of_pointee = true;
    } else if (word == ".align") {
      u64 number = 0;
      words >> number;
      if (!of_pointee) align = number;
    } else if (word[0] == '.') {
      if (const int size = bytes_of_type(word)) bytes = static_cast<u64>(size);
    } else {
      made.name = word;
    }
  }
  made.size = take_count(made) * bytes;
  made.align = align != 0 ? align : std::max<u64>(bytes, 1);
  return made;
}

std::string without_comments(std::string text) {
  for (size_t at = 0; (at = text.find("//", at)) != std::string::npos;) {
    const size_t end = std::min(text.find('\n', at), text.size());
    std::fill(text.begin() + static_cast<long>(at), text.begin() + static_cast<long>(end), ' ');
    at = end;
  }
  return text;
}

std::string hex(u64 number) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(number));
  return text;
}

}  // namespace ptx
