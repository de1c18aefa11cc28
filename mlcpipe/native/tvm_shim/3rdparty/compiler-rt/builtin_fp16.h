// binary16 to float under the name that compiler-rt gives the function; runtime/extra/contrib/sort calls it.
#ifndef MLCPIPE_BUILTIN_FP16_H_
#define MLCPIPE_BUILTIN_FP16_H_

#include <cmath>
#include <cstdint>
#include <limits>

template <typename Source, typename SourceBits, int kSourceFraction, typename Target, typename TargetBits,
          int kTargetFraction>
static inline Target __extendXfYf2__(Source bits) {
  static_assert(sizeof(Source) == 2 && kSourceFraction == 10, "binary16 only");
  const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
  Target value;
  if (exponent == 31) {
    value = fraction ? std::numeric_limits<Target>::quiet_NaN() : std::numeric_limits<Target>::infinity();
  } else {
    value = static_cast<Target>(std::ldexp(exponent ? fraction + 1024 : fraction, (exponent ? exponent : 1) - 25));
  }
  return (bits >> 15) ? -value : value;
}

#endif  // MLCPIPE_BUILTIN_FP16_H_
