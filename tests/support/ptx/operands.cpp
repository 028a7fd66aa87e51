#include "operands.h"

#include <algorithm>
#include <cctype>
#include <stdexcept>

#include "text.h"

namespace ptx {
namespace {

const std::unordered_map<std::string, Special> kSpecials = {
    {"%tid.x", Special::kThread},
    {"%tid.y", Special::kZero},
    {"%tid.z", Special::kZero},
    {"%ntid.x", Special::kThreads},
    {"%ntid.y", Special::kOne},
    {"%ntid.z", Special::kOne},
    {"%ctaid.x", Special::kBlock},
    {"%ctaid.y", Special::kZero},
    {"%ctaid.z", Special::kZero},
    {"%nctaid.x", Special::kBlocks},
    {"%nctaid.y", Special::kOne},
    {"%nctaid.z", Special::kOne},
    {"%laneid", Special::kLane},
    {"%warpid", Special::kWarp},
    {"%cluster_ctarank", Special::kRank},
    {"%cluster_nctarank", Special::kRanks},
    {"%lanemask_lt", Special::kLaneMaskLower},
    {"%lanemask_le", Special::kLaneMaskLowerEqual},
};

// The bits of "0f3F800000", "0d...", "0x1F", "-7", "42U".
u64 bits_of_constant(std::string word) {
  if (word == "WARP_SZ") return kLanes;
  const bool is_float =
      word.size() > 2 && word[0] == '0' && std::strchr("fFdD", word[1]) != nullptr;
  if (is_float) return std::stoull(word.substr(2), nullptr, 16);
  if (word[0] == '-') return u64{0} - std::stoull(word.substr(1), nullptr, 0);
  while (word.back() == 'U' || word.back() == 'u') word.pop_back();
  return std::stoull(word, nullptr, 0);
}

std::string bytes_in_lanes(u64 bits, u8 width) {
  if (width == 0) {
    const u32 lanes = bits != 0 ? kAllLanes : 0;
    return std::string(reinterpret_cast<const char*>(&lanes), sizeof lanes);
  }
  std::string bytes;
  for (u32 i = 0; i < kLanes; ++i) bytes.append(reinterpret_cast<const char*>(&bits), width);
  return bytes;
}

bool is_number(const std::string& word) {
  return word == "WARP_SZ" ||
         (!word.empty() && (std::isdigit(static_cast<unsigned char>(word[0])) || word[0] == '-'));
}

}  // namespace

Operands::Operands(const Module& module, Kernel& kernel) : module_(module), kernel_(kernel) {
  kernel_.register_names.assign(1, "");  // of id 0
  open();
}

void Operands::open() { scopes_.emplace_back(); }
void Operands::close() { scopes_.pop_back(); }

// Registers lie so that a vector instruction can load the values of neighbouring lanes.
Operand Operands::place(u8 width, size_t bytes) {
  Operand made;
  made.width = width;
  made.offset = static_cast<u32>(round_up(kernel_.register_bytes, 64));
  kernel_.register_bytes = made.offset + static_cast<u32>(bytes);
  return made;
}

void Operands::declare_registers(const std::string& text) {
  const size_t space = text.find_first_of(" \t");
  const std::string type = text.substr(0, space);
  const auto width = static_cast<u8>(type == ".pred" ? 0 : bytes_of_type(type));
  auto declare = [&](const std::string& name) {
    Operand made = place(width, width == 0 ? 4 : kLanes * width);
    made.id = static_cast<u32>(kernel_.register_names.size());
    kernel_.register_names.push_back(name);
    scopes_.back().registers[name] = made;
  };
  for (const std::string& name : split_list(text.substr(space))) {
    const size_t count = name.find('<');  // "%r<5>" stands for %r0 to %r4
    if (count == std::string::npos) {
      declare(name);
      continue;
    }
    const int registers = std::stoi(name.substr(count + 1));
    for (int i = 0; i < registers; ++i) declare(name.substr(0, count) + std::to_string(i));
  }
}

void Operands::declare_variable(const std::string& text) {
  const Declaration made = declaration(text);
  if (starts_with(text, ".shared")) {
    scopes_.back().shared[made.name] = {true, made.has_no_size, made.size, made.align, nullptr};
  } else if (starts_with(text, ".local")) {
    const u64 place = round_up(kernel_.local_bytes, std::max<u64>(made.align, 16));
    kernel_.local_bytes = static_cast<u32>(place + made.size);
    declare_at(made.name, place);
  } else {
    throw std::runtime_error("unknown declaration");
  }
}

void Operands::declare_at(const std::string& name, u64 address) {
  scopes_.back().variables[name] = address;
}

const Operand* Operands::find_register(const std::string& word) const {
  for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
    const auto found = scope->registers.find(word);
    if (found != scope->registers.end()) return &found->second;
  }
  return nullptr;
}

bool Operands::is_register(const std::string& word) const { return find_register(word) != nullptr; }

Operand Operands::reg(const std::string& word) const {
  const Operand* const found = find_register(word);
  if (found == nullptr) throw std::runtime_error("unknown register " + word);
  return *found;
}

Operand Operands::constant(const std::string& word, u8 width) {
  const std::string key = word + "/" + std::to_string(width);
  const auto known = constants_.find(key);
  if (known != constants_.end()) return known->second;
  const std::string bytes = bytes_in_lanes(bits_of_constant(word), width);
  const Operand made = place(width, bytes.size());
  kernel_.constants.push_back({made.offset, bytes});
  return constants_[key] = made;
}

Operand Operands::special(const std::string& word) {
  const auto known = constants_.find(word);
  if (known != constants_.end()) return known->second;
  const Operand made = place(4, kLanes * 4);
  kernel_.specials.push_back({made.offset, kSpecials.at(word)});
  return constants_[word] = made;
}

Operand Operands::value(const std::string& word, u8 width) {
  if (const Operand* const found = find_register(word)) {
    if (found->width < width) throw std::runtime_error("a register too narrow: " + word);
    return *found;
  }
  if (kSpecials.count(word) != 0) return special(word);
  if (!is_number(word)) throw std::runtime_error("unknown operand " + word);
  return constant(word, width);
}

std::vector<std::string> Operands::elements(const std::string& braces) {
  return split_list(braces.substr(1, braces.rfind('}') - 1));
}

const Symbol* Operands::find_symbol(const std::string& name) const {
  for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
    const auto found = scope->shared.find(name);
    if (found != scope->shared.end()) return &found->second;
  }
  const auto found = module_.symbols.find(name);
  return found == module_.symbols.end() ? nullptr : &found->second;
}

u64 Operands::address_in_shared(const std::string& name, const Symbol& symbol) {
  if (symbol.is_dynamic) {
    has_named_dynamic_ = true;
    return 0;
  }
  const auto known = shared_places_.find(name);
  if (known != shared_places_.end()) return known->second;
  const u64 place = round_up(kernel_.static_shared, symbol.align);
  kernel_.static_shared = static_cast<u32>(place + symbol.size);
  return shared_places_[name] = kSharedBase + place;
}

u64 Operands::address_of(const std::string& name) {
  for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
    const auto found = scope->variables.find(name);
    if (found != scope->variables.end()) return found->second;
  }
  const Symbol* const symbol = find_symbol(name);
  if (symbol == nullptr) throw std::runtime_error("unknown variable " + name);
  if (symbol->is_shared) return address_in_shared(name, *symbol);
  return reinterpret_cast<u64>(symbol->memory);
}

Address Operands::address(const std::string& brackets) {
  if (brackets.size() < 3 || brackets[0] != '[')
    throw std::runtime_error("no address: " + brackets);
  std::string base = brackets.substr(1, brackets.rfind(']') - 1);
  Address made;
  const size_t plus = base.find('+');
  if (plus != std::string::npos) {
    made.offset = std::stoll(base.substr(plus + 1), nullptr, 0);
    base.resize(plus);
  }
  base = trim(base);
  if (is_register(base)) {
    made.base = reg(base);
    made.has_base = true;
  } else if (is_number(base)) {
    made.offset += static_cast<i64>(bits_of_constant(base));
  } else {
    made.offset += static_cast<i64>(address_of(base));
  }
  return made;
}

bool Operands::has_named_dynamic() { return std::exchange(has_named_dynamic_, false); }

}  // namespace ptx
