"""Numbers of the SPIR-V specification 1.6 and of GLSL.std.450 (https://registry.khronos.org/SPIR-V)."""

from __future__ import annotations


class Op:
    """Instructions."""

    Source = 3
    Name = 5
    String = 7
    Extension = 10
    ExtInstImport = 11
    ExtInst = 12
    MemoryModel = 14
    EntryPoint = 15
    ExecutionMode = 16
    Capability = 17
    TypeVoid = 19
    TypeBool = 20
    TypeInt = 21
    TypeFloat = 22
    TypeVector = 23
    TypeArray = 28
    TypeRuntimeArray = 29
    TypeStruct = 30
    TypePointer = 32
    TypeFunction = 33
    ConstantTrue = 41
    ConstantFalse = 42
    Constant = 43
    ConstantComposite = 44
    Function = 54
    FunctionEnd = 56
    Variable = 59
    Load = 61
    Store = 62
    AccessChain = 65
    Decorate = 71
    MemberDecorate = 72
    CompositeConstruct = 80
    CompositeExtract = 81
    ConvertFToU = 109
    ConvertFToS = 110
    ConvertSToF = 111
    ConvertUToF = 112
    UConvert = 113
    SConvert = 114
    FConvert = 115
    Bitcast = 124
    IAdd = 128
    FAdd = 129
    ISub = 130
    FSub = 131
    IMul = 132
    FMul = 133
    UDiv = 134
    SDiv = 135
    FDiv = 136
    UMod = 137
    FRem = 140
    IsNan = 156
    IsInf = 157
    LogicalEqual = 164
    LogicalNotEqual = 165
    LogicalOr = 166
    LogicalAnd = 167
    LogicalNot = 168
    Select = 169
    IEqual = 170
    INotEqual = 171
    UGreaterThan = 172
    SGreaterThan = 173
    UGreaterThanEqual = 174
    SGreaterThanEqual = 175
    ULessThan = 176
    SLessThan = 177
    ULessThanEqual = 178
    SLessThanEqual = 179
    FOrdEqual = 180
    FUnordNotEqual = 183
    FOrdLessThan = 184
    FOrdGreaterThan = 186
    FOrdLessThanEqual = 188
    FOrdGreaterThanEqual = 190
    ShiftRightLogical = 194
    ShiftRightArithmetic = 195
    ShiftLeftLogical = 196
    BitwiseOr = 197
    BitwiseXor = 198
    BitwiseAnd = 199
    Not = 200
    BitCount = 205
    ControlBarrier = 224
    Phi = 245
    LoopMerge = 246
    SelectionMerge = 247
    Label = 248
    Branch = 249
    BranchConditional = 250
    Return = 253
    GroupNonUniformShuffle = 345
    GroupNonUniformShuffleXor = 346
    GroupNonUniformIAdd = 349
    GroupNonUniformFAdd = 350
    GroupNonUniformSMax = 356
    GroupNonUniformUMax = 357
    GroupNonUniformFMax = 358
    TypeCooperativeMatrixKHR = 4456
    CooperativeMatrixLoadKHR = 4457
    CooperativeMatrixStoreKHR = 4458
    CooperativeMatrixMulAddKHR = 4459


class Glsl:
    """Instructions of the set GLSL.std.450."""

    RoundEven = 2
    Trunc = 3
    FAbs = 4
    SAbs = 5
    Floor = 8
    Ceil = 9
    Sin = 13
    Cos = 14
    Tan = 15
    Asin = 16
    Acos = 17
    Atan = 18
    Sinh = 19
    Cosh = 20
    Tanh = 21
    Asinh = 22
    Acosh = 23
    Atanh = 24
    Atan2 = 25
    Pow = 26
    Exp = 27
    Log = 28
    Exp2 = 29
    Log2 = 30
    Sqrt = 31
    InverseSqrt = 32
    UMin = 38
    SMin = 39
    UMax = 41
    SMax = 42
    Fma = 50
    FindUMsb = 75
    NMin = 79
    NMax = 80


class Capability:
    """What a module may ask of a device."""

    Shader = 1
    Float16 = 9
    Float64 = 10
    Int64 = 11
    Int16 = 22
    Int8 = 39
    GroupNonUniform = 61
    GroupNonUniformArithmetic = 63
    GroupNonUniformShuffle = 65
    StorageBuffer16BitAccess = 4433
    StorageBuffer8BitAccess = 4448
    VulkanMemoryModel = 5345
    CooperativeMatrixKHR = 6022


class Storage:
    """Storage classes."""

    Input = 1
    Workgroup = 4
    Function = 7
    PushConstant = 9
    StorageBuffer = 12


class Decoration:
    """Decorations."""

    Block = 2
    ArrayStride = 6
    BuiltIn = 11
    Restrict = 19
    Aliased = 20
    Coherent = 23
    NonWritable = 24
    Binding = 33
    DescriptorSet = 34
    Offset = 35
    NoContraction = 42


class BuiltIn:
    """Built-in variables."""

    WorkgroupId = 26
    LocalInvocationId = 27
    SubgroupId = 40
    SubgroupLocalInvocationId = 41


class Scope:
    """Who takes part in a barrier or in an operation of a subgroup."""

    Workgroup = 2
    Subgroup = 3


class Semantics:
    """Memory semantics of barriers."""

    AcquireRelease = 0x8
    UniformMemory = 0x40
    WorkgroupMemory = 0x100
    MakeAvailable = 0x2000
    MakeVisible = 0x4000


class Access:
    """Operands of loads and stores."""

    NonPrivatePointer = 0x20


class Layout:
    """How a matrix lies in memory."""

    RowMajor = 0
    ColumnMajor = 1


class Use:
    """What a matrix is in a product."""

    MatrixA = 0
    MatrixB = 1
    Accumulator = 2


class Group:
    """Operations of a subgroup."""

    Reduce = 0
    InclusiveScan = 1
    ExclusiveScan = 2


class LoopControl:
    """Hints for loops."""

    Nothing = 0
    Unroll = 1
    DontUnroll = 2
