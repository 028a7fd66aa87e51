// Modules: their functions and variables. A kernel is parsed when it is first asked for.

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <new>
#include <sstream>
#include <stdexcept>

#include "allocations.h"
#include "parser.h"
#include "program.h"
#include "text.h"

namespace ptx {
namespace {

// Never freed: a process may launch kernels until its end.
struct Library {
  std::vector<std::unique_ptr<Module>> modules;
  std::unordered_map<std::string, Module*> entries;
  std::map<std::string, std::unique_ptr<Kernel>> kernels;
};
Library& library() {
  static auto& one = *new Library;
  return one;
}

u8* zeros(u64 size) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 256, std::max<u64>(size, 1)) != 0) throw std::bad_alloc();
  return static_cast<u8*>(std::memset(memory, 0, size));
}

void set_initial_bytes(const std::string& values, Symbol& symbol) {
  size_t at = 0;
  for (const std::string& value : split_list(values)) {
    if (at < symbol.size) symbol.memory[at++] = static_cast<u8>(std::stoul(value, nullptr, 0));
  }
}

class Scanner {
 public:
  explicit Scanner(Module& module) : module_(module), text_(module.text) {}

  void scan() {
    while ((at_ = skip_space(text_, at_)) < text_.size()) next();
  }

 private:
  void next() {
    if (text_[at_] != '.') throw std::runtime_error(module_.path + ": not PTX: " + line());
    const std::string word = text_.substr(at_, text_.find_first_of(" \t\n", at_) - at_);
    if (word == ".file") {
      file();
    } else if (word == ".section") {
      at_ = closing(text_, text_.find('{', at_)) + 1;
    } else if (word == ".version" || word == ".target" || word == ".address_size") {
      at_ = text_.find('\n', at_);
    } else if (head().find(".func") != std::string::npos) {
      function(".func");
    } else if (head().find(".entry") != std::string::npos) {
      function(".entry");
    } else {
      variable();
    }
  }

  std::string line() const { return text_.substr(at_, text_.find('\n', at_) - at_); }
  std::string head() const { return text_.substr(at_, text_.find_first_of("({;=", at_) - at_); }

  void file() {
    std::istringstream words(line());
    std::string word, path;
    u32 number = 0;
    words >> word >> number >> path;
    module_.files[number] = path.substr(1, path.find('"', 1) - 1);
    at_ += line().size();
  }

  // Notes a function's name and leaves its body for later; a mere declaration has none.
  void function(const char* directive) {
    const size_t start = at_;
    at_ = skip_space(text_, text_.find(directive, at_) + std::strlen(directive));
    if (text_[at_] == '(') at_ = skip_space(text_, closing(text_, at_) + 1);  // what it returns
    const size_t end = text_.find_first_of("( \t\n;{", at_);
    const std::string name = text_.substr(at_, end - at_);
    at_ = skip_space(text_, end);
    if (text_[at_] == '(') at_ = closing(text_, at_) + 1;
    at_ = text_.find_first_of("{;", at_);
    if (text_[at_] == '{') {
      module_.functions[name] = start;
      if (std::string(directive) == ".entry") module_.entries.push_back(name);
      at_ = closing(text_, at_);
    }
    ++at_;
  }

  void variable() {
    const size_t end = text_.find(';', at_);
    const std::string whole = text_.substr(at_, end - at_);
    const size_t equals = whole.find('=');
    const Declaration made = declaration(whole.substr(0, equals));
    const bool is_shared = whole.find(".shared") != std::string::npos;
    if (!is_shared && whole.find(".global") == std::string::npos &&
        whole.find(".const") == std::string::npos) {
      throw std::runtime_error(module_.path + ": not understood: " + line());
    }
    Symbol symbol{is_shared, made.has_no_size, made.size, made.align, nullptr};
    if (!is_shared) {
      symbol.memory = zeros(made.size);
      add_allocation(symbol.memory, made.size);
    }
    if (equals != std::string::npos) {
      if (whole.find(".b8") == std::string::npos) {
        throw std::runtime_error(module_.path + ": initial values but bytes: " + made.name);
      }
      const size_t open = whole.find('{', equals);
      set_initial_bytes(whole.substr(open + 1, whole.rfind('}') - open - 1), symbol);
    }
    module_.symbols[made.name] = symbol;
    at_ = end + 1;
  }

  Module& module_;
  const std::string& text_;
  size_t at_ = 0;
};

Module& add_module(const std::string& path, const std::string& text) {
  auto module = std::make_unique<Module>();
  module->path = path;
  module->text = without_comments(text);
  Scanner(*module).scan();
  library().modules.push_back(std::move(module));
  return *library().modules.back();
}

Kernel* parse(const std::string& key, Module& module, const std::string& name) {
  auto kernel = std::make_unique<Kernel>();
  kernel->name = name;
  kernel->module = &module;
  parse_kernel(module, *kernel);
  kernel->has_run.assign(kernel->code.size(), 0);
  return (library().kernels[key] = std::move(kernel)).get();
}

std::string contents(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace

void load_folder(const std::string& folder) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() == ".ptx") paths.push_back(entry.path());
  }
  if (paths.empty()) throw std::runtime_error("no PTX in " + folder);
  std::sort(paths.begin(), paths.end());
  for (const auto& path : paths) {
    Module& module = add_module(path.string(), contents(path));
    for (const std::string& name : module.entries) library().entries[name] = &module;
  }
}

Kernel* find_kernel(const std::string& name) {
  const auto known = library().kernels.find(name);
  if (known != library().kernels.end()) return known->second.get();
  const auto entry = library().entries.find(name);
  return entry == library().entries.end() ? nullptr : parse(name, *entry->second, name);
}

Kernel* load_text(const std::string& path, const std::string& text, const std::string& name) {
  Module& module = add_module(path, text);
  if (module.functions.count(name) == 0) throw std::runtime_error("no kernel " + name);
  return parse(path + " " + name, module, name);
}

void* find_variable(const std::string& name) {
  for (const auto& module : library().modules) {
    const auto found = module->symbols.find(name);
    if (found != module->symbols.end() && !found->second.is_shared) return found->second.memory;
  }
  return nullptr;
}

std::vector<std::string> kernel_names() {
  std::vector<std::string> names;
  for (const auto& entry : library().entries) names.push_back(entry.first);
  std::sort(names.begin(), names.end());
  return names;
}

std::vector<const Kernel*> parsed_kernels() {
  std::vector<const Kernel*> all;
  for (const auto& each : library().kernels) all.push_back(each.second.get());
  return all;
}

namespace {

std::string file_line(const Module& module, u32 file, u32 line) {
  const auto found = module.files.find(file);
  if (found == module.files.end()) return "";
  const size_t inside = found->second.find("csrc/");
  const std::string path =
      inside == std::string::npos ? found->second : found->second.substr(inside);
  return path + ":" + std::to_string(line);
}

}  // namespace

std::string source_line(const Kernel& kernel, const Instruction& in) {
  return file_line(*kernel.module, in.source.file, in.source.file_line);
}

std::string describe(const Kernel& kernel, const Instruction& in) {
  const Module& module = *kernel.module;
  std::string text = "`" + kernel.texts[in.text] + "`";
  const std::string line = source_line(kernel, in);
  if (!line.empty()) text += " of " + line;
  const std::string caller = file_line(module, in.source.inlined_file, in.source.inlined_line);
  if (!caller.empty()) text += " (in " + caller + ")";
  const std::string file = module.path.substr(module.path.rfind('/') + 1);
  return text + ", " + file + ":" + std::to_string(in.source.line);
}

}  // namespace ptx
