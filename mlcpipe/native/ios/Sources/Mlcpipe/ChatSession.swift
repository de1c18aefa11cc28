import Foundation
import Observation

/// A chat for a user interface: messages, and a model that is opened for them and gives its memory back when it is told
/// to. What happens to the device comes as calls: `followDevice` makes them on iOS.
@MainActor @Observable
public final class ChatSession {
  public private(set) var messages: [Message] = []
  public private(set) var state: ModelState
  /// Of the latest answer that was not cancelled.
  public private(set) var statistics: Statistics?

  @ObservationIgnored private let model: ModelSource
  @ObservationIgnored private let saved: URL
  @ObservationIgnored private let options: Options
  @ObservationIgnored private let sampling: Sampling
  @ObservationIgnored private var engine: MlcpipeEngine?
  @ObservationIgnored private var answer: Task<Void, Never>?
  @ObservationIgnored private var trimmed = false

  /// - Parameters:
  ///   - model: The file of data that `mlcpipe package` made, or its host.
  ///   - saved: Where the chat is saved, with its keys and values. The latest one continues.
  ///   - options: By default two threads: iPhones have two fast cores.
  public init(model: ModelSource, saved: URL, options: Options = Options(threads: 2), sampling: Sampling = Sampling()) {
    (self.model, self.saved, self.options, self.sampling) = (model, saved, options, sampling)
    state = model.found == nil ? .absent : .dropped
  }

  /// Opens the model, and the saved chat if there is one; downloads the model first where it is absent. A download ends
  /// when its task is cancelled, and the next one continues it.
  public func open() async {
    switch state {
    case .absent, .dropped, .failed: break
    default: return
    }
    do {
      if engine == nil { try await load(await data()) }
      state = .ready
    } catch is CancellationError {
      state = model.found == nil ? .absent : .dropped
    } catch {
      state = .failed(failure(error))
    }
  }

  private func data() async throws -> URL {
    guard case .host(let file, let host, let store) = model else { return model.url }
    state = .verifying
    let (states, continuation) = AsyncStream.makeStream(of: ModelState.self)
    let download = Task {
      defer { continuation.finish() }
      return try await store.download(file, from: host) { continuation.yield($0) }
    }
    return try await withTaskCancellationHandler {
      for await shown in states { state = shown }
      return try await download.value
    } onCancel: {
      download.cancel()
    }
  }

  /// Where the system ended the app while it loaded the model, the next call says so and does not load: an app that loads
  /// at its start would never start again.
  private func load(_ data: URL) async throws {
    state = .loading
    let marker = saved.appendingPathExtension("loading"), files = FileManager.default
    defer { try? files.removeItem(at: marker) }
    if files.fileExists(atPath: marker.path) {
      throw MlcpipeError(
        .resource, "the app ended while it loaded the model", nextStep: "close other apps, then load it again")
    }
    _ = files.createFile(atPath: marker.path, contents: nil)
    let opened = try await MlcpipeEngine(data: data, options: options)
    (engine, trimmed) = (opened, false)
    if files.fileExists(atPath: saved.path) { await restore(with: opened) }
  }

  /// A chat that cannot be read is dropped: it is computed again where its messages are known.
  private func restore(with engine: MlcpipeEngine) async {
    if let restored = try? await engine.restore(saved) {
      if messages.isEmpty { messages = restored }
    } else {
      try? FileManager.default.removeItem(at: saved)
    }
  }

  /// Adds a message, and its answer as it is written; opens the model first where needed. Returns when the answer ended.
  public func send(_ text: String) async {
    guard answer == nil else { return }
    await open()
    guard state == .ready, let engine else { return }
    (state, statistics, trimmed) = (.busy, nil, false)
    messages.append(Message(role: "user", content: text))
    let prompt = messages
    messages.append(Message(role: "assistant", content: ""))
    let task = Task { await self.read(engine.chat(prompt, sampling: self.sampling)) }
    answer = task
    await task.value
  }

  private func read(_ stream: AsyncThrowingStream<Chunk, Error>) async {
    defer {
      answer = nil
      if state == .busy { state = .ready }
    }
    do {
      for try await chunk in stream {
        messages[messages.count - 1].content += chunk.text
        statistics = chunk.statistics
      }
    } catch {
      if error is CancellationError { return }
      state = .failed(failure(error))
      if messages.last?.content.isEmpty ?? false { messages.removeLast(2) }  // nothing was answered
    }
  }

  /// Ends the answer that is being written, and keeps what there is of it.
  public func stop() async {
    answer?.cancel()
    await answer?.value
  }

  /// Begins another chat.
  public func clear() async {
    await stop()
    messages = []
    try? FileManager.default.removeItem(at: saved)
    try? await engine?.reset()
  }

  /// The system wants memory: at first what can be had again, and the next time all.
  public func memoryWarning() async {
    guard let engine else { return }
    if trimmed { return await unload() }
    trimmed = true
    if state == .ready { try? await engine.trim() }
  }

  /// Saves the chat and gives all memory back; the next message opens the model again.
  public func unload() async {
    guard let engine else { return }
    await stop()
    await save()
    await engine.close()
    self.engine = nil
    if case .failed = state { return }
    state = .dropped
  }

  /// Saves the chat, so that it continues when the app is opened again. Nothing while an answer is written.
  public func save() async {
    guard state == .ready, let engine, !messages.isEmpty else { return }
    try? await engine.save(messages, to: saved)
  }

  /// The app goes to the background: saves the chat. An answer continues there on the CPU; on the GPU it ends, and its text so
  /// far is kept.
  public func enterBackground() async {
    if let engine, engine.device != .cpu { await stop() }
    await save()
    try? MlcpipeEngine.setBackground(true)
  }

  /// The app is back.
  public func leaveBackground() {
    try? MlcpipeEngine.setBackground(false)
  }

  /// A device that is hot computes on fewer cores, also in the midst of an answer.
  public func heat(_ heat: Heat) throws {
    try MlcpipeEngine.setThreads(heat.threads(of: max(1, options.threads)))
  }

  private func failure(_ error: Error) -> MlcpipeError {
    error as? MlcpipeError ?? MlcpipeError(.internal, "the app failed", found: error.localizedDescription)
  }
}
