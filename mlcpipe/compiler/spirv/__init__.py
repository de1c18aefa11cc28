"""From lowered TensorIR to SPIR-V for Vulkan: a code generator for TVM's target kind `vulkan`.

words      a module of SPIR-V: ids, declarations once, sections in their order
types      dtypes of TensorIR as SPIR-V types and constants, and the capabilities that they take
emitter    instructions on values; value numbering; blocks
memory     buffers of arguments, shared memory, local arrays: loads and stores
casts      conversions between dtypes
arithmetic operators of TensorIR
intrinsics calls: elementary functions, subgroups, dot products, barriers
matrices   those that a subgroup has together, SPV_KHR_cooperative_matrix
bounds     what TVM knows of integers, and how many bits an int64 takes
expressions, statements   visitors of TensorIR
kernel     one function: entry point, bindings, push constants, what a host must know
lowering   functions that SPIR-V lacks, written as TensorIR
build      modules of functions, and the code generator that TVM calls
"""
