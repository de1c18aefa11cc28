// What the app uses of Material 3.
@file:Suppress("unused", "UNUSED_PARAMETER")

package androidx.compose.material3

import androidx.compose.foundation.layout.RowScope
import androidx.compose.runtime.Composable
import androidx.compose.runtime.ReadOnlyComposable
import androidx.compose.runtime.declared
import androidx.compose.ui.Modifier
import androidx.compose.ui.graphics.Color
import androidx.compose.ui.graphics.Shape

class ColorScheme(val secondaryContainer: Color, val surfaceVariant: Color, val error: Color)

class Shapes(val medium: Shape)

object MaterialTheme {
    val colorScheme: ColorScheme
        @Composable @ReadOnlyComposable
        get() = declared()

    val shapes: Shapes
        @Composable @ReadOnlyComposable
        get() = declared()
}

@Composable
fun MaterialTheme(content: @Composable () -> Unit): Unit = declared()

@Composable
fun Surface(modifier: Modifier, shape: Shape, color: Color, content: @Composable () -> Unit): Unit = declared()

@Composable
fun Text(text: String, modifier: Modifier = Modifier, color: Color = Color.Unspecified): Unit = declared()

@Composable
fun TextField(
    value: String,
    onValueChange: (String) -> Unit,
    modifier: Modifier = Modifier,
    placeholder: @Composable (() -> Unit)? = null,
): Unit = declared()

@Composable
fun Button(onClick: () -> Unit, enabled: Boolean = true, content: @Composable RowScope.() -> Unit): Unit = declared()
