package ai.mlcpipe

import java.io.File

/** A message of a chat; [role] is a word that the model's template knows: system, user, assistant. */
data class Message(val role: String, val content: String)

/** A piece of an answer. */
sealed interface Chunk {
    /** The next characters. */
    data class Text(val text: String) : Chunk

    /** Comes last. */
    data class End(val finish: Finish, val statistics: Statistics) : Chunk
}

/** Why an answer ended: the model ended it, or there was no more room. */
enum class Finish { STOP, LENGTH }

/** Of an answer: tokens and seconds. [cachedTokens] of the prompt were computed before. */
data class Statistics(
    val promptTokens: Int,
    val cachedTokens: Int,
    val completionTokens: Int,
    val loadS: Double,
    val prefillS: Double,
    val decodeS: Double,
)

/** How tokens are drawn; null is the default of `mlcpipe.h`. A temperature of 0 takes the most probable token. */
data class Sampling(
    val temperature: Double? = null,
    val topP: Double? = null,
    val minP: Double? = null,
    val topK: Int? = null,
    val repetitionPenalty: Double? = null,
    val presencePenalty: Double? = null,
    val frequencyPenalty: Double? = null,
    val seed: Long = 0,
) {
    internal fun numbers(): DoubleArray =
        listOf(temperature, topP, minP, topK?.toDouble(), repetitionPenalty, presencePenalty, frequencyPenalty)
            .map { it ?: Double.NaN }
            .toDoubleArray()
}

/** A kind of device. */
@JvmInline
value class Device(val name: String) {
    companion object {
        /** The device that the model was compiled for; with [Options.gpu] whichever of both is faster, measured once. */
        val AUTO = Device("auto")
        val CPU = Device("cpu")
        val VULKAN = Device("vulkan")
    }
}

/** A model that was compiled for a GPU: its file or folder, and its code as [Mlcpipe.open] takes them. */
data class GpuModel(val path: String, val code: ModelCode? = null)

/**
 * How to open a model. [contextLength] is in tokens, of prompt and answer; 0 is what memory has room for. A [device] that
 * the code is not for, or that the library was built without, gives [ErrorCode.TARGET]. [cache] is a folder of the app's
 * for what is learned of GPU drivers, such as compiled kernels; without, each process learns it again. [gpu] is the same
 * model for a GPU, which [Device.AUTO] takes where its driver passes the checks and answers 1.2 times as fast as the CPU.
 */
data class Options(
    val contextLength: Int = 0,
    val threads: Int = 0,
    val device: Device = Device.AUTO,
    val cache: File? = null,
    val gpu: GpuModel? = null,
) {
    internal fun numbers(code: ModelCode?): LongArray =
        longArrayOf(code?.address ?: 0, contextLength.toLong(), threads.toLong(), gpu?.code?.address ?: 0)

    internal fun texts(): Array<ByteArray> =
        listOf(device.name, cache?.path.orEmpty(), gpu?.path.orEmpty()).map { it.encodeToByteArray() }.toTypedArray()
}

/** Bytes that a model takes and that can be had. [fits] is false where [Mlcpipe.open] would throw. */
data class Plan(
    val weightsBytes: Long,
    val kvBytes: Long,
    val workspaceBytes: Long,
    val freeBytes: Long,
    val contextLength: Int,
    val fits: Boolean,
)
