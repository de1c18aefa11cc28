"""Paged attention on GPUs; the compiler takes the names below.

functions.py        attention over pages that the runtime owns, and which kernel a target gets
attend_few.py       decode rows
attend_many.py      prefill rows
move_pages.py       K and V of a step's rows to pages; copies of pages
step_keys.py        where the keys of a step's rows are

cache.py            the functions of TVM's KV cache
decode.py           one query per sequence: launches with and without subgroups; the merge of parts
prefill.py          many queries: over cached pages, and over their own chunk
cache_tokens.py     append, split, merge, copy, compact, read back

decode_part.py      a part of decode without subgroups
decode_subgroup.py  a part of decode on a subgroup of known size
key_split.py        decode in enough parts to fill a GPU
prefill_tile.py     how prefill's rows are distributed over workgroups
prefill_keys.py     the keys of a tile, in pages or in a chunk
prefill_plain.py    prefill without matrix units
prefill_mma.py      prefill on NVIDIA's matrix units
pages.py            the layout of a page, and arguments
scores.py           scores and masks; arguments of TVM's cache
"""

from tir_schedules.gpu.attention.cache import kv_cache_functions as kv_cache_functions
from tir_schedules.gpu.attention.functions import page_functions as page_functions
from tir_schedules.gpu.attention.move_pages import copy_pages as copy_pages
from tir_schedules.gpu.attention.pages import ACTIVATION_DTYPES as ACTIVATION_DTYPES
from tir_schedules.gpu.attention.pages import AttentionShape as AttentionShape
from tir_schedules.gpu.attention.pages import kv_dtypes as kv_dtypes
