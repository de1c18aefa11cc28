"""The integers of one step of a batch, all in one tensor i32[k]: Vulkan and WebGPU take no offsets into buffers.

A header of 32 says how many sequences and rows there are, and where in the tensor each array begins. The runtime fills
it, kernels read it (`step.py`). This module does not import TVM.

States that outlive a step are kept in pages or in slots. Those in pages whose queries see the same window form a group
and share page ids. All states in slots share slot ids.
"""

PAGE = 16  # tokens of a page
ITEM_BITS = {"float32": 32, "float16": 16, "q8": 8, "q4": 4}  # of a number of K or V in a page, without scales
QUANTIZED = ("q8", "q4")
RANK = 16  # ranks of a block of adapters
HEADER = 32  # integers of the header; those without a name below are 0
MAX_GROUPS = 16  # of pages
# Numbers in the header.
SEQUENCES, ROWS = 0, 1
# Where arrays begin. `position[n]`: the position of each row in its sequence. `place[n]`: page * 16 + place of each row
# in group 0, -1: its K and V go nowhere. `row_begin[S + 1]`: the rows of each sequence, which have consecutive
# positions. `keys[S]`: keys of each sequence with this step's. `table_begin[S + 1]`: where page ids of each sequence
# begin in the table of any group. `rope_length[n]`: length of the row's whole sequence. `sequence[n]`: the sequence of
# each row.
POSITION, PLACE, ROW_BEGIN, KEYS, TABLE_BEGIN, ROPE_LENGTH, SEQUENCE = range(2, 9)
# Only for forwards with adapters: the blocks of each row's adapter are adapter_begin[n] ... adapter_end[n] - 1; a row
# without one has 0 and 0.
ADAPTER_BEGIN, ADAPTER_END = range(9, 11)
# Only for models with states in slots. `slot_read[S]`: the slot with the states of each sequence before its first row,
# -1: they are zeros. `slot_write[S]`: the slot that gets those after its last row, -1: none does. Only where tokens are
# drafted: `slot_of_row[n]`: the slot that gets the states after each row before its sequence's last, -1: none does; no
# sequence reads it.
SLOT_READ, SLOT_WRITE, SLOT_OF_ROW = range(11, 14)
# Only where a sequence has pictures whose rows have three positions (m-rope). `rope_position[3, n]`: time, row and
# column that RoPE has of each row, which are equal for text. Without it they are `position`.
ROPE_POSITION = 14
# Only for towers with layers that attend within windows: where the step of these layers begins in the tensor. Its
# windows are sequences, and its numbers count from there.
SECOND = 15
# Only for models whose rows see keys after their own. `sees[n]`: how many keys of its sequence each row sees; never
# fewer than the row before it in the sequence, and none beyond the 64 keys, counted in whole 64s, that its own is in.
# It has the number of SECOND, which no text model's step has.
SEES = 15
# Only for prompts whose rows of one picture see each other, which have neither of these two. `last_key[n]`: the
# position of the last key of each row's sequence that the row sees; it does not fall from row to row.
LAST_KEY = 15
# TABLES + g: where the table of group g begins. Entry i of a sequence is the page of its tokens 16 i to 16 i + 15; -1
# where no row of the step sees them.
TABLES = 16
