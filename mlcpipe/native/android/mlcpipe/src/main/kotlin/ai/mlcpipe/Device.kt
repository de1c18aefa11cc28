package ai.mlcpipe

// Levels of Android's ComponentCallbacks2.
private const val TRIM_MEMORY_RUNNING_CRITICAL = 15
private const val TRIM_MEMORY_UI_HIDDEN = 20

/** Whether a level of `onTrimMemory` asks for all of the model's memory, rather than for what no chat uses. */
internal fun asksForAll(level: Int) = level >= TRIM_MEMORY_RUNNING_CRITICAL && level != TRIM_MEMORY_UI_HIDDEN

// Statuses of heat in Android's PowerManager.
private const val THERMAL_STATUS_MODERATE = 2
private const val THERMAL_STATUS_SEVERE = 3

/** Threads at a status of heat, 0 (none) to 6 (shutdown), of a model that has [full] of them on a cool device. */
internal fun threadsAt(status: Int, full: Int): Int = when {
    status < THERMAL_STATUS_MODERATE -> full
    status == THERMAL_STATUS_MODERATE -> maxOf(1, full * 3 / 4)
    status == THERMAL_STATUS_SEVERE -> maxOf(1, full / 2)
    else -> 1
}
