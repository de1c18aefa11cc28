import Mlcpipe
import SwiftUI

struct ChatView: View {
  let session: ChatSession
  @State private var text = ""

  var body: some View {
    NavigationStack {
      ScrollView {
        LazyVStack(alignment: .leading, spacing: 12) {
          ForEach(session.messages.indices, id: \.self) { MessageView(message: session.messages[$0]) }
        }
        .padding()
      }
      .defaultScrollAnchor(.bottom)
      .safeAreaInset(edge: .bottom) { entry }
      .navigationTitle("Chat")
      .toolbar {
        Button("New chat", systemImage: "square.and.pencil") { Task { await session.clear() } }
      }
    }
  }

  private var entry: some View {
    VStack(alignment: .leading) {
      StatusView(session: session)
      HStack {
        TextField("Message", text: $text, axis: .vertical)
          .textFieldStyle(.roundedBorder)
          .onSubmit(send)
        if session.state == .busy {
          Button("Stop", systemImage: "stop.circle.fill") { Task { await session.stop() } }
        } else {
          Button("Send", systemImage: "arrow.up.circle.fill", action: send)
            .disabled(text.isEmpty || !idle)
        }
      }
      .labelStyle(.iconOnly)
    }
    .padding()
    .background(.bar)
  }

  /// Whether a message would be taken.
  private var idle: Bool {
    switch session.state {
    case .ready, .dropped, .failed: return true
    default: return false
    }
  }

  private func send() {
    let message = text
    guard !message.isEmpty && idle else { return }
    text = ""
    Task { await session.send(message) }
  }
}

private struct MessageView: View {
  let message: Message

  var body: some View {
    Text(message.content)
      .textSelection(.enabled)
      .padding(10)
      .background(message.role == "user" ? Color.accentColor.opacity(0.2) : Color.gray.opacity(0.15))
      .clipShape(RoundedRectangle(cornerRadius: 12))
      .frame(maxWidth: .infinity, alignment: message.role == "user" ? .trailing : .leading)
  }
}

private struct StatusView: View {
  let session: ChatSession

  var body: some View {
    switch session.state {
    case .absent:
      Button("Download the model") { Task { await session.open() } }
    case .downloading(let bytes, let all):
      ProgressView(value: Double(bytes), total: Double(all))
    case .verifying, .loading:
      ProgressView()
    case .failed(let error):
      Text(error.localizedDescription).font(.footnote).foregroundStyle(.red)
    default:
      if let speed { Text(speed).font(.footnote).foregroundStyle(.secondary) }
    }
  }

  private var speed: String? {
    guard let found = session.statistics, found.decodeSeconds > 0 else { return nil }
    let rate = Double(found.completionTokens - 1) / found.decodeSeconds
    return "\(found.completionTokens) tokens, \(rate.formatted(.number.precision(.fractionLength(1)))) per second"
  }
}
