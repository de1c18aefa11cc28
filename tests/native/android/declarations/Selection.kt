// What the app uses of text that can be selected.
@file:Suppress("unused", "UNUSED_PARAMETER")

package androidx.compose.foundation.text.selection

import androidx.compose.runtime.Composable
import androidx.compose.runtime.declared
import androidx.compose.ui.Modifier

@Composable
fun SelectionContainer(modifier: Modifier = Modifier, content: @Composable () -> Unit): Unit = declared()
