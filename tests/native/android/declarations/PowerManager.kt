// What the Android library uses of android.os.PowerManager, of API 29: the classes that the tests compile against are of 23.
package android.os

@Suppress("unused")
class PowerManager {
    interface OnThermalStatusChangedListener {
        fun onThermalStatusChanged(status: Int)
    }

    fun addThermalStatusListener(listener: OnThermalStatusChangedListener): Unit = error(listener)

    fun removeThermalStatusListener(listener: OnThermalStatusChangedListener): Unit = error(listener)
}
