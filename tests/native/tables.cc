// What tests of tables.h call.
#include "tables.h"

#include <cstring>

// The strings of sections 1 and 2 with a "|" after each, then the sum of section 0; or the error's line.
extern "C" int read_tables(const void* data, size_t bytes, char* out, size_t room) {
  std::string text;
  int failed = 0;
  try {
    mlcpipe::Tables tables(data, bytes, "mlc_test", 3, 3, mlcpipe::Code::kBundle);
    mlcpipe::View<uint32_t> ends = tables.ends(1, 2);
    for (size_t i = 0; i < ends.size; ++i) {
      text += std::string(mlcpipe::StringAt(ends, tables.array<char>(2), i)) + "|";
    }
    int64_t sum = 0;
    for (int16_t number : tables.array<int16_t>(0)) sum += number;
    text += std::to_string(sum);
  } catch (const mlcpipe::Error& error) {
    failed = static_cast<int>(error.code);
    text = error.what();
  }
  std::strncpy(out, text.c_str(), room - 1);
  out[room - 1] = 0;
  return failed;
}
