// What the tests in Python run: `scenario paths…` prints lines of JSON.
package ai.mlcpipe

import kotlin.concurrent.thread
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.async
import kotlinx.coroutines.awaitAll
import kotlinx.coroutines.cancel
import kotlinx.coroutines.flow.Flow
import kotlinx.coroutines.flow.collect
import kotlinx.coroutines.flow.take
import kotlinx.coroutines.flow.toList
import kotlinx.coroutines.launch
import kotlinx.coroutines.runBlocking

val GREEDY = Sampling(temperature = 0.0)

fun show(vararg members: Pair<String, Any?>) = println(Json.write(mapOf(*members)))

/** Text and statistics of an answer that is collected to its end. */
suspend fun whole(answer: Flow<Chunk>): Pair<String, Chunk.End> {
    val chunks = answer.toList()
    val text = chunks.dropLast(1).joinToString("") { (it as Chunk.Text).text }
    return text to chunks.last() as Chunk.End
}

/** The code and the line of what fails. */
suspend fun failure(name: String, work: suspend () -> Unit) {
    try {
        work()
        show("name" to name, "code" to null)
    } catch (error: MlcpipeException) {
        show("name" to name, "code" to error.code.name, "line" to error.message)
    }
}

/** A chat, each message answered greedily. */
suspend fun conversation(path: String, code: ModelCode?, questions: List<String>) {
    Mlcpipe.open(path, code).use { model ->
        val chat = model.chat()
        for (question in questions) {
            val ids = model.tokenize(chat.messages + Message("user", question))
            val (text, end) = whole(chat.send(question, GREEDY))
            val s = end.statistics
            show(
                "text" to text,
                "prompt" to ids.toList(),
                "finish" to end.finish.name.lowercase(),
                "tokens" to listOf(s.promptTokens, s.cachedTokens, s.completionTokens),
            )
        }
    }
}

/** How much of an answer was computed when its coroutine was cancelled: bytes of the saved chat; and that it continues. */
suspend fun cancel(path: String, file: String) = runBlocking {
    Mlcpipe.open(path).use { model ->
        suspend fun savedBytes(): Long {
            model.save(file)
            return java.io.File(file).length()
        }
        whole(model.answer(listOf(Message("user", "go on")), GREEDY))
        val whole = savedBytes()
        var until = whole
        var chunks = 0
        var chat = model.chat()
        // On a busy machine this model may have answered before the collector runs: then once more.
        for (attempt in 1..10) {
            if (until < whole / 5) break
            model.reset()
            chat = model.chat()
            chunks = 0
            // Unconfined: the collector runs in the call back of the token that it gets.
            launch(Dispatchers.Unconfined) { chat.send("go on", GREEDY).collect { if (++chunks == 3) cancel() } }.join()
            until = savedBytes()
        }
        val said = chat.messages.last().content.isNotEmpty()
        val first = chat.send("go on", GREEDY).take(3).toList().size
        show(
            "whole" to whole,
            "until" to until,
            "kept" to chat.messages.map { it.role },
            "first" to first,
            "chunks" to chunks,
            "said" to said,
        )
    }
}

/** An answer whose model is closed meanwhile, by its collector or by another thread. */
suspend fun close(path: String) {
    for (elsewhere in listOf(false, true)) {
        val model = Mlcpipe.open(path)
        val chat = model.chat()
        var chunks = 0
        failure(if (elsewhere) "thread" else "collector") {
            chat.send("go on", GREEDY).collect {
                if (++chunks == 3) if (elsewhere) thread { model.close() } else model.close()
            }
        }
        model.close()
        failure("answer") { chat.send("more").collect() }
        failure("reset") { model.reset() }
        failure("trim") { model.trim() }
    }
}

/** Two coroutines with one model, one chat asked twice at once, and a collector that throws or asks again. */
suspend fun together(path: String) = runBlocking {
    Mlcpipe.open(path).use { model ->
        val answers = List(4) { async(Dispatchers.Default) { whole(model.chat().send("Hello!", GREEDY)).first } }
        show("answers" to answers.awaitAll())
        val chat = model.chat()
        failure("twice") { chat.send("Hello!").collect { chat.send("Hello?").collect() } }
        show("said" to chat.messages.size)
        val inner = mutableListOf<String>()
        model.chat().send("Hello!", GREEDY).collect {
            if (inner.isEmpty()) inner += whole(model.chat().send("Hello!", GREEDY)).first
        }
        show("inner" to inner)
        try {
            model.chat().send("Hello!").collect { throw IllegalStateException("of the collector") }
        } catch (error: IllegalStateException) {
            show("thrown" to error.message)
        }
        show("after" to whole(model.chat().send("Hello!", GREEDY)).first)
    }
}

/** Requests that cannot be honoured. */
suspend fun refused(path: String) {
    Mlcpipe.open(path).use { model ->
        val huge = "word ".repeat(2 shl 20)
        failure("prompt of 10 MB") { model.chat().send(huge).collect() }
        failure("temperature") { model.chat().send("Hello!", Sampling(temperature = -1.0)).collect() }
        failure("top_k") { model.chat().send("Hello!", Sampling(topK = -1)).collect() }
        failure("maxTokens") { model.chat().send("Hello!", maxTokens = -1).collect() }
        failure("role") { model.answer(listOf(Message("stranger", "Hello!"))).collect() }
        failure("no message") { model.answer(emptyList()).collect() }
        failure("variables") { model.answer(listOf(Message("user", "x")), variables = "[").collect() }
        failure("surrogate") { model.chat().send("\ud800 \u0000 é", maxTokens = 1).collect() }
        failure("threads") { Mlcpipe.setThreads(0) }
        failure("save") { model.save("/nowhere/chat") }
        failure("restore") { model.restore(path) }
        show("after" to whole(model.chat().send("Hello!", GREEDY)).first)
    }
    failure("path with a 0") { Mlcpipe.open("a\u0000b").close() }
    failure("context") { Mlcpipe.open(path, options = Options(contextLength = -1)) }
}

/** Opens each path. */
suspend fun open(paths: List<String>) = paths.forEach { failure(it) { Mlcpipe.open(it).close() } }

/** Says something, and saves the chat; or continues it in another process. */
suspend fun save(path: String, file: String) = Mlcpipe.open(path).use { model ->
    val chat = model.chat()
    whole(chat.send("What is a \"compiler\"?\n\t\u0001é🎉", GREEDY))
    chat.save(file)
    show("messages" to chat.messages.map { it.content }, "answer" to whole(chat.send("And then?", GREEDY)).first)
}

suspend fun restore(path: String, file: String) = Mlcpipe.open(path).use { model ->
    val chat = model.chat()
    chat.restore(file)
    val messages = chat.messages.map { it.content }
    val (answer, end) = whole(chat.send("And then?", GREEDY))
    show("messages" to messages, "answer" to answer, "cached" to end.statistics.cachedTokens)
}

/** Downloads a file that `model.json` describes; the process ends when `end` bytes are checked. */
suspend fun download(json: String, folder: String, url: String, end: Long) {
    val file = ModelFile.read(java.io.File(json).readText())
    val store = ModelStore(java.io.File(folder))
    val progress = mutableListOf<Long>()
    failure("download") {
        store.download(file, java.net.URL(url)) {
            progress += bytesOf(it)
            if (bytesOf(it) == end) Runtime.getRuntime().halt(0)
        }
    }
    show("progress" to progress, "there" to (store.find(file) != null))
}

fun bytesOf(state: ModelState) = when (state) {
    is ModelState.Downloading -> state.bytes
    is ModelState.Verifying -> state.bytes
    else -> error("no progress: $state")
}

/** Another download to the same file meanwhile, and one that is no URL of a web server. */
suspend fun downloadTwice(json: String, folder: String, url: String) {
    val file = ModelFile.read(java.io.File(json).readText())
    fun store() = ModelStore(java.io.File(folder))
    var twice = false
    store().download(file, java.net.URL(url)) {
        if (!twice) runBlocking { failure("twice") { store().download(file, java.net.URL(url)) } }
        twice = true
    }
    store().remove(file)
    failure("file") { store().download(file, java.net.URL("file:$json")) }
}

/** Cancels a download after its first part; the next one continues. */
suspend fun cancelDownload(json: String, folder: String, url: String) = runBlocking {
    val file = ModelFile.read(java.io.File(json).readText())
    val store = ModelStore(java.io.File(folder))
    val job = launch(Dispatchers.IO) { store.download(file, java.net.URL(url)) { cancel() } }
    job.join()
    show("cancelled" to job.isCancelled, "there" to (store.find(file) != null))
    download(json, folder, url, -1)
}

/** As tests/native/first_token.py. */
suspend fun first(path: String, runs: Int) = repeat(runs) {
    val before = privateBytes()
    val began = System.nanoTime()
    Mlcpipe.open(path).use { model ->
        val opened = System.nanoTime()
        model.chat().send("Hello!", GREEDY, maxTokens = 1).collect()
        val first = System.nanoTime()
        val seconds = listOf(opened - began, first - opened).map { it / 1e9 }
        show("open_s" to seconds[0], "first_s" to seconds[1], "private_bytes" to privateBytes() - before)
    }
}

fun privateBytes() = java.io.File("/proc/self/smaps_rollup").readLines()
    .filter { it.startsWith("Private_") }
    .sumOf { it.split(Regex(" +"))[1].toLong() * 1024 }

fun residentBytes() =
    java.io.File("/proc/self/statm").readText().split(" ")[1].toLong() * 4096

/** Bytes of memory before and after many cancels, opens and closes. */
suspend fun growth(path: String, cancels: Int, opens: Int) {
    suspend fun cancelled(count: Int) = Mlcpipe.open(path).use { model ->
        repeat(count) { model.answer(listOf(Message("user", "go on")), GREEDY).take(1).collect() }
    }
    suspend fun opened(count: Int) = repeat(count) { Mlcpipe.open(path).close() }
    cancelled(cancels / 10)
    opened(opens / 10)
    val before = residentBytes()
    cancelled(cancels)
    opened(opens)
    show("before" to before, "after" to residentBytes())
}

fun main(words: Array<String>) = runBlocking {
    val path = words[1]
    when (val name = words[0]) {
        "conversation" -> conversation(path, words[2].ifEmpty { null }?.let { ModelCode.load(it) }, words.drop(3))
        "cancel" -> cancel(path, words[2])
        "close" -> close(path)
        "together" -> together(path)
        "refused" -> refused(path)
        "open" -> open(words.drop(1))
        "save" -> save(path, words[2])
        "restore" -> restore(path, words[2])
        "download" -> download(path, words[2], words[3], words[4].toLong())
        "cancelDownload" -> cancelDownload(path, words[2], words[3])
        "downloadTwice" -> downloadTwice(path, words[2], words[3])
        "code" -> failure(path) { ModelCode.load(path) }
        "first" -> first(path, words[2].toInt())
        "growth" -> growth(path, words[2].toInt(), words[3].toInt())
        else -> session(name, path, words.drop(2))
    }
}
