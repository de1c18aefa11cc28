package ai.mlcpipe

import java.util.concurrent.atomic.AtomicBoolean
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.ExperimentalCoroutinesApi
import kotlinx.coroutines.NonCancellable
import kotlinx.coroutines.awaitCancellation
import kotlinx.coroutines.channels.Channel
import kotlinx.coroutines.currentCoroutineContext
import kotlinx.coroutines.ensureActive
import kotlinx.coroutines.flow.Flow
import kotlinx.coroutines.flow.buffer
import kotlinx.coroutines.flow.channelFlow
import kotlinx.coroutines.launch
import kotlinx.coroutines.withContext

/** The code of a model, a shared library that stays loaded. */
class ModelCode internal constructor(internal val address: Long) {
    companion object {
        /** Loads a library of the app by its name, such as `libmodel_chat.so`, or by its path. */
        fun load(library: String): ModelCode = ModelCode(Native.loadCode(library.encodeToByteArray()))
    }
}

/**
 * An open model. All functions may be called from any thread; those that compute wait for one another. After [close]
 * they throw [MlcpipeException] with [ErrorCode.USAGE].
 */
class Mlcpipe private constructor(private val handle: Long) : AutoCloseable {
    @OptIn(ExperimentalCoroutinesApi::class) // until coroutines 1.9
    private val dispatcher = Dispatchers.IO.limitedParallelism(1)
    private val gate = Gate()
    private val lock = Any()
    private var running: AtomicBoolean? = null // whether the answer that is computed was stopped
    private var closed = false

    /** The device that computes: [Device.CPU] or a kind of GPU. */
    val device: Device = Device(Native.device(handle).decodeToString())

    /** The GPU and its driver, "" for the CPU. */
    val deviceTitle: String = Native.deviceTitle(handle).decodeToString()

    /** Tokens of prompt and answer together. */
    val contextLength: Int = Native.info(handle)[1].toInt()

    /** Threads that compute now, of all models. */
    val threads: Int get() = Native.info(handle)[2].toInt()

    /** A conversation. Several may be alive at once; what they share of their beginnings is computed once. */
    fun chat(system: String? = null): Chat = Chat(this, listOfNotNull(system?.let { Message("system", it) }))

    /**
     * The answer to messages: cold, computed when it is collected. Cancelling the collecting coroutine ends it within a
     * token. [maxTokens] 0 is what the context has room for; [variables] is a JSON object for the template, or null.
     */
    fun answer(
        messages: List<Message>,
        sampling: Sampling = Sampling(),
        maxTokens: Int = 0,
        variables: String? = null,
    ): Flow<Chunk> =
        channelFlow {
            val stopped = AtomicBoolean()
            // Unconfined: the thread that cancels ends the answer, whatever the collector's thread does.
            val watcher = launch(Dispatchers.Unconfined) {
                try {
                    awaitCancellation()
                } finally {
                    stop(stopped)
                }
            }
            val sink = ChannelSink(stopped, gate) { trySend(it) }
            val values = compute(stopped) {
                val given = variables?.encodeToByteArray()
                Native.generate(
                    handle, toJson(messages), given, maxTokens.toLong(), sampling.numbers(), sampling.seed, sink,
                )
            }
            watcher.cancel()
            trySend(end(values))
        }.buffer(Channel.UNLIMITED) // so that no slow collector blocks the model

    /** Token ids of a chat as [answer] takes it. */
    suspend fun tokenize(messages: List<Message>): IntArray =
        withContext(dispatcher) { Native.tokenizeChat(handle, toJson(messages)) }

    /** Saves the last prompt and answer to a file: [restore] continues without computing it again. */
    suspend fun save(path: String, messages: List<Message> = emptyList()) {
        val chat = Json.write(mapOf("messages" to messages.map { it.toMap() })).encodeToByteArray()
        withContext(dispatcher) { Native.save(handle, path.encodeToByteArray(), chat) }
    }

    /** The messages of a saved chat. A file that is damaged or of another model gives [ErrorCode.USAGE]. */
    suspend fun restore(path: String): List<Message> {
        val chat = withContext(dispatcher) { Native.restore(handle, path.encodeToByteArray()) }
        return if (chat.isEmpty()) emptyList() else messagesOf(chat.decodeToString())
    }

    /** Forgets all chats. */
    suspend fun reset() = withContext(dispatcher) { Native.reset(handle) }

    /** Gives memory back that no conversation uses. */
    suspend fun trim() = withContext(dispatcher) { Native.trim(handle) }

    /** Holds answers between two tokens, or lets them continue. A model that is held computes for no other chat. */
    fun setPaused(paused: Boolean) = gate.set(paused)

    /** Ends an answer that is computed, with [ErrorCode.CANCELLED], and gives back the memory. It may be called twice. */
    override fun close() {
        synchronized(lock) {
            if (closed) return
            closed = true
            running?.let { gate.stop(it) }
            Native.close(handle)
        }
    }

    private suspend fun <T> compute(stopped: AtomicBoolean, work: () -> T): T {
        val caller = currentCoroutineContext() // is cancelled before what runs in it, such as the watcher of an answer
        return withContext(dispatcher) {
            synchronized(lock) { running = stopped }
            try {
                ensureActive()
                work()
            } catch (error: MlcpipeException) {
                caller.ensureActive() // a coroutine that was cancelled ends as cancelled
                throw error
            } finally {
                synchronized(lock) { running = null }
            }
        }
    }

    private fun stop(stopped: AtomicBoolean) {
        gate.stop(stopped)
        synchronized(lock) { if (running === stopped && !closed) Native.cancel(handle) }
    }

    companion object {
        /**
         * Opens a file of weights (`model.mlcp`) with its code, or, without, a bundle's folder. Throws
         * [MlcpipeException]; [plan] says before whether memory is enough.
         */
        suspend fun open(path: String, code: ModelCode? = null, options: Options = Options()): Mlcpipe = opened {
            Native.open(path.encodeToByteArray(), options.numbers(code), options.texts())
        }

        /** Opens weights that lie in a file uncompressed, at a multiple of 64 bytes. The descriptor stays the caller's. */
        suspend fun open(
            descriptor: Int,
            offset: Long,
            bytes: Long,
            code: ModelCode,
            options: Options = Options(),
        ): Mlcpipe = opened {
            Native.openDescriptor(descriptor, offset, bytes, options.numbers(code), options.texts())
        }

        /** Reads what a model needs, nothing else. */
        suspend fun plan(path: String, options: Options = Options()): Plan = withContext(Dispatchers.IO) {
            val plan = Native.plan(path.encodeToByteArray(), options.numbers(null), options.texts())
            Plan(plan[0], plan[1], plan[2], plan[3], plan[4].toInt(), plan[5] != 0L)
        }

        /** Threads that compute, of all models: 1 to 1024; also during an answer. */
        fun setThreads(threads: Int) = Native.setThreads(threads)

        private suspend fun opened(open: () -> Long): Mlcpipe {
            val model = withContext(NonCancellable + Dispatchers.IO) { Mlcpipe(open()) }
            try {
                currentCoroutineContext().ensureActive()
            } catch (error: Throwable) {
                model.close()
                throw error
            }
            return model
        }
    }
}

private class ChannelSink(
    private val stopped: AtomicBoolean,
    private val gate: Gate,
    private val send: (Chunk) -> Unit,
) : Sink {
    override fun onToken(token: Int): Boolean {
        gate.pass(stopped)
        return !stopped.get()
    }

    override fun onText(text: ByteArray) = send(Chunk.Text(text.decodeToString()))
}

private fun end(values: DoubleArray): Chunk.End {
    val counts = values.slice(1..3).map { it.toInt() }
    val statistics = Statistics(counts[0], counts[1], counts[2], values[4], values[5], values[6])
    return Chunk.End(if (values[0] == 1.0) Finish.STOP else Finish.LENGTH, statistics)
}

private fun Message.toMap() = mapOf("role" to role, "content" to content)

private fun toJson(messages: List<Message>) = Json.write(messages.map { it.toMap() }).encodeToByteArray()

private fun messagesOf(chat: String): List<Message> {
    val messages = (Json.read(chat, "the saved chat") as? Map<*, *>)?.get("messages") as? List<*> ?: return emptyList()
    return messages.filterIsInstance<Map<*, *>>().mapNotNull { message ->
        val (role, content) = message["role"] to message["content"]
        if (role is String && content is String) Message(role, content) else null
    }
}
