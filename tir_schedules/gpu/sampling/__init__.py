"""From logits to the next token on GPUs; `tir_schedules/sampling.py` lists the functions.

sample.py        `sample`, the function that our hosts call: filters and draws without sorting the vocabulary
draw.py          its last kernel: the draw from a list of candidates
mlc_contract.py  the functions that MLC's hosts call: softmax, top-p, bias, penalties, bit mask
sort.py          MLC's `argsort_probs`: a stable radix sort
"""

from tir_schedules.gpu.sampling.mlc_contract import forbid_inplace as forbid_inplace
from tir_schedules.gpu.sampling.mlc_contract import sampling_functions as sampling_functions
