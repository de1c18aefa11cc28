// The functions of Compose's runtime that its compiler plugin calls in the app's functions, and that the app calls.
@file:Suppress("unused", "UNUSED_PARAMETER")

package androidx.compose.runtime

import kotlin.reflect.KProperty
import kotlinx.coroutines.CoroutineScope
import kotlinx.coroutines.flow.StateFlow

@Target(
    AnnotationTarget.FUNCTION, AnnotationTarget.TYPE, AnnotationTarget.TYPE_PARAMETER, AnnotationTarget.PROPERTY_GETTER,
)
@Retention(AnnotationRetention.BINARY)
annotation class Composable

@Target(AnnotationTarget.FUNCTION, AnnotationTarget.TYPE, AnnotationTarget.PROPERTY_GETTER)
@Retention(AnnotationRetention.BINARY)
annotation class ComposableTarget(val applier: String)

@Target(AnnotationTarget.FUNCTION, AnnotationTarget.TYPE, AnnotationTarget.PROPERTY_GETTER)
@Retention(AnnotationRetention.BINARY)
annotation class ComposableInferredTarget(val scheme: String)

@Target(AnnotationTarget.FUNCTION, AnnotationTarget.TYPE, AnnotationTarget.PROPERTY_GETTER)
@Retention(AnnotationRetention.BINARY)
annotation class ComposableOpenTarget(val index: Int)

@Target(AnnotationTarget.FUNCTION, AnnotationTarget.PROPERTY_GETTER)
@Retention(AnnotationRetention.BINARY)
annotation class ReadOnlyComposable

@Target(AnnotationTarget.TYPE)
@Retention(AnnotationRetention.BINARY)
annotation class DisallowComposableCalls

@Target(AnnotationTarget.FUNCTION, AnnotationTarget.PROPERTY_GETTER)
@Retention(AnnotationRetention.BINARY)
annotation class NonRestartableComposable

@Target(AnnotationTarget.FUNCTION, AnnotationTarget.PROPERTY_GETTER)
@Retention(AnnotationRetention.BINARY)
annotation class NonSkippableComposable

@Target(AnnotationTarget.FUNCTION, AnnotationTarget.PROPERTY_GETTER)
@Retention(AnnotationRetention.BINARY)
annotation class ExplicitGroupsComposable

@Target(AnnotationTarget.CLASS, AnnotationTarget.FUNCTION, AnnotationTarget.PROPERTY_GETTER, AnnotationTarget.PROPERTY)
@Retention(AnnotationRetention.BINARY)
annotation class Stable

@Target(AnnotationTarget.CLASS)
@Retention(AnnotationRetention.BINARY)
annotation class Immutable

object ComposeVersion {
    const val version: Int = 12000
}

interface ScopeUpdateScope {
    fun updateScope(block: (Composer, Int) -> Unit)
}

interface Composer {
    val skipping: Boolean
    val inserting: Boolean
    val defaultsInvalid: Boolean
    val currentMarker: Int

    fun startReplaceableGroup(key: Int)
    fun endReplaceableGroup()
    fun startReplaceGroup(key: Int)
    fun endReplaceGroup()
    fun startMovableGroup(key: Int, dataKey: Any?)
    fun endMovableGroup()
    fun startRestartGroup(key: Int): Composer
    fun endRestartGroup(): ScopeUpdateScope?
    fun startDefaults()
    fun endDefaults()
    fun skipToGroupEnd()
    fun skipCurrentGroup()
    fun deactivateToEndGroup(changed: Boolean)
    fun endToMarker(marker: Int)
    fun joinKey(left: Any?, right: Any?): Any
    fun shouldExecute(parametersChanged: Boolean, flags: Int): Boolean
    fun changed(value: Any?): Boolean
    fun changed(value: Boolean): Boolean
    fun changed(value: Char): Boolean
    fun changed(value: Byte): Boolean
    fun changed(value: Short): Boolean
    fun changed(value: Int): Boolean
    fun changed(value: Float): Boolean
    fun changed(value: Long): Boolean
    fun changed(value: Double): Boolean
    fun changedInstance(value: Any?): Boolean
    fun rememberedValue(): Any?
    fun updateRememberedValue(value: Any?)
    fun sourceInformation(sourceInformation: String)
    fun sourceInformationMarkerStart(key: Int, sourceInformation: String)
    fun sourceInformationMarkerEnd()

    companion object {
        val Empty: Any = Any()
    }
}

fun sourceInformation(composer: Composer, sourceInformation: String): Unit = declared()
fun sourceInformationMarkerStart(composer: Composer, key: Int, sourceInformation: String): Unit = declared()
fun sourceInformationMarkerEnd(composer: Composer): Unit = declared()
fun isTraceInProgress(): Boolean = declared()
fun traceEventStart(key: Int, dirty1: Int, dirty2: Int, info: String): Unit = declared()
fun traceEventEnd(): Unit = declared()
fun updateChangedFlags(flags: Int): Int = declared()
inline fun <T> Composer.cache(invalid: Boolean, block: () -> T): T = block()

interface State<out T> {
    val value: T
}

interface MutableState<T> : State<T> {
    override var value: T
}

operator fun <T> State<T>.getValue(owner: Any?, property: KProperty<*>): T = value

operator fun <T> MutableState<T>.setValue(owner: Any?, property: KProperty<*>, value: T) {
    this.value = value
}

fun <T> mutableStateOf(value: T): MutableState<T> = declared()

@Composable
inline fun <T> remember(calculation: @DisallowComposableCalls () -> T): T = calculation()

@Composable
inline fun <T> remember(key1: Any?, calculation: @DisallowComposableCalls () -> T): T = calculation()

@Composable
inline fun <T> remember(key1: Any?, key2: Any?, calculation: @DisallowComposableCalls () -> T): T = calculation()

@Composable
inline fun <T> remember(key1: Any?, key2: Any?, key3: Any?, calculation: @DisallowComposableCalls () -> T): T =
    calculation()

@Composable
inline fun <T> remember(vararg keys: Any?, calculation: @DisallowComposableCalls () -> T): T = calculation()

@Composable
fun rememberCoroutineScope(): CoroutineScope = declared()

@Composable
fun <T> StateFlow<T>.collectAsState(): State<T> = declared()

@Composable
fun LaunchedEffect(key: Any?, block: suspend CoroutineScope.() -> Unit): Unit = declared()

fun declared(): Nothing = error("declared only")
