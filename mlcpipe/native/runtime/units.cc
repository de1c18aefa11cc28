#include "units.h"

namespace mlcpipe {

UnitPool::UnitPool(int64_t count) : uses_(static_cast<size_t>(count)), held_(uses_.size()), place_(uses_.size()) {
  for (int64_t unit = count; unit > 0; --unit) free_.push_back(static_cast<int32_t>(unit - 1));
}

int32_t UnitPool::New() {
  const int32_t unit = free_.back();
  free_.pop_back();
  uses_[Index(unit)] = 1;
  return unit;
}

void UnitPool::Use(int32_t unit) {
  if (uses_[Index(unit)]++ == 0) idle_.erase(place_[Index(unit)]);
}

bool UnitPool::Drop(int32_t unit) {
  if (--uses_[Index(unit)]) return false;
  if (held_[Index(unit)]) {
    place_[Index(unit)] = idle_.insert(idle_.end(), unit);
  } else {
    free_.push_back(unit);
  }
  return true;
}

void UnitPool::LetGo(int32_t unit) {
  held_[Index(unit)] = false;
  if (uses_[Index(unit)]) return;
  idle_.erase(place_[Index(unit)]);
  free_.push_back(unit);
}

}  // namespace mlcpipe
