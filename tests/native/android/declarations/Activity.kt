// What the app uses of androidx.activity.
@file:Suppress("unused", "UNUSED_PARAMETER")

package androidx.activity

open class ComponentActivity : android.app.Activity()
