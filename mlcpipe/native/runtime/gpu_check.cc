#include "gpu_check.h"

#include <tvm/ffi/function.h>
#include <tvm/runtime/device_api.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <sstream>
#include <vector>

#include "cache_file.h"
#include "error.h"
#include "tensors.h"

namespace mlcpipe {
namespace driver_check {
namespace {

using tvm::ffi::Function;
using tvm::runtime::Tensor;

constexpr int kVersion = 1;  // of the cases: another one runs them again
constexpr int kCount = 4096, kRows = 64, kWidth = 256, kGroup = 32, kBlock = 32;
constexpr int kM = 80, kN = 160, kK = 64;  // of the product of matrices: no whole number of tiles
constexpr DLDataType kFloat16{kDLFloat, 16, 1}, kUint32{kDLUInt, 32, 1};

// Inputs by position, the expected output, and how far each number may be from it, as a share of the largest.
struct Case {
  const char* name;
  std::vector<Tensor> inputs;
  DLDataType dtype;
  std::vector<int64_t> shape;
  std::vector<double> expected;
  double tolerance;
};

// Numbers that are the same everywhere (splitmix64).
class Draws {
 public:
  uint32_t Word() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return static_cast<uint32_t>((z ^ (z >> 31)) >> 32);
  }
  // A multiple of 2^-8 in (-4, 4), which float16 has too; most are small, as of a normal distribution.
  float Number() {
    const uint32_t word = Word();
    const uint32_t sum = (word & 511) + (word >> 9 & 511) + (word >> 18 & 511) + (word >> 27 & 31) * 16;
    return static_cast<float>(static_cast<int>(sum) - 1014) / 256;
  }

 private:
  uint64_t state_ = 2026;
};

template <typename T>
std::vector<T> Drawn(int count, const std::function<T()>& draw) {
  std::vector<T> numbers(static_cast<size_t>(count));
  for (T& number : numbers) number = draw();
  return numbers;
}

// A tensor with the numbers in their order.
template <typename T>
Tensor Shaped(const std::vector<T>& values, DLDataType dtype, std::initializer_list<int64_t> shape) {
  Tensor made = Empty(shape, dtype);
  std::memcpy(made->data, values.data(), values.size() * sizeof(T));
  return made;
}

// binary16 of a number that it has exactly and that is 0 or normal.
uint16_t Half(float value) {
  if (value == 0) return 0;
  int exponent;
  const float fraction = std::frexp(std::fabs(value), &exponent);
  const int bits = (exponent + 14) << 10 | static_cast<int>((2 * fraction - 1) * 1024);
  return static_cast<uint16_t>(bits | (value < 0 ? 0x8000 : 0));
}

double FromHalf(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double value = exponent == 31 ? (fraction ? NAN : HUGE_VAL)
                                      : std::ldexp(exponent ? fraction + 1024 : fraction, std::max(exponent, 1) - 25);
  return bits >> 15 ? -value : value;
}

std::vector<uint16_t> Halves(const std::vector<float>& values) {
  std::vector<uint16_t> halves;
  for (const float value : values) halves.push_back(Half(value));
  return halves;
}

int CodeAt(const std::vector<uint32_t>& words, size_t i) { return static_cast<int>(words[i / 8] >> (i % 8 * 4) & 15); }

void AddElementwise(Draws* draws, std::vector<Case>* cases) {
  const auto number = [draws] { return draws->Number(); };
  const auto a = Drawn<float>(kCount, number), b = Drawn<float>(kCount, number);
  const auto words = Drawn<uint32_t>(kCount / 8, [draws] { return draws->Word(); });
  Case arithmetic{"arithmetic", {Filled(a, kFloat32), Filled(b, kFloat32)}, kFloat32, {kCount}, {}, 1e-5};
  Case integers{"integers", {Filled(words, kUint32)}, kInt32, {kCount}, {}, 0};
  Case halves{"halves", {Filled(Halves(a), kFloat16), Filled(Halves(b), kFloat16)}, kFloat16, {kCount}, {}, 2e-3};
  for (size_t i = 0; i < kCount; ++i) {
    const double x = a[i], y = b[i];
    arithmetic.expected.push_back(x * y + std::exp(-std::fabs(x)) / (std::sqrt(std::fabs(y)) + 1));
    integers.expected.push_back(CodeAt(words, i) - 7);
    halves.expected.push_back(x * y + x);
  }
  cases->insert(cases->end(), {arithmetic, integers, halves});
}

void AddRows(Draws* draws, std::vector<Case>* cases) {
  const auto x = Drawn<float>(kRows * kWidth, [draws] { return draws->Number(); });
  const auto codes = Drawn<uint32_t>(kRows * kWidth / 8, [draws] { return draws->Word(); });
  const auto scales = Drawn<float>(kRows * kWidth / kGroup, [draws] { return 1 + draws->Number() / 8; });
  const Tensor rows = Shaped(x, kFloat32, {kRows, kWidth});
  const std::vector<float> first(x.begin(), x.begin() + kWidth);
  Case sums{"sums", {rows}, kFloat32, {kRows}, {}, 1e-5}, maxima{"maxima", {rows}, kFloat32, {kRows}, {}, 0};
  Case products{"products",
                {Shaped(codes, kUint32, {kRows, kWidth / 8}), Shaped(scales, kFloat32, {kRows, kWidth / kGroup}),
                 Filled(first, kFloat32)},
                kFloat32, {kRows}, {}, 1e-5};
  for (size_t row = 0; row < kRows; ++row) {
    double sum = 0, product = 0;
    for (size_t k = 0, i = row * kWidth; k < kWidth; ++k, ++i) {
      sum += x[i];
      product += (CodeAt(codes, i) - 7) * static_cast<double>(scales[i / kGroup]) * first[k];
    }
    sums.expected.push_back(sum);
    maxima.expected.push_back(*std::max_element(&x[row * kWidth], &x[row * kWidth] + kWidth));
    products.expected.push_back(product);
  }
  cases->insert(cases->end(), {sums, maxima, products});
}

// x w^T; the weight in blocks of 32 rows, in words of two columns (layout `rows32_pairs`).
void AddMatrices(Draws* draws, std::vector<Case>* cases) {
  const auto number = [draws] { return draws->Number(); };
  const auto x = Drawn<float>(kM * kK, number), w = Drawn<float>(kN * kK, number);
  const auto halves = Halves(w);
  std::vector<uint32_t> words;
  for (size_t block = 0; block < kN / kBlock; ++block) {
    for (size_t pair = 0; pair < kK / 2; ++pair) {
      for (size_t row = 0; row < kBlock; ++row) {
        const uint16_t* two = &halves[(block * kBlock + row) * kK + 2 * pair];
        words.push_back(two[0] | static_cast<uint32_t>(two[1]) << 16);
      }
    }
  }
  Case matrices{"matrices",
                {Shaped(Halves(x), kFloat16, {kM, kK}), Shaped(words, kUint32, {kN / kBlock, kK / 2, kBlock})},
                kFloat16, {kM, kN}, {}, 2e-3};
  for (size_t m = 0; m < kM; ++m) {
    for (size_t n = 0; n < kN; ++n) {
      double sum = 0;
      for (size_t k = 0; k < kK; ++k) sum += static_cast<double>(x[m * kK + k]) * w[n * kK + k];
      matrices.expected.push_back(sum);
    }
  }
  cases->push_back(matrices);
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  Draws draws;
  AddElementwise(&draws, &cases);
  AddRows(&draws, &cases);
  AddMatrices(&draws, &cases);
  return cases;
}

// Nothing where the library was compiled without: not every target has float16 or matrices.
tvm::ffi::Optional<Function> KernelOf(const tvm::ffi::Module& library, const Case& one) {
  return library->GetFunction(tvm::ffi::String(std::string("driver_check_") + one.name), true);
}

std::vector<double> Run(const Function& kernel, const Case& one, const Device& device) {
  std::vector<Tensor> tensors;
  for (const Tensor& input : one.inputs) tensors.push_back(device.Put(input));
  tensors.push_back(device.Empty(tvm::ffi::Shape(one.shape), one.dtype));
  std::vector<tvm::ffi::AnyView> arguments(tensors.begin(), tensors.end());
  tvm::ffi::Any result;
  kernel.CallPacked(arguments.data(), static_cast<int32_t>(arguments.size()), &result);
  Tensor host = Tensor::Empty(tvm::ffi::Shape(one.shape), one.dtype, DLDevice{kDLCPU, 0});
  host.CopyFrom(tensors.back());
  std::vector<double> numbers;
  for (size_t i = 0; i < one.expected.size(); ++i) {
    numbers.push_back(one.dtype.bits == 16         ? FromHalf(Data<uint16_t>(host)[i])
                      : one.dtype.code == kDLFloat ? static_cast<double>(Data<float>(host)[i])
                                                   : Data<int32_t>(host)[i]);
  }
  return numbers;
}

void Compare(const Case& one, const std::vector<double>& found, const Device& device) {
  double largest = 0;
  for (const double value : one.expected) largest = std::max(largest, std::fabs(value));
  size_t wrong = 0, first = 0;
  for (size_t i = found.size(); i-- > 0;) {
    if (std::fabs(found[i] - one.expected[i]) <= one.tolerance * largest) continue;  // a NaN is wrong
    ++wrong;
    first = i;
  }
  if (!wrong) return;
  std::ostringstream expected, words;
  expected << one.expected[first] << " at " << first;
  words << found[first] << ", " << wrong << " of " << found.size() << " are wrong";
  throw Error(Code::kTarget, "the driver of " + device.title + " computes wrong numbers")
      .Where(std::string("the driver check ") + one.name)
      .Expected(expected.str())
      .Found(words.str())
      .Next("update the driver or use another device");
}

}  // namespace
}  // namespace driver_check

void CheckDriver(const Device& device, const tvm::ffi::Module& library, const std::string& cache) {
  const std::vector<driver_check::Case> cases = driver_check::Cases();
  std::string key = device.driver + " " + std::to_string(driver_check::kVersion);
  for (const driver_check::Case& one : cases) {
    if (KernelOf(library, one)) key += std::string(" ") + one.name;
  }
  const CacheFile passed(cache, "checked", key);
  if (passed.Read()) return;
  for (const driver_check::Case& one : cases) {
    if (const auto kernel = KernelOf(library, one)) Compare(one, Run(*kernel, one, device), device);
  }
  passed.Write("");
}

}  // namespace mlcpipe
