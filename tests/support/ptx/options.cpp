#include "options.h"

#include <cstdlib>
#include <stdexcept>

namespace ptx {
namespace {

std::string text_of(const char* name, const char* otherwise) {
  const char* const value = std::getenv(name);
  return value == nullptr || *value == '\0' ? otherwise : value;
}

// One of a variable's words, by its position.
int choice(const char* name, std::initializer_list<const char*> words) {
  const std::string value = text_of(name, *words.begin());
  int position = 0;
  std::string all;
  for (const char* word : words) {
    if (value == word) return position;
    all += (position++ == 0 ? "" : ", ") + std::string(word);
  }
  throw std::runtime_error(std::string(name) + " must be one of " + all + ", got " + value);
}

Options from_environment() {
  Options made;
  made.chip = text_of("KLFAST_PTX_CHIP", "h200");
  made.is_random = choice("KLFAST_PTX_SCHEDULE", {"lowest", "random"}) == 1;
  made.seed = std::stoull(text_of("KLFAST_PTX_SEED", "1"));
  const int races = choice("KLFAST_PTX_RACES", {"shared", "all", "none"});
  made.checks_shared = races != 2;
  made.checks_global = races == 1;
  made.perturb = std::stoi(text_of("KLFAST_PTX_PERTURB", "0"));
  made.arch = std::stoi(text_of("KLFAST_PTX_ARCH", "90"));
  made.coverage = text_of("KLFAST_PTX_COVERAGE", "");
  return made;
}

}  // namespace

Options& options() {
  static Options& one = *new Options(from_environment());
  return one;
}

}  // namespace ptx
