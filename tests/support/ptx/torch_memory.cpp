// An allocator before torch's own, which notes what that allocates and frees.

#include "torch_memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include "allocations.h"

namespace ptx {
namespace {

c10::DeleterFnPtr own_deleter = nullptr;  // of torch's allocator

void forget_and_free(void* memory) {
  remove_allocation(memory);
  own_deleter(memory);
}

class Watching final : public c10::Allocator {
 public:
  explicit Watching(c10::Allocator* own) : own_(own) {}

  c10::DataPtr allocate(size_t size) override {
    c10::DataPtr memory = own_->allocate(size);
    if (memory.get() == nullptr) return memory;
    if (!memory.compare_exchange_deleter(own_deleter, &forget_and_free)) {
      TORCH_CHECK(false, "torch's allocator frees memory in a way of its own");
    }
    add_allocation(memory.get(), size);
    return memory;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &forget_and_free; }
  void copy_data(void* to, const void* from, std::size_t size) const override {
    own_->copy_data(to, from, size);
  }

 private:
  c10::Allocator* own_;
};

}  // namespace

void watch_torch() {
  constexpr uint8_t kPriority = 100;
  c10::Allocator* const own = c10::GetCPUAllocator();
  own_deleter = own->raw_deleter();
  c10::SetCPUAllocator(new Watching(own), kPriority);
}

}  // namespace ptx
