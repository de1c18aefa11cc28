"""Paged attention on CPUs; the compiler takes the names below.

functions.py       attention over pages that the runtime owns, and its tiles
store_pages.py     K and V of a step's rows to their pages
attend_few.py      decode rows
attend_many.py     prefill rows
move_pages.py      copy pages
flash.py           softmax over blocks of keys, for the rows of one task
keys.py            where the keys and values of a block are
key_split.py       decode rows, with the keys split into parts
query_tile.py      some queries of a prompt
pages.py           the layout of pages, and views of them
"""

from tir_schedules.cpu.attention.functions import attention as attention
from tir_schedules.cpu.attention.functions import attention_tiles as attention_tiles
from tir_schedules.cpu.attention.functions import keep_functions as keep_functions
from tir_schedules.cpu.attention.functions import page_functions as page_functions
from tir_schedules.cpu.attention.move_pages import copy_pages as copy_pages
from tir_schedules.cpu.attention.pages import ACTIVATION_DTYPES as ACTIVATION_DTYPES
from tir_schedules.cpu.attention.pages import AttentionShape as AttentionShape
from tir_schedules.cpu.attention.pages import kv_dtypes as kv_dtypes
from tir_schedules.paged import PAGE as PAGE
