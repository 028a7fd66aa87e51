#include "allocations.h"

#include <iterator>
#include <map>
#include <mutex>

namespace ptx {
namespace {

struct Allocations {
  std::mutex mutex;
  std::map<u64, u64> ends;  // by where they begin
};
Allocations& allocations() {
  static auto& one = *new Allocations;  // tensors may be freed after static objects
  return one;
}

}  // namespace

void add_allocation(const void* address, u64 size) {
  Allocations& all = allocations();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const u64 begin = reinterpret_cast<u64>(address), end = begin + size;
  // Older allocations at this address were freed without notice.
  auto next = all.ends.lower_bound(begin);
  if (next != all.ends.begin() && std::prev(next)->second > begin) --next;
  while (next != all.ends.end() && next->first < end) next = all.ends.erase(next);
  all.ends[begin] = end;
}

void remove_allocation(const void* address) {
  Allocations& all = allocations();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.ends.erase(reinterpret_cast<u64>(address));
}

Range allocation_around(u64 address) {
  Allocations& all = allocations();
  const std::lock_guard<std::mutex> lock(all.mutex);
  auto next = all.ends.upper_bound(address | 15);
  if (next == all.ends.begin()) return {};
  const auto [begin, end] = *--next;
  return address < round_up(end, 16) ? Range{begin, end} : Range{};
}

}  // namespace ptx
