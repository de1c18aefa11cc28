/* Errors of kernels; linked into each compiled library, shared or static.
 *
 * A kernel whose arguments are wrong calls TVMFFIErrorSetRaisedFromCStrParts. TVM's loader fills in the variable, so that
 * a library finds the TVM that loaded it, however that was loaded itself. */
#include <stddef.h>
#include <stdint.h>

__attribute__((visibility("default"), weak)) void (*__TVMFFIErrorSetRaisedFromCStr)(const char* kind, const char* words);

__attribute__((visibility("hidden"), weak)) void TVMFFIErrorSetRaisedFromCStrParts(const char* kind, const char** parts,
                                                                                 int32_t count) {
  char words[1000];
  size_t size = 0;
  for (int32_t i = 0; i < count; i++) {
    for (const char* c = parts[i]; c != NULL && *c && size < sizeof words - 1; c++) words[size++] = *c;
  }
  words[size] = 0;
  if (__TVMFFIErrorSetRaisedFromCStr != NULL) __TVMFFIErrorSetRaisedFromCStr(kind, words);
}
