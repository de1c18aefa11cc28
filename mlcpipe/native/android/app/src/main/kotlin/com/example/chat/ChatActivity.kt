package com.example.chat

import ai.mlcpipe.Chat
import ai.mlcpipe.Chunk
import ai.mlcpipe.Mlcpipe
import ai.mlcpipe.MlcpipeException
import ai.mlcpipe.ModelCode
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
    private lateinit var said: TextView
    private lateinit var input: EditText
    private lateinit var button: Button
    private var model: Mlcpipe? = null
    private var chat: Chat? = null
    private var answer: Job? = null

    override fun onCreate(savedInstanceState: Bundle?) {
        super.onCreate(savedInstanceState)
        said = TextView(this).apply { setTextIsSelectable(true) }
        input = EditText(this).apply { hint = "Message" }
        button = Button(this).apply {
            isEnabled = false
            setOnClickListener { if (answer?.isActive == true) answer?.cancel() else send() }
        }
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
        showIdle()
        scope.launch { load() }
    }

    override fun onTrimMemory(level: Int) {
        super.onTrimMemory(level)
        val open = model ?: return
        scope.launch { reporting { open.trim() } }
    }

    override fun onDestroy() {
        scope.cancel()
        model?.close()
        super.onDestroy()
    }

    private suspend fun load() = reporting {
        val path = File(getExternalFilesDir(null), "model.mlcp").path
        val open = Mlcpipe.open(path, ModelCode.load("libmodel_@MODEL@.so"))
        model = open
        chat = open.chat()
        button.isEnabled = true
    }

    private fun send() {
        val text = input.text.toString()
        val open = chat
        if (text.isBlank() || open == null) return
        input.setText("")
        said.append("\n$text\n\n")
        button.text = "Stop"
        answer = scope.launch {
            try {
                reporting { open.send(text).collect { if (it is Chunk.Text) said.append(it.text) } }
            } finally {
                said.append("\n")
                showIdle()
            }
        }
    }

    private fun showIdle() {
        button.text = "Send"
    }

    private suspend fun reporting(work: suspend () -> Unit) =
        try {
            work()
        } catch (error: MlcpipeException) {
            said.append("\n${error.message}\n")
        }
}
