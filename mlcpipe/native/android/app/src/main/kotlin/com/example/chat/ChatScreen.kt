package com.example.chat

import ai.mlcpipe.ChatSession
import ai.mlcpipe.Chunk
import ai.mlcpipe.Message
import ai.mlcpipe.MlcpipeException
import ai.mlcpipe.ModelState
import androidx.compose.foundation.layout.Column
import androidx.compose.foundation.layout.Row
import androidx.compose.foundation.layout.fillMaxSize
import androidx.compose.foundation.layout.fillMaxWidth
import androidx.compose.foundation.layout.padding
import androidx.compose.foundation.layout.safeDrawingPadding
import androidx.compose.foundation.lazy.LazyColumn
import androidx.compose.foundation.lazy.items
import androidx.compose.foundation.text.selection.SelectionContainer
import androidx.compose.material3.Button
import androidx.compose.material3.MaterialTheme
import androidx.compose.material3.Surface
import androidx.compose.material3.Text
import androidx.compose.material3.TextField
import androidx.compose.runtime.Composable
import androidx.compose.runtime.LaunchedEffect
import androidx.compose.runtime.collectAsState
import androidx.compose.runtime.getValue
import androidx.compose.runtime.mutableStateOf
import androidx.compose.runtime.remember
import androidx.compose.runtime.rememberCoroutineScope
import androidx.compose.runtime.setValue
import androidx.compose.ui.Modifier
import androidx.compose.ui.unit.dp
import kotlinx.coroutines.Job
import kotlinx.coroutines.flow.collect
import kotlinx.coroutines.launch

/** Messages with the running answer, what the model does, and the entry of the next message. */
@Composable
fun ChatScreen(session: ChatSession) {
    val scope = rememberCoroutineScope()
    val state by session.state.collectAsState()
    var messages by remember { mutableStateOf(emptyList<Message>()) }
    var failure by remember { mutableStateOf("") }
    var answer by remember { mutableStateOf<Job?>(null) }

    fun run(work: suspend () -> Unit): Job = scope.launch {
        try {
            failure = ""
            work()
        } catch (error: MlcpipeException) {
            failure = listOf(error.message, error.nextStep).filterNot { it.isNullOrEmpty() }.joinToString("; ")
        } finally {
            messages = session.messages
        }
    }

    fun send(text: String) {
        answer = run {
            val asked = session.messages + Message("user", text)
            var written = ""
            messages = asked
            session.send(text).collect {
                if (it is Chunk.Text) {
                    written += it.text
                    messages = asked + Message("assistant", written)
                }
            }
        }
    }

    LaunchedEffect(session) { run { session.open() } }
    Column(Modifier.fillMaxSize().safeDrawingPadding().padding(12.dp)) {
        LazyColumn(Modifier.weight(1f)) { items(messages) { MessageView(it) } }
        StateView(state, failure) { run { session.open(again = true) } }
        Entry(state, onSend = { send(it) }, onStop = { answer?.cancel() })
    }
}

@Composable
private fun MessageView(message: Message) {
    val colors = MaterialTheme.colorScheme
    val color = if (message.role == "user") colors.secondaryContainer else colors.surfaceVariant
    Surface(Modifier.fillMaxWidth().padding(4.dp), shape = MaterialTheme.shapes.medium, color = color) {
        SelectionContainer { Text(message.content, Modifier.padding(10.dp)) }
    }
}

@Composable
private fun StateView(state: ModelState, failure: String, onLoad: () -> Unit) {
    val words = when (state) {
        is ModelState.Downloading -> "${100 * state.bytes / state.totalBytes} % of the model have come"
        is ModelState.Verifying -> "${100 * state.bytes / state.totalBytes} % of the model are checked"
        ModelState.Absent -> "The model is not there"
        ModelState.Loading -> "The model is loaded"
        else -> ""
    }
    if (words.isNotEmpty()) Text(words)
    if (failure.isNotEmpty()) Text(failure, color = MaterialTheme.colorScheme.error)
    if (state is ModelState.Failed) Button(onClick = onLoad) { Text("Load again") }
}

@Composable
private fun Entry(state: ModelState, onSend: (String) -> Unit, onStop: () -> Unit) {
    var text by remember { mutableStateOf("") }
    Row(Modifier.fillMaxWidth()) {
        TextField(text, onValueChange = { text = it }, Modifier.weight(1f), placeholder = { Text("Message") })
        if (state == ModelState.Busy) {
            Button(onClick = onStop) { Text("Stop") }
        } else {
            val ready = state == ModelState.Ready || state == ModelState.Dropped
            val send = {
                onSend(text)
                text = ""
            }
            Button(onClick = send, enabled = ready && text.isNotBlank()) { Text("Send") }
        }
    }
}
