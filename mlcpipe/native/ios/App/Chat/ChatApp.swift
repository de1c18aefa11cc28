import Mlcpipe
import SwiftUI

/// Where the weights are if `model.mlcp` is not in the app; `model.json` is, with what they must be.
private let host = URL(string: "https://example.com/model.mlcp")!
private let downloads = "ai.mlcpipe.downloads"

@main
struct ChatApp: App {
  @Environment(\.scenePhase) private var phase
  @State private var session: ChatSession
  private let transport: DownloadTransport

  var body: some Scene {
    WindowGroup {
      ChatView(session: session)
        .task { if session.state == .dropped { await session.open() } }
        .task { await session.followDevice() }
    }
    .onChange(of: phase) {
      switch phase {
      case .background: Task { await session.enterBackground() }
      case .active: session.leaveBackground()
      default: break
      }
    }
    .backgroundTask(.urlSession(downloads)) { [transport] in await transport.finishEvents() }
  }

  init() {
    let folder = URL.applicationSupportDirectory
    try? FileManager.default.createDirectory(at: folder, withIntermediateDirectories: true)
    transport = DownloadTransport(folder: folder, background: downloads)
    let model = ChatApp.model(ModelStore(folder: folder, transport: transport))
    _session = State(initialValue: ChatSession(model: model, saved: folder.appending(path: "chat")))
  }

  private static func model(_ store: ModelStore) -> ModelSource {
    func resource(_ suffix: String) -> URL? { Bundle.main.url(forResource: "model", withExtension: suffix) }
    if let data = resource("mlcp") { return .file(data) }
    guard let json = resource("json"), let text = try? Data(contentsOf: json), let file = try? ModelFile(json: text) else {
      fatalError("the app has neither model.mlcp nor model.json")
    }
    return .host(file, host, store)
  }
}
