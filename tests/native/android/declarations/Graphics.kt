// What the app uses of colours and shapes.
package androidx.compose.ui.graphics

@JvmInline
value class Color(val value: ULong) {
    companion object {
        val Unspecified = Color(0uL)
    }
}

interface Shape
