// What the app uses of androidx.activity's Compose.
@file:Suppress("unused", "UNUSED_PARAMETER")

package androidx.activity.compose

import androidx.activity.ComponentActivity
import androidx.compose.runtime.Composable
import androidx.compose.runtime.declared

fun ComponentActivity.setContent(content: @Composable () -> Unit): Unit = declared()
