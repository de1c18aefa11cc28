package ai.mlcpipe.android

import ai.mlcpipe.ChatSession
import android.content.ComponentCallbacks2
import android.content.Context
import android.content.res.Configuration
import android.os.Build
import android.os.PowerManager
import kotlinx.coroutines.CoroutineScope
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.SupervisorJob
import kotlinx.coroutines.cancel
import kotlinx.coroutines.launch

/** Tells a session when the system wants memory and, since Android 10, how hot the device is, until it is closed. */
class DeviceEvents(context: Context, private val session: ChatSession) : ComponentCallbacks2, AutoCloseable {
    private val app = context.applicationContext
    private val scope = CoroutineScope(SupervisorJob() + Dispatchers.Default)
    private val heat = if (Build.VERSION.SDK_INT >= 29) HeatListener(app, session) else null

    init {
        app.registerComponentCallbacks(this)
    }

    override fun onTrimMemory(level: Int) {
        scope.launch { session.trimMemory(level) }
    }

    override fun onLowMemory() = onTrimMemory(ComponentCallbacks2.TRIM_MEMORY_COMPLETE)

    override fun onConfigurationChanged(configuration: Configuration) = Unit

    override fun close() {
        app.unregisterComponentCallbacks(this)
        heat?.close()
        scope.cancel()
    }
}

/** A class of its own, which older systems do not load. */
private class HeatListener(context: Context, private val session: ChatSession) :
    PowerManager.OnThermalStatusChangedListener, AutoCloseable {
    private val power = context.getSystemService(Context.POWER_SERVICE) as PowerManager

    init {
        power.addThermalStatusListener(this) // which gets the status of now
    }

    override fun onThermalStatusChanged(status: Int) = session.setHeat(status)

    override fun close() = power.removeThermalStatusListener(this)
}
