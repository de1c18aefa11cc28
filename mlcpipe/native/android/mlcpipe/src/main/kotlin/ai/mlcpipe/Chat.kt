package ai.mlcpipe

import kotlinx.coroutines.flow.Flow
import kotlinx.coroutines.flow.flow

/** A conversation with a model, which outlives neither. */
class Chat internal constructor(private val model: Mlcpipe, messages: List<Message>) {
    private val lock = Any()
    private var said = messages
    private var answering = false

    /** The messages so far, without the running answer. */
    val messages: List<Message> get() = synchronized(lock) { said }

    /**
     * The answer to [text]: cold, each collection says it again. An answer that was cancelled stays in the chat as far
     * as it came; without one, and after an error, [text] was not said.
     */
    fun send(text: String, sampling: Sampling = Sampling(), maxTokens: Int = 0): Flow<Chunk> = flow {
        val asked = begin() + Message("user", text)
        val answer = StringBuilder()
        var kept = true
        try {
            model.answer(asked, sampling, maxTokens).collect {
                if (it is Chunk.Text) answer.append(it.text)
                emit(it)
            }
        } catch (error: MlcpipeException) {
            kept = false
            throw error
        } finally {
            val whole = asked + Message("assistant", answer.toString())
            synchronized(lock) {
                answering = false
                if (kept && answer.isNotEmpty()) said = whole
            }
        }
    }

    /** Saves the chat with what the model has computed of it. */
    suspend fun save(path: String) = model.save(path, messages)

    /** Continues a chat that [save] wrote. */
    suspend fun restore(path: String) {
        val restored = model.restore(path)
        synchronized(lock) { said = restored }
    }

    private fun begin(): List<Message> = synchronized(lock) {
        if (answering) throw MlcpipeException(ErrorCode.USAGE, "an answer of this chat is running")
        answering = true
        said
    }
}
