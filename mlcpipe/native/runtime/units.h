// Pages of a group or slots, by number: how many sequences use each. No data is moved here.
#ifndef MLCPIPE_RUNTIME_UNITS_H_
#define MLCPIPE_RUNTIME_UNITS_H_

#include <cstddef>
#include <cstdint>
#include <list>
#include <vector>

namespace mlcpipe {

// Each is free, idle (a prefix tree holds it, no sequence uses it), or used.
class UnitPool {
 public:
  explicit UnitPool(int64_t count);

  int32_t New();
  void Use(int32_t unit);
  // One use less; true where it was the last.
  bool Drop(int32_t unit);
  // A tree holds the unit, or no longer.
  void Hold(int32_t unit) { held_[Index(unit)] = true; }
  void LetGo(int32_t unit);

  int64_t count() const { return static_cast<int64_t>(uses_.size()); }
  int64_t uses(int32_t unit) const { return uses_[Index(unit)]; }
  bool held(int32_t unit) const { return held_[Index(unit)]; }
  int64_t free() const { return static_cast<int64_t>(free_.size()); }
  const std::vector<int32_t>& free_units() const { return free_; }
  int64_t available() const { return free() + static_cast<int64_t>(idle_.size()); }
  int32_t oldest_idle() const { return idle_.front(); }

 private:
  std::vector<int32_t> uses_, free_;
  std::vector<bool> held_;
  std::list<int32_t> idle_;                          // the least recently used first
  std::vector<std::list<int32_t>::iterator> place_;  // in `idle_`

  static size_t Index(int32_t unit) { return static_cast<size_t>(unit); }
};

}  // namespace mlcpipe

#endif  // MLCPIPE_RUNTIME_UNITS_H_
