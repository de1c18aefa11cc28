"""From lowered TensorIR to SPIR-V for Vulkan: a code generator for TVM's target kind `vulkan`.

module     a SPIR-V module: ids, unique declarations, ordered sections
types      SPIR-V types and constants for TensorIR's dtypes, and the capabilities that they need
emitter    instructions on values; value numbering; blocks
memory     loads and stores: argument buffers, shared memory, local arrays
casts      conversions between dtypes
arithmetic operators of TensorIR
intrinsics calls: elementary functions, subgroups, dot products, barriers
matrices   cooperative matrices, SPV_KHR_cooperative_matrix
bounds     bounds of integers that TVM can prove, and how many bits an int64 needs
expressions, statements   visitors of TensorIR
kernel     one function: entry point, bindings, push constants, facts for the host
lowering   functions that SPIR-V lacks, written as TensorIR
codegen    the code generator that TVM calls with a module of functions
"""
