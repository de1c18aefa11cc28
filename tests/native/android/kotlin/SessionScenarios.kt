// What the tests of sessions run.
package ai.mlcpipe

import java.io.File
import kotlinx.coroutines.CompletableDeferred
import kotlinx.coroutines.CoroutineScope
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.cancelAndJoin
import kotlinx.coroutines.async
import kotlinx.coroutines.coroutineScope
import kotlinx.coroutines.delay
import kotlinx.coroutines.flow.collect
import kotlinx.coroutines.flow.take
import kotlinx.coroutines.flow.toList
import kotlinx.coroutines.launch
import kotlinx.coroutines.yield

fun nameOf(state: ModelState): String = when (state) {
    is ModelState.Failed -> "Failed ${state.error.code}"
    is ModelState.Downloading -> "Downloading"
    is ModelState.Verifying -> "Verifying"
    else -> state.toString()
}

/** The names of all states of a session meanwhile, without repetitions. */
suspend fun statesOf(session: ChatSession, work: suspend CoroutineScope.() -> Unit): List<String> = coroutineScope {
    val states = mutableListOf<String>()
    val watcher = launch(Dispatchers.Unconfined) {
        session.state.collect { if (states.lastOrNull() != nameOf(it)) states += nameOf(it) }
    }
    work()
    watcher.cancelAndJoin()
    states
}

/** A chat that is dropped by the system between two messages, and by the system during an answer. */
suspend fun dropped(weights: String, saved: String) {
    val session = ChatSession(File(weights), File(saved))
    var cached = 0
    val states = statesOf(session) {
        whole(session.send("Hello!", GREEDY))
        session.trimMemory(20)
        session.trimMemory(40)
        cached = whole(session.send("And then?", GREEDY)).second.statistics.cachedTokens
    }
    val last = session.messages.last().content
    session.save()
    show("states" to states, "cached" to cached, "messages" to session.messages.map { it.role }, "last" to last)
    session.close()
    show("closed" to nameOf(session.state.value))
    failure("closed") { session.open() }
    ChatSession(File(weights), File(saved)).use { other ->
        other.open()
        show("continued" to (other.messages.last().content == last), "mark" to File("$saved.loading").exists())
        File(saved).delete()
        other.drop()
        File(saved).writeText("damaged")
        val again = whole(other.send("And then?", GREEDY)).second.statistics
        show("cached" to again.cachedTokens, "messages" to other.messages.size)
        other.clear()
        show("cleared" to other.messages.size, "answer" to whole(other.send("Hello!", GREEDY)).first)
    }
}

/** The model is dropped during an answer. */
suspend fun droppedMeanwhile(weights: String, saved: String) = coroutineScope {
    val session = ChatSession(File(weights), File(saved))
    var chunks = 0
    failure("dropped") {
        session.send("go on", GREEDY).collect {
            if (++chunks == 3) {
                session.pause() // else a fast computer ends the answer first
                launch(Dispatchers.Default) { session.trimMemory(80) }
            }
        }
    }
    while (session.state.value != ModelState.Dropped) yield()
    show("messages" to session.messages.map { it.role }, "state" to nameOf(session.state.value))
    session.clear()
    val held = launch { session.send("go on").collect() }
    while (session.state.value != ModelState.Busy) yield()
    failure("twice") { session.send("go on").collect() }
    held.cancelAndJoin()
    session.clear()
    session.resume()
    val busy = session.send("go on", GREEDY).take(1).toList().size
    show("again" to busy, "state" to nameOf(session.state.value))
    session.close()
}

/** A process that ends while it loads the model, with what the next one says of it. */
suspend fun killed(weights: String, saved: String, kill: Boolean) = coroutineScope {
    val session = ChatSession(File(weights), File(saved))
    if (kill) {
        launch(Dispatchers.Unconfined) {
            session.state.collect { if (it == ModelState.Loading) Runtime.getRuntime().halt(0) }
        }
        session.open()
    }
    failure("unasked") { session.open() }
    failure("message") { session.send("Hello!").collect() }
    val state = nameOf(session.state.value)
    session.open(again = true)
    show("state" to state, "again" to nameOf(session.state.value))
    session.close()
    failure("next") { ChatSession(File(weights), File(saved)).use { it.open() } }
}

/** Weights that come from a host. */
suspend fun fetched(json: String, folder: String, url: String) {
    val file = ModelFile.read(File(json).readText())
    val download = Download(file, java.net.URL(url))
    val weights = File(folder, file.name)
    val session = ChatSession(weights, File(folder, "chat"), download = download)
    var code: ErrorCode? = null
    val states = statesOf(session) {
        try {
            session.open()
        } catch (error: MlcpipeException) {
            code = error.code
        }
    }
    show("states" to states)
    show("code" to code?.name)
    failure("absent") { ChatSession(File(folder, "none"), File(folder, "chat")).use { it.open() } }
}

/** An answer that is held, and then let go or cancelled. */
suspend fun paused(weights: String, saved: String) = coroutineScope {
    ChatSession(File(weights), File(saved)).use { session ->
        val (answer, _) = whole(session.send("Hello!", GREEDY))
        session.clear()
        session.pause()
        val held = async(Dispatchers.Default) { whole(session.send("Hello!", GREEDY)).first }
        delay(300)
        show("held" to !held.isCompleted, "state" to nameOf(session.state.value))
        session.resume()
        show("same" to (held.await() == answer))
        session.pause()
        val began = CompletableDeferred<Unit>()
        val cancelled = launch(Dispatchers.Default) {
            began.complete(Unit)
            session.send("Hello!", GREEDY).collect()
        }
        began.await()
        delay(100)
        cancelled.cancelAndJoin()
        show("cancelled" to true)
    }
}

/** Threads while a device is hot, of four. */
suspend fun hot(weights: String, saved: String) {
    show("four" to (0..6).map { threadsAt(it, 4) }, "one" to (0..6).map { threadsAt(it, 1) })
    show("asks" to listOf(5, 10, 15, 20, 40, 60, 80).filter { asksForAll(it) })
    Mlcpipe.open(weights).use { watcher ->
        ChatSession(File(weights), File(saved), options = Options(threads = 4)).use { session ->
            session.open()
            val counts = listOf(0, 3, 6).map {
                session.setHeat(it)
                watcher.threads
            }
            session.drop()
            session.open()
            show("threads" to counts, "opened" to watcher.threads)
        }
    }
}

suspend fun session(name: String, path: String, words: List<String>) = when (name) {
    "dropped" -> dropped(path, words[0])
    "droppedMeanwhile" -> droppedMeanwhile(path, words[0])
    "killed" -> killed(path, words[0], words[1] == "kill")
    "fetched" -> fetched(path, words[0], words[1])
    "paused" -> paused(path, words[0])
    "hot" -> hot(path, words[0])
    else -> badInput(name, path, words)
}
