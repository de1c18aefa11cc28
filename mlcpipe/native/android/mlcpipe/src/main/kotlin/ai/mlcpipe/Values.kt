package ai.mlcpipe

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

/** How to open a model. [contextLength] is in tokens, of prompt and answer; 0 is what memory has room for. */
data class Options(val contextLength: Int = 0, val threads: Int = 0)

/** Bytes that a model takes and that can be had. [fits] is false where [Mlcpipe.open] would throw. */
data class Plan(
    val weightsBytes: Long,
    val kvBytes: Long,
    val workspaceBytes: Long,
    val freeBytes: Long,
    val contextLength: Int,
    val fits: Boolean,
)
