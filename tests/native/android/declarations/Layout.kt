// What the app uses of Compose's layouts.
@file:Suppress("unused", "UNUSED_PARAMETER")

package androidx.compose.foundation.layout

import androidx.compose.runtime.Composable
import androidx.compose.runtime.declared
import androidx.compose.ui.Modifier
import androidx.compose.ui.unit.Dp

interface ColumnScope {
    fun Modifier.weight(weight: Float, fill: Boolean = true): Modifier
}

interface RowScope {
    fun Modifier.weight(weight: Float, fill: Boolean = true): Modifier
}

@Composable
fun Column(modifier: Modifier = Modifier, content: @Composable ColumnScope.() -> Unit): Unit = declared()

@Composable
fun Row(modifier: Modifier = Modifier, content: @Composable RowScope.() -> Unit): Unit = declared()

fun Modifier.fillMaxSize(fraction: Float = 1f): Modifier = declared()
fun Modifier.fillMaxWidth(fraction: Float = 1f): Modifier = declared()
fun Modifier.padding(all: Dp): Modifier = declared()
fun Modifier.safeDrawingPadding(): Modifier = declared()
