package ai.mlcpipe

import java.io.File
import java.io.IOException
import java.io.InputStream
import java.io.RandomAccessFile
import java.net.HttpURLConnection
import java.net.URL
import java.nio.channels.OverlappingFileLockException
import java.security.MessageDigest
import kotlinx.coroutines.CoroutineScope
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.delay
import kotlinx.coroutines.ensureActive
import kotlinx.coroutines.sync.Mutex
import kotlinx.coroutines.sync.withLock
import kotlinx.coroutines.withContext

/** The expected file of weights. [sha256] has a hash, hexadecimal, for each [partBytes] of it. */
data class ModelFile(val name: String, val bytes: Long, val partBytes: Int, val sha256: List<String>) {
    companion object {
        /** Reads `model.json`, which `mlcpipe package --app android` writes beside a `model.mlcp`. */
        fun read(json: String): ModelFile {
            val values = Json.read(json, "the list of parts") as? Map<*, *>
            val (name, hashes) = values?.get("name") to values?.get("sha256")
            val bytes = (values?.get("bytes") as? Double)?.toLong() ?: 0
            val part = (values?.get("part_bytes") as? Double)?.toInt() ?: 0
            val valid = name is String && NAME.matches(name) && bytes > 0 && part > 0 && hashes is List<*> &&
                hashes.all { it is String } && hashes.size.toLong() == (bytes + part - 1) / part
            if (!valid) throw MlcpipeException(ErrorCode.BUNDLE, "the list of a model's parts is damaged")
            return ModelFile(name, bytes, part, hashes.map { it as String })
        }

        private val NAME = Regex("[A-Za-z0-9_][A-Za-z0-9_.-]*")
    }
}

/**
 * Files of weights in a folder. A download continues where it ended, also in another process: its whole parts are checked
 * and kept, and the file gets its name when all of them are right.
 */
class ModelStore(private val folder: File) {
    private val mutex = Mutex()

    /** The file if it is there. */
    fun find(file: ModelFile): File? = File(folder, file.name).takeIf { it.length() == file.bytes }

    /**
     * Downloads the file unless it is there. [onProgress] gets [ModelState.Verifying] and [ModelState.Downloading]. Throws
     * [MlcpipeException]: NETWORK, RESOURCE where the disk has no room, BUNDLE where the host has another file.
     */
    suspend fun download(file: ModelFile, url: URL, onProgress: (ModelState) -> Unit = {}): File = mutex.withLock {
        find(file) ?: withContext(Dispatchers.IO) {
            folder.mkdirs()
            val unfinished = File(folder, "${file.name}.part")
            try {
                RandomAccessFile(unfinished, "rw").use {
                    if (!isAlone(it)) throw MlcpipeException(ErrorCode.USAGE, "a download to $unfinished is running")
                    Download(file, url, it, onProgress).run(this)
                }
            } catch (error: IOException) {
                throw MlcpipeException(ErrorCode.RESOURCE, "cannot write $unfinished: ${error.message}", cause = error)
            }
            val finished = File(folder, file.name)
            if (!unfinished.renameTo(finished)) throw MlcpipeException(ErrorCode.RESOURCE, "cannot write $finished")
            finished
        }
    }

    /** Removes the file, and what was downloaded of it. */
    fun remove(file: ModelFile) {
        for (name in listOf(file.name, "${file.name}.part")) File(folder, name).delete()
    }

    private inner class Download(
        private val file: ModelFile,
        private val url: URL,
        private val out: RandomAccessFile,
        private val onProgress: (ModelState) -> Unit,
    ) {
        private val buffer = ByteArray(1 shl 16)
        private var tag: String? = null
        private var part = 0
        private var wrong = 0 // parts in a row that were not what they must be

        suspend fun run(scope: CoroutineScope) {
            while (part < file.sha256.size && kept(scope)) advance { ModelState.Verifying(it, file.bytes) }
            out.setLength(begin())
            val room = folder.usableSpace
            if (room < file.bytes - begin()) {
                val found = "$room bytes free, of ${file.bytes - begin()}"
                throw MlcpipeException(ErrorCode.RESOURCE, "the disk has no room for the model; found $found")
            }
            var failures = 0
            while (part < file.sha256.size) {
                val before = part
                try {
                    fetch(scope)
                } catch (error: NetworkException) {
                    failures = if (part > before) 0 else failures + 1
                    if (failures == ATTEMPTS) throw failed(error.message ?: "no answer", error)
                    delay(PAUSE_MS shl failures)
                }
            }
            out.fd.sync()
        }

        private fun begin() = minOf(part.toLong() * file.partBytes, file.bytes)

        private fun advance(state: (Long) -> ModelState) {
            part++
            onProgress(state(begin()))
        }

        private fun partBytes() = minOf(file.partBytes.toLong(), file.bytes - begin())

        /** Whether the next part is on the disk already. */
        private fun kept(scope: CoroutineScope): Boolean {
            if (out.length() < begin() + partBytes()) return false
            out.seek(begin())
            return hash(scope, { count -> out.read(buffer, 0, count) }, {}) == file.sha256[part]
        }

        private fun fetch(scope: CoroutineScope) {
            val connection = network { url.openConnection() } as? HttpURLConnection
                ?: throw MlcpipeException(ErrorCode.USAGE, "weights come by http and https alone; found $url")
            try {
                connection.connectTimeout = TIMEOUT_MS
                connection.readTimeout = TIMEOUT_MS
                connection.setRequestProperty("Accept-Encoding", "identity")
                if (part > 0) connection.setRequestProperty("Range", "bytes=${begin()}-")
                tag?.let { connection.setRequestProperty("If-Range", it) }
                val body = network { answer(connection) }
                while (part < file.sha256.size) receive(scope, body)
            } finally {
                connection.disconnect()
            }
        }

        /** The body from the next part on. A host that ignores the range sends all of it: what is kept is skipped. */
        private fun answer(connection: HttpURLConnection): InputStream {
            val status = connection.responseCode
            val range = connection.getHeaderField("Content-Range")
            if (status == HttpURLConnection.HTTP_PARTIAL && range?.startsWith("bytes ${begin()}-") != true) {
                throw IOException("the host sent another range: $range")
            }
            if (status in REFUSALS) throw failed("the host answers with status $status", null)
            if (status != HttpURLConnection.HTTP_OK && status != HttpURLConnection.HTTP_PARTIAL) {
                throw IOException("the host answers with status $status")
            }
            tag = connection.getHeaderField("ETag")?.takeUnless { it.startsWith("W/") }
            val body = connection.inputStream
            var skip = if (status == HttpURLConnection.HTTP_OK) begin() else 0
            while (skip > 0) {
                val count = body.read(buffer, 0, minOf(skip, buffer.size.toLong()).toInt())
                if (count < 0) throw IOException("the connection ended early")
                skip -= count
            }
            return body
        }

        private fun receive(scope: CoroutineScope, body: InputStream) {
            out.seek(begin())
            val found = hash(scope, { count -> network { body.read(buffer, 0, count) } }, { out.write(buffer, 0, it) })
            if (found == file.sha256[part]) {
                wrong = 0
                advance { ModelState.Downloading(it, file.bytes) }
            } else if (++wrong == ATTEMPTS) {
                val what = "the host has another file than the app expects"
                throw MlcpipeException(ErrorCode.BUNDLE, "$what in $url; found SHA-256 $found of part $part")
            } else {
                throw NetworkException("part $part is damaged", null)
            }
        }

        private fun hash(scope: CoroutineScope, read: (Int) -> Int, keep: (Int) -> Unit): String {
            val digest = MessageDigest.getInstance("SHA-256")
            var left = partBytes()
            while (left > 0) {
                scope.ensureActive()
                val count = read(minOf(left, buffer.size.toLong()).toInt())
                if (count < 0) throw NetworkException("the connection ended early", null)
                digest.update(buffer, 0, count)
                keep(count)
                left -= count
            }
            return digest.digest().joinToString("") { "%02x".format(it) }
        }

        private fun failed(what: String, cause: Throwable?) =
            MlcpipeException(ErrorCode.NETWORK, "the download failed in $url; found $what", "try again later", cause)
    }

    /** A failure of the network, as another than of the disk: the download tries again. */
    private class NetworkException(message: String?, cause: Throwable?) : RuntimeException(message, cause)

    private companion object {
        const val ATTEMPTS = 4
        const val PAUSE_MS = 200L
        const val TIMEOUT_MS = 30_000
        val REFUSALS = listOf(400, 401, 403, 404, 410)

        /** Whether neither another process nor other code in this one has the file. */
        fun isAlone(out: RandomAccessFile): Boolean =
            try {
                out.channel.tryLock() != null
            } catch (error: OverlappingFileLockException) {
                false
            }

        fun <T> network(work: () -> T): T =
            try {
                work()
            } catch (error: IOException) {
                throw NetworkException(error.message, error)
            }
    }
}
