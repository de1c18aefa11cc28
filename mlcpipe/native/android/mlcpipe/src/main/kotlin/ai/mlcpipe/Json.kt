package ai.mlcpipe

/** JSON as far as chats and lists of files need it: objects, lists, strings, numbers, true, false and null. */
internal object Json {
    fun write(value: Any?): String = StringBuilder().also { append(it, value) }.toString()

    /** Maps, lists, strings, doubles, booleans and null. Throws [MlcpipeException] with [what] for other text. */
    fun read(text: String, what: String): Any? {
        val reader = Reader(text)
        return try {
            reader.value(0).also { reader.end() }
        } catch (error: IllegalArgumentException) {
            throw MlcpipeException(ErrorCode.BUNDLE, "$what is no JSON: ${error.message}", cause = error)
        }
    }

    private fun append(out: StringBuilder, value: Any?) {
        when (value) {
            is String -> appendString(out, value)
            is Map<*, *> -> join(out, "{", "}", value.entries) { (key, member) ->
                appendString(out, key as String)
                out.append(':')
                append(out, member)
            }
            is Iterable<*> -> join(out, "[", "]", value) { append(out, it) }
            is Number, is Boolean, null -> out.append(value)
            else -> throw IllegalArgumentException("no JSON for ${value::class}")
        }
    }

    private fun <T> join(out: StringBuilder, open: String, close: String, values: Iterable<T>, write: (T) -> Unit) {
        out.append(open)
        values.forEachIndexed { index, value ->
            if (index > 0) out.append(',')
            write(value)
        }
        out.append(close)
    }

    private fun appendString(out: StringBuilder, text: String) {
        out.append('"')
        for (char in text) {
            when {
                char == '"' || char == '\\' -> out.append('\\').append(char)
                char < ' ' -> out.append("\\u").append(char.code.toString(16).padStart(4, '0'))
                else -> out.append(char)
            }
        }
        out.append('"')
    }

    private class Reader(private val text: String) {
        private var at = 0

        fun value(depth: Int): Any? {
            require(depth < MAX_DEPTH) { "nested too deeply" }
            return when (peek()) {
                '{' -> members('{', '}') {
                    val key = string()
                    take(':')
                    key to value(depth + 1)
                }.toMap()
                '[' -> members('[', ']') { value(depth + 1) }
                '"' -> string()
                't' -> word("true", true)
                'f' -> word("false", false)
                'n' -> word("null", null)
                else -> number()
            }
        }

        fun end() {
            skip()
            require(at == text.length) { "more text at character $at" }
        }

        private fun skip() {
            while (at < text.length && text[at] in " \t\r\n") at++
        }

        private fun peek(): Char {
            skip()
            require(at < text.length) { "the text ends early" }
            return text[at]
        }

        private fun take(char: Char) {
            require(peek() == char) { "expected $char at character $at" }
            at++
        }

        private fun <T> members(open: Char, close: Char, read: () -> T): List<T> {
            take(open)
            val values = mutableListOf<T>()
            while (peek() != close) {
                if (values.isNotEmpty()) take(',')
                values += read()
            }
            take(close)
            return values
        }

        private fun <T> word(name: String, value: T): T {
            require(text.startsWith(name, at)) { "unknown word at character $at" }
            at += name.length
            return value
        }

        private fun number(): Double {
            val begin = at
            while (at < text.length && text[at] in "+-.eE0123456789") at++
            return requireNotNull(text.substring(begin, at).toDoubleOrNull()) { "no value at character $begin" }
        }

        private fun string(): String {
            take('"')
            val out = StringBuilder()
            while (true) {
                require(at < text.length) { "the text ends in a string" }
                val char = text[at++]
                if (char == '"') return out.toString()
                out.append(if (char == '\\') escaped() else char)
            }
        }

        private fun escaped(): Char {
            require(at < text.length) { "the text ends in a string" }
            val char = text[at++]
            if (char != 'u') return requireNotNull(ESCAPES[char]) { "unknown escape at character $at" }
            require(at + 4 <= text.length) { "the text ends in a string" }
            val digits = text.substring(at, at + 4)
            require(digits.all { it in "0123456789abcdefABCDEF" }) { "no number at character $at" }
            at += 4
            return digits.toInt(16).toChar()
        }
    }

    private const val MAX_DEPTH = 64
    private val ESCAPES =
        mapOf('"' to '"', '\\' to '\\', '/' to '/', 'b' to '\b', 'f' to '\u000c', 'n' to '\n', 'r' to '\r', 't' to '\t')
}
