// What Compose's compiler plugin makes of lambdas.
@file:Suppress("unused", "UNUSED_PARAMETER")

package androidx.compose.runtime.internal

import androidx.compose.runtime.Composable
import androidx.compose.runtime.Composer
import androidx.compose.runtime.declared

@Target(AnnotationTarget.CLASS)
@Retention(AnnotationRetention.BINARY)
annotation class StabilityInferred(val parameters: Int)

@Target(AnnotationTarget.FUNCTION)
@Retention(AnnotationRetention.BINARY)
annotation class FunctionKeyMeta(val key: Int, val startOffset: Int, val endOffset: Int)

interface ComposableLambda :
    Function2<Composer, Int, Any?>, Function3<Any?, Composer, Int, Any?>, Function4<Any?, Any?, Composer, Int, Any?>

fun composableLambda(composer: Composer, key: Int, tracked: Boolean, block: Any): ComposableLambda = declared()

fun composableLambdaInstance(key: Int, tracked: Boolean, block: Any): ComposableLambda = declared()

@Composable
fun rememberComposableLambda(key: Int, tracked: Boolean, block: Any): ComposableLambda = declared()
