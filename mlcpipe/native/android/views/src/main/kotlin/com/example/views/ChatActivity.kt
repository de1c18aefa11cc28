package com.example.views

import ai.mlcpipe.ChatSession
import ai.mlcpipe.Chunk
import ai.mlcpipe.MlcpipeException
import ai.mlcpipe.ModelState
import ai.mlcpipe.android.DeviceEvents
import android.app.Activity
import android.os.Bundle
import android.widget.Button
import android.widget.EditText
import android.widget.LinearLayout
import android.widget.ScrollView
import android.widget.TextView
import java.io.File
import kotlinx.coroutines.CoroutineScope
import kotlinx.coroutines.Job
import kotlinx.coroutines.MainScope
import kotlinx.coroutines.cancel
import kotlinx.coroutines.flow.collect
import kotlinx.coroutines.launch

/** A chat with the model in `model.mlcp`, which lies in the app's folder on the device's storage. */
class ChatActivity : Activity() {
    private val scope: CoroutineScope = MainScope()
    private lateinit var session: ChatSession
    private lateinit var events: DeviceEvents
    private lateinit var said: TextView
    private lateinit var input: EditText
    private lateinit var button: Button
    private var answer: Job? = null

    override fun onCreate(savedInstanceState: Bundle?) {
        super.onCreate(savedInstanceState)
        val weights = File(getExternalFilesDir(null), "model.mlcp")
        session = ChatSession(weights, File(filesDir, "chat"), "libmodel_@MODEL@.so")
        events = DeviceEvents(this, session)
        said = TextView(this).apply { setTextIsSelectable(true) }
        input = EditText(this).apply { hint = "Message" }
        button = Button(this).apply { setOnClickListener { if (answer?.isActive == true) answer?.cancel() else act() } }
        setContentView(
            LinearLayout(this).apply {
                orientation = LinearLayout.VERTICAL
                fitsSystemWindows = true
                val rest = LinearLayout.LayoutParams(LinearLayout.LayoutParams.MATCH_PARENT, 0, 1f)
                addView(ScrollView(context).apply { addView(said) }, rest)
                addView(input)
                addView(button)
            },
        )
        scope.launch { session.state.collect { show(it) } }
        scope.launch {
            reporting { session.open() }
            for (message in session.messages) said.append("\n${message.content}\n")
        }
    }

    override fun onStop() {
        super.onStop()
        scope.launch { reporting { session.save() } }
    }

    override fun onDestroy() {
        scope.cancel()
        events.close()
        session.close()
        super.onDestroy()
    }

    private fun show(state: ModelState) {
        button.isEnabled = state != ModelState.Loading
        button.text = when (state) {
            ModelState.Busy -> "Stop"
            ModelState.Loading -> "Loading"
            is ModelState.Failed -> "Load again"
            else -> "Send"
        }
    }

    private fun act() {
        if (session.state.value is ModelState.Failed) {
            scope.launch { reporting { session.open(again = true) } }
            return
        }
        val text = input.text.toString()
        if (text.isBlank()) return
        input.setText("")
        said.append("\n$text\n\n")
        answer = scope.launch {
            reporting { session.send(text).collect { if (it is Chunk.Text) said.append(it.text) } }
            said.append("\n")
        }
    }

    private suspend fun reporting(work: suspend () -> Unit) =
        try {
            work()
        } catch (error: MlcpipeException) {
            said.append("\n${listOf(error.message, error.nextStep).filterNot { it.isNullOrEmpty() }.joinToString("; ")}\n")
        }
}
