/* quantize_gguf IN.gguf OUT.gguf TYPE THREADS: a file of another type (llama.h's llama_ftype), by llama.cpp. */
#include <llama.h>
#include <stdlib.h>

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  struct llama_model_quantize_params params = llama_model_quantize_default_params();
  params.ftype = (enum llama_ftype)atoi(argv[3]);
  params.nthread = atoi(argv[4]);
  params.allow_requantize = true;
  return (int)llama_model_quantize(argv[1], argv[2], &params);
}
