package ai.mlcpipe

import java.io.File
import java.io.IOException
import java.net.URL
import kotlinx.coroutines.CoroutineStart
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.Job
import kotlinx.coroutines.NonCancellable
import kotlinx.coroutines.cancelAndJoin
import kotlinx.coroutines.flow.Flow
import kotlinx.coroutines.flow.MutableStateFlow
import kotlinx.coroutines.flow.StateFlow
import kotlinx.coroutines.flow.asStateFlow
import kotlinx.coroutines.flow.channelFlow
import kotlinx.coroutines.launch
import kotlinx.coroutines.sync.Mutex
import kotlinx.coroutines.sync.withLock
import kotlinx.coroutines.withContext

/** Where weights that are absent come from. */
data class Download(val file: ModelFile, val url: URL)

/**
 * A chat for a user interface: its model is opened when it is needed, and gives its memory back when it is told to. What
 * happens to the device comes as calls, which `DeviceEvents` makes. All functions may be called from any thread.
 *
 * [weights] is the file of weights, which a [download] puts into that folder, and [library] the model's code, as
 * [ModelCode.load] takes it; null where [weights] is the folder of a bundle. The chat is kept in the file [saved] with its
 * keys and values while the model is not open: the latest one continues, also in another process.
 */
class ChatSession(
    private val weights: File,
    private val saved: File,
    private val library: String? = null,
    private val options: Options = Options(),
    private val download: Download? = null,
) : AutoCloseable {
    private val opening = Mutex() // of what opens, saves or drops the model
    private val shown = MutableStateFlow(idle())
    private val lock = Any() // of what follows
    private var model: Mlcpipe? = null
    private var chat: Chat? = null
    private var answer: Job? = null
    private var remembered = emptyList<Message>() // while the model is not open
    private var heat = 0
    private var threads = 0 // of the model on a cool device
    private var paused = false
    private var closed = false

    val state: StateFlow<ModelState> = shown.asStateFlow()

    /** The messages so far, without the running answer. */
    val messages: List<Message> get() = synchronized(lock) { chat?.messages ?: remembered }

    /**
     * Opens the model and the saved chat, after a download where the weights are absent. Where the process ended while it
     * loaded the model before, this throws RESOURCE: a system that ended it for its memory would do so again. The user may
     * ask to load it [again]. What is thrown is the [state] too.
     */
    suspend fun open(again: Boolean = false) {
        opening.withLock { opened(again) }
    }

    /**
     * The answer to [text], as [Chat.send] gives it; opens the model first where needed. It ends with CANCELLED when the
     * model is dropped meanwhile.
     */
    fun send(text: String, sampling: Sampling = Sampling(), maxTokens: Int = 0): Flow<Chunk> = channelFlow {
        val job = opening.withLock {
            val open = opened(again = false)
            val job = launch(start = CoroutineStart.LAZY) {
                open.send(text, sampling, maxTokens).collect { channel.send(it) }
            }
            job.also { begin(it) }
        }
        job.join()
        if (job.isCancelled) throw MlcpipeException(ErrorCode.CANCELLED, "the answer ended, for the memory of its model")
    }

    /** Saves the chat, so that it continues in another process. Nothing while an answer is computed. */
    suspend fun save() = opening.withLock { if (answer?.isCompleted != false) keep() }

    /** Begins another chat; a running answer ends. */
    suspend fun clear() = opening.withLock {
        withContext(NonCancellable) {
            answer?.cancelAndJoin()
            saved.delete()
            val open = synchronized(lock) {
                remembered = emptyList()
                model?.also { chat = it.chat() }
            }
            open?.reset()
        }
    }

    /** Saves the chat and gives all memory back. A running answer ends, and its text so far is kept. */
    suspend fun drop() {
        if (synchronized(lock) { model } != null) opening.withLock { withContext(NonCancellable) { dropped() } }
    }

    /** At a level of `onTrimMemory`: gives back what no chat uses, or all. */
    suspend fun trimMemory(level: Int) {
        if (asksForAll(level)) return drop()
        try {
            synchronized(lock) { model }?.trim()
        } catch (error: MlcpipeException) {
            return // closed meanwhile
        }
    }

    /** At a status of `PowerManager`'s heat, 0 to 6: a hot device computes with fewer threads, also in an answer. */
    fun setHeat(status: Int) = synchronized(lock) {
        heat = status
        if (model != null) Mlcpipe.setThreads(threadsAt(heat, threads))
    }

    /** Holds the running answer and later ones, for an app that wants no answer in the background. */
    fun pause() = setPaused(true)

    /** Continues after [pause]. */
    fun resume() = setPaused(false)

    /** Gives all memory back without saving the chat. */
    override fun close() = synchronized(lock) {
        closed = true
        forget()
    }

    private fun setPaused(value: Boolean) = synchronized(lock) {
        paused = value
        model?.setPaused(value)
        Unit
    }

    private suspend fun opened(again: Boolean): Chat {
        synchronized(lock) { chat }?.let { return it }
        checkOpen()
        try {
            return withContext(Dispatchers.IO) { load(again) }
        } catch (error: MlcpipeException) {
            shown.value = ModelState.Failed(error)
            throw error
        } finally {
            shown.compareAndSet(ModelState.Loading, idle()) // cancelled
        }
    }

    private suspend fun load(again: Boolean): Chat {
        val mark = File("${saved.path}.loading") // which a process leaves behind that ended meanwhile
        if (mark.exists() && !again) {
            val what = "the app ended while it loaded this model, perhaps for want of memory"
            throw MlcpipeException(ErrorCode.RESOURCE, what, "close other apps and load it again, or take a smaller model")
        }
        val file = found()
        try {
            mark.createNewFile()
        } catch (error: IOException) {
            throw MlcpipeException(ErrorCode.RESOURCE, "cannot write $mark: ${error.message}", cause = error)
        }
        try {
            shown.value = ModelState.Loading
            val open = Mlcpipe.open(file.path, library?.let { ModelCode.load(it) }, options)
            try {
                return restored(open).also { taken(open, it) }
            } catch (error: Throwable) {
                open.close()
                throw error
            }
        } finally {
            mark.delete()
        }
    }

    private suspend fun found(): File = when {
        weights.exists() -> weights
        download != null -> try {
            ModelStore(weights.absoluteFile.parentFile).download(download.file, download.url) { shown.value = it }
        } finally {
            shown.value = idle()
        }
        else -> throw MlcpipeException(ErrorCode.BUNDLE, "the model's weights are absent in $weights")
    }

    /** The chat of before. One that cannot be read is removed: it is computed again where its messages are known. */
    private suspend fun restored(open: Mlcpipe): Chat {
        val continued = Chat(open, synchronized(lock) { remembered })
        try {
            if (saved.exists()) continued.restore(saved.path)
        } catch (error: MlcpipeException) {
            if (error.code != ErrorCode.USAGE && error.code != ErrorCode.BUNDLE) throw error
            saved.delete()
        }
        return continued
    }

    private fun taken(open: Mlcpipe, continued: Chat) = synchronized(lock) {
        checkOpen()
        model = open
        chat = continued
        shown.value = ModelState.Ready
        open.setPaused(paused)
        threads = open.threads
        Mlcpipe.setThreads(threadsAt(heat, threads))
    }

    private fun checkOpen() = synchronized(lock) {
        if (closed) throw MlcpipeException(ErrorCode.USAGE, "the session is closed")
    }

    private fun begin(job: Job) = synchronized(lock) {
        if (answer?.isCompleted == false) {
            job.cancel()
            throw MlcpipeException(ErrorCode.USAGE, "an answer of this chat is running")
        }
        answer = job
        shown.value = ModelState.Busy
        job.invokeOnCompletion { shown.compareAndSet(ModelState.Busy, ModelState.Ready) }
        job.start()
    }

    private suspend fun dropped() {
        answer?.cancelAndJoin()
        try {
            keep()
        } catch (error: MlcpipeException) {
            saved.delete() // older than the messages, which are remembered
        }
        synchronized(lock) { forget() }
    }

    private suspend fun keep() {
        val said = synchronized(lock) { chat } ?: return
        if (said.messages.isNotEmpty()) said.save(saved.path)
    }

    private fun forget() {
        remembered = messages
        model?.close()
        model = null
        chat = null
        shown.value = idle()
    }

    private fun idle(): ModelState = if (weights.exists()) ModelState.Dropped else ModelState.Absent
}
