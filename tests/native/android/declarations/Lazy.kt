// What the app uses of Compose's lists.
@file:Suppress("unused", "UNUSED_PARAMETER")

package androidx.compose.foundation.lazy

import androidx.compose.runtime.Composable
import androidx.compose.runtime.declared
import androidx.compose.ui.Modifier

interface LazyItemScope

interface LazyListScope

@Composable
fun LazyColumn(modifier: Modifier = Modifier, content: LazyListScope.() -> Unit): Unit = declared()

fun <T> LazyListScope.items(items: List<T>, itemContent: @Composable LazyItemScope.(T) -> Unit): Unit = declared()
