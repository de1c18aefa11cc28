package ai.mlcpipe

/** Gets an answer on the thread that asked for it. */
internal interface Sink {
    /** Of each token; false ends the answer. */
    fun onToken(token: Int): Boolean

    /** UTF-8 of whole characters. */
    fun onText(text: ByteArray)
}

/**
 * The functions of `jni.cc`, which throw [MlcpipeException]. Texts and paths are UTF-8. A handle is never used again, so
 * that a call after [close] is an error and nothing worse.
 */
internal object Native {
    init {
        System.loadLibrary("mlcpipe")
    }

    /** The address of the table of symbols in a shared library. */
    @JvmStatic
    external fun loadCode(library: ByteArray): Long

    /** The fields of `mlcpipe_plan_info` in their order. */
    @JvmStatic
    external fun plan(path: ByteArray, numbers: LongArray, texts: Array<ByteArray>): LongArray

    /** [numbers] has code, length of the context, threads and the GPU's code; [texts] device, cache and path for the GPU. */
    @JvmStatic
    external fun open(path: ByteArray, numbers: LongArray, texts: Array<ByteArray>): Long

    @JvmStatic
    external fun openDescriptor(
        descriptor: Int,
        offset: Long,
        bytes: Long,
        numbers: LongArray,
        texts: Array<ByteArray>,
    ): Long

    /** The size of the vocabulary and the length of the context, in tokens; the threads that compute now. */
    @JvmStatic
    external fun info(engine: Long): LongArray

    @JvmStatic
    external fun device(engine: Long): ByteArray

    /** The GPU and its driver, or no bytes. */
    @JvmStatic
    external fun deviceTitle(engine: Long): ByteArray

    /**
     * [sampling] has temperature, top_p, min_p, top_k and the repetition, presence and frequency penalties; NaN is the
     * default. Gives finish, prompt, cached and completion tokens, and seconds of load, prefill and decode.
     */
    @JvmStatic
    external fun generate(
        engine: Long,
        messages: ByteArray,
        variables: ByteArray?,
        maxTokens: Long,
        sampling: DoubleArray,
        seed: Long,
        sink: Sink,
    ): DoubleArray

    @JvmStatic
    external fun tokenizeChat(engine: Long, messages: ByteArray): IntArray

    @JvmStatic
    external fun save(engine: Long, path: ByteArray, chat: ByteArray)

    /** The JSON that was saved with the chat, or no bytes. */
    @JvmStatic
    external fun restore(engine: Long, path: ByteArray): ByteArray

    @JvmStatic
    external fun cancel(engine: Long)

    @JvmStatic
    external fun close(engine: Long)

    @JvmStatic
    external fun reset(engine: Long)

    @JvmStatic
    external fun trim(engine: Long)

    @JvmStatic
    external fun setThreads(threads: Int)

    /** Called by `jni.cc`. */
    @JvmStatic
    fun failure(number: Int, line: ByteArray, nextStep: ByteArray): MlcpipeException {
        val code = ErrorCode.entries.firstOrNull { it.number == number } ?: ErrorCode.INTERNAL
        return MlcpipeException(code, line.decodeToString(), nextStep.decodeToString())
    }
}
