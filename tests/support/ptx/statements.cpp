#include "statements.h"

#include <algorithm>
#include <cstdio>

#include "text.h"

namespace ptx {
namespace {

// ".loc 1 146 7, function_name $L, inlined_at 2 30 4"
void read_location(const std::string& text, Source& source) {
  source.inlined_file = source.inlined_line = 0;
  std::sscanf(text.c_str(), ".loc %u %u", &source.file, &source.file_line);
  const size_t inlined = text.find("inlined_at");
  if (inlined == std::string::npos) return;
  std::sscanf(text.c_str() + inlined, "inlined_at %u %u", &source.inlined_file,
              &source.inlined_line);
}

class Reader {
 public:
  Reader(const std::string& text, size_t open) : text_(text), at_(open + 1) {
    const auto end = text.begin() + static_cast<long>(at_);
    source_.line = 1 + static_cast<u32>(std::count(text.begin(), end, '\n'));
  }

  std::vector<Statement> read() {
    for (int depth = 1; depth > 0;) {
      pass_space();
      const char c = text_.at(at_);
      if (c == '{' || c == '}') {
        depth += c == '{' ? 1 : -1;
        if (depth > 0) add(c == '{' ? Part::kOpen : Part::kClose, "");
        ++at_;
      } else if (text_.compare(at_, 4, ".loc") == 0 && is_space(text_[at_ + 4])) {
        const size_t end = text_.find('\n', at_);
        read_location(text_.substr(at_, end - at_), source_);
        at_ = end;
      } else {
        statement();
      }
    }
    return std::move(made_);
  }

 private:
  void pass_space() {
    for (; is_space(text_.at(at_)); ++at_) source_.line += text_[at_] == '\n';
  }

  void add(Part part, const std::string& text) { made_.push_back({part, text, source_}); }

  // A label ends with a colon, before any space; all else with a semicolon. A name may have `::`.
  void statement() {
    const size_t end = text_.find_first_of(":; \t\n", at_);
    if (text_[end] == ':' && text_[end + 1] != ':' && text_[at_] != '.') {
      add(Part::kLabel, text_.substr(at_, end - at_));
      at_ = end + 1;
      return;
    }
    const size_t semicolon = text_.find(';', at_);
    std::string whole = text_.substr(at_, semicolon - at_);
    const auto lines = std::count(whole.begin(), whole.end(), '\n');
    std::replace_if(whole.begin(), whole.end(), is_space, ' ');
    whole = trim(whole);
    if (!whole.empty()) add(whole[0] == '.' ? Part::kDirective : Part::kInstruction, whole);
    source_.line += static_cast<u32>(lines);
    at_ = semicolon + 1;
  }

  const std::string& text_;
  size_t at_;
  Source source_;
  std::vector<Statement> made_;
};

}  // namespace

std::vector<Statement> statements_of(const std::string& text, size_t open) {
  return Reader(text, open).read();
}

bool is_call(const Statement& statement) {
  return statement.part == Part::kInstruction &&
         (starts_with(statement.text, "call.uni ") || starts_with(statement.text, "call "));
}

Call call_of(const std::string& text) {
  Call call;
  std::string rest = trim(text.substr(text.find(' ')));
  if (rest[0] == '(') {
    const size_t end = closing(rest, 0);
    call.returned = trim(rest.substr(1, end - 1));
    rest = trim(rest.substr(rest.find(',', end) + 1));
  }
  call.function = rest.substr(0, rest.find_first_of(", ("));
  const size_t open = rest.find('(');
  if (open != std::string::npos) {
    call.arguments = split_list(rest.substr(open + 1, closing(rest, open) - open - 1));
  }
  return call;
}

}  // namespace ptx
