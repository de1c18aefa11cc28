package ai.mlcpipe

/** The state of the model of a [ChatSession]. */
sealed interface ModelState {
    /** The file of weights is not there. */
    data object Absent : ModelState

    /** Bytes that have come and are checked, of the whole file. */
    data class Downloading(val bytes: Long, val totalBytes: Long) : ModelState

    /** Bytes of an earlier download that are checked. */
    data class Verifying(val bytes: Long, val totalBytes: Long) : ModelState

    data object Loading : ModelState

    data object Ready : ModelState

    /** An answer is computed. */
    data object Busy : ModelState

    /** The model takes no memory; the next message opens it, and the chat continues. */
    data object Dropped : ModelState

    /** The model could not be opened: the message says why. */
    data class Failed(val error: MlcpipeException) : ModelState
}
