package ai.mlcpipe

import java.util.concurrent.atomic.AtomicBoolean
import java.util.concurrent.locks.ReentrantLock
import kotlin.concurrent.withLock

/** Holds an answer between two tokens while it is shut. */
internal class Gate {
    private val lock = ReentrantLock()
    private val changed = lock.newCondition()
    private var shut = false

    /** Returns when the gate is open or the answer [stopped]. */
    fun pass(stopped: AtomicBoolean) = lock.withLock {
        while (shut && !stopped.get()) changed.awaitUninterruptibly()
    }

    fun set(shut: Boolean) = lock.withLock {
        this.shut = shut
        changed.signalAll()
    }

    fun stop(answer: AtomicBoolean) = lock.withLock {
        answer.set(true)
        changed.signalAll()
    }
}
