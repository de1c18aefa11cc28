"""The integers of one step of a batch, all in one tensor i32[k]: Vulkan and WebGPU take no offsets into buffers.

A header of 16 says how many sequences and rows there are, and where in the tensor each array begins. The runtime fills
it, kernels read it (`step.py`). No TVM is needed to read this module.
"""

PAGE = 16  # tokens of a page
ITEM_BITS = {"float32": 32, "float16": 16, "q8": 8, "q4": 4}  # of a number of K or V in a page, without scales
QUANTIZED = ("q8", "q4")
RANK = 16  # ranks of a block of adapters
HEADER = 16  # integers of the header; those without a name below are 0
# Numbers in the header.
SEQUENCES, ROWS = 0, 1
# Where arrays begin. `position[n]`: the position of each row in its sequence. `slot[n]`: page * 16 + place that the
# row's K and V go to, -1: nowhere. `row_begin[S + 1]`: the rows of each sequence, which have consecutive positions.
# `keys[S]`: keys of each sequence with this step's. `table_begin[S + 1]`: where the page ids of each sequence begin in
# `table`, whose entry i of a sequence has tokens 16 i ... 16 i + 15. `rope_length[n]`: length of the row's whole
# sequence. `window_table`: page ids for layers with a sliding window; what no row of the step sees may be -1.
# `sequence[n]`: the sequence of each row.
POSITION, SLOT, ROW_BEGIN, KEYS, TABLE_BEGIN, TABLE, ROPE_LENGTH, WINDOW_TABLE, SEQUENCE = range(2, 11)
# Only for forwards with adapters: the blocks of each row's adapter are adapter_begin[n] ... adapter_end[n] - 1; a row
# without one has 0 and 0.
ADAPTER_BEGIN, ADAPTER_END = range(11, 13)
