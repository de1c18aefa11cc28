package com.example.chat

import ai.mlcpipe.ChatSession
import ai.mlcpipe.android.DeviceEvents
import android.os.Bundle
import androidx.activity.ComponentActivity
import androidx.activity.compose.setContent
import androidx.compose.material3.MaterialTheme
import java.io.File

/** A chat with the model in `model.mlcp`, which lies in the app's folder on the device's storage. */
class ChatActivity : ComponentActivity() {
    private lateinit var session: ChatSession
    private lateinit var events: DeviceEvents

    override fun onCreate(savedInstanceState: Bundle?) {
        super.onCreate(savedInstanceState)
        val weights = File(getExternalFilesDir(null), "model.mlcp")
        session = ChatSession(weights, File(filesDir, "chat"), "libmodel_@MODEL@.so")
        events = DeviceEvents(this, session)
        setContent { MaterialTheme { ChatScreen(session) } }
    }

    override fun onDestroy() {
        events.close()
        session.close()
        super.onDestroy()
    }
}
