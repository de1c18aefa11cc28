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

/** Saves to a disk that is full, and goes on. */
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

suspend fun badInput(name: String, path: String, words: List<String>) = when (name) {
    "descriptors" -> descriptors(path)
    "removed" -> removed(path)
    "full" -> full(path, words[0])
    "openWith" -> failure(path) { Mlcpipe.open(path, ModelCode.load(words[0])).close() }
    else -> error("no scenario $name")
}
