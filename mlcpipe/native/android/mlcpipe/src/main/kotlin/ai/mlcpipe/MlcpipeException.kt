package ai.mlcpipe

/** The kind of error: the codes of `mlcpipe.h`, and [NETWORK] for downloads. */
enum class ErrorCode(internal val number: Int) {
    /** An argument that cannot be honoured, or a model that is closed or in use. */
    USAGE(1),
    CONFIG(2),
    TOKENIZER(3),
    TEMPLATE(4),

    /** A file that is broken, altered or made for other code. */
    BUNDLE(5),

    /** Not enough memory, or space on the disk. */
    RESOURCE(6),

    /** Code for another machine. */
    TARGET(7),

    /** The model computed NaN or infinity. */
    COMPUTE(8),
    CANCELLED(9),
    INTERNAL(10),

    /** A download that failed. */
    NETWORK(11),
}

/** A failure: [message] is one line with all that is known, [nextStep] what to do about it, or "". */
class MlcpipeException(val code: ErrorCode, message: String, val nextStep: String = "", cause: Throwable? = null) :
    RuntimeException(message, cause)
