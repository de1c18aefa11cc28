import Mlcpipe
import SwiftUI

@main
struct ChatApp: App {
  @Environment(\.scenePhase) private var phase
  @State private var session = ChatSession(
    data: Bundle.main.url(forResource: "model", withExtension: "mlcp") ?? URL(fileURLWithPath: "model.mlcp"),
    saved: URL.applicationSupportDirectory.appending(path: "chat"))

  var body: some Scene {
    WindowGroup {
      ChatView(session: session)
        .task { await session.open() }
        .task { await session.followDevice() }
    }
    .onChange(of: phase) {
      if phase == .background { Task { await session.save() } }
    }
  }

  init() {
    try? FileManager.default.createDirectory(at: .applicationSupportDirectory, withIntermediateDirectories: true)
  }
}
