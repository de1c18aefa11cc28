// What the tests of bad input run.
package ai.mlcpipe

import java.io.File
import java.io.RandomAccessFile
import java.nio.file.Files
import kotlinx.coroutines.flow.collect

/** The number of this process's descriptor of an open file. */
fun descriptorOf(path: String): Int =
    File("/proc/self/fd").listFiles()!!.first { Files.exists(it.toPath()) && it.canonicalPath == path }.name.toInt()

/** Opens descriptors that are no model, and one without code. Standard input is a pipe. */
suspend fun descriptors(path: String) = RandomAccessFile(path, "r").use { file ->
    val (descriptor, bytes) = descriptorOf(path) to file.length()
    val none = ModelCode(0)
    failure("pipe") { Mlcpipe.open(0, 0, bytes, none).close() }
    failure("none") { Mlcpipe.open(-1, 0, bytes, none).close() }
    failure("offset") { Mlcpipe.open(descriptor, bytes, bytes, none).close() }
    failure("negative") { Mlcpipe.open(descriptor, -64, bytes, none).close() }
    failure("cut") { Mlcpipe.open(descriptor, 0, bytes - 1, none).close() }
    failure("code") { Mlcpipe.open(descriptor, 0, bytes, none).close() }
    check(descriptorOf(path) == descriptor)
}

/** Removes a bundle's files while it is open. */
suspend fun removed(path: String) {
    Mlcpipe.open(path).use { model ->
        show("answer" to whole(model.chat().send("Hello!", GREEDY)).first)
        model.reset()
        File(path).deleteRecursively()
        show("answer" to whole(model.chat().send("Hello!", GREEDY)).first)
    }
    failure("again") { Mlcpipe.open(path).close() }
}

/** Saves to a disk that is full, and continues. */
suspend fun full(path: String, file: String) {
    Mlcpipe.open(path).use { model ->
        val chat = model.chat()
        whole(chat.send("Hello!", GREEDY))
        failure("save") { chat.save(file) }
        failure("after") { chat.send("And then?", GREEDY).collect() }
    }
    ChatSession(File(path), File(file)).use { session ->
        session.send("Hello!", GREEDY).collect()
        failure("drop") { session.drop() }
        session.send("And then?", GREEDY).collect()
        val left = File(file).parentFile.list()!!.toList()
        show("messages" to session.messages.size, "files" to left)
    }
}

/** Opens a model on a device: the answer, or the error. */
suspend fun device(path: String, name: String, cache: String, gpu: String?) {
    val options = Options(device = Device(name), cache = File(cache), gpu = gpu?.let { GpuModel(it) })
    failure(name) {
        Mlcpipe.open(path, options = options).use { model ->
            show("device" to model.device.name, "title" to model.deviceTitle)
            show("answer" to whole(model.chat().send("Hello!", GREEDY)).first)
        }
    }
}

/** A model for which there is no memory. */
suspend fun memory(path: String) {
    val plan = Mlcpipe.plan(path)
    show("fits" to plan.fits, "weights" to plan.weightsBytes, "free" to plan.freeBytes)
    failure("open") { Mlcpipe.open(path).close() }
    File(path, "chat").let { saved ->
        ChatSession(File(path), saved).use { session ->
            failure("session") { session.send("Hello!").collect() }
            show("state" to session.state.value.javaClass.simpleName, "files" to listOf(saved.exists()))
        }
    }
}

/** A chat that continues until its context is full: how many answers it has then, and that a new one is answered. */
suspend fun context(path: String) = Mlcpipe.open(path, options = Options(contextLength = 128)).use { model ->
    val chat = model.chat()
    var answers = 0
    failure("send") {
        while (true) {
            chat.send("Hello!", GREEDY, maxTokens = 16).collect()
            ++answers
        }
    }
    show("answers" to answers, "messages" to chat.messages.size)
    show("answer" to whole(model.chat().send("Hello!", GREEDY)).first)
}

suspend fun badInput(name: String, path: String, words: List<String>) = when (name) {
    "descriptors" -> descriptors(path)
    "removed" -> removed(path)
    "full" -> full(path, words[0])
    "device" -> device(path, words[0], words[1], words.getOrNull(2))
    "memory" -> memory(path)
    "context" -> context(path)
    "openWith" -> failure(path) { Mlcpipe.open(path, ModelCode.load(words[0])).close() }
    else -> error("no scenario $name")
}
