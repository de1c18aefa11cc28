import Foundation
import Observation

public enum ModelState: Equatable, Sendable {
  /// No memory is used: the next message opens the model.
  case unloaded
  case loading, ready, answering
  case failed(MlcpipeError)
}

/// Levels of `ProcessInfo.ThermalState`.
public enum Heat: Int, Sendable {
  case nominal, fair, serious, critical

  /// Threads that a device uses which has `full` of them when it is cool.
  func threads(of full: Int) -> Int {
    switch self {
    case .nominal, .fair: return full
    case .serious: return max(1, full / 2)
    case .critical: return 1
    }
  }
}

/// A chat for a user interface: messages, and a model that is opened for them and gives its memory back when it is told
/// to. What happens to the device comes as calls: `followDevice` makes them on iOS.
@MainActor @Observable
public final class ChatSession {
  public private(set) var messages: [Message] = []
  public private(set) var state = ModelState.unloaded
  /// Of the latest answer that ended by itself.
  public private(set) var statistics: Statistics?

  @ObservationIgnored private let data: URL
  @ObservationIgnored private let saved: URL
  @ObservationIgnored private let options: Options
  @ObservationIgnored private let sampling: Sampling
  @ObservationIgnored private var engine: MlcpipeEngine?
  @ObservationIgnored private var answer: Task<Void, Never>?
  @ObservationIgnored private var trimmed = false

  /// - Parameters:
  ///   - data: The file of data that `mlcpipe package` made.
  ///   - saved: Where the chat is saved, with its keys and values. The latest one continues.
  ///   - options: By default two threads: iPhones have two fast cores.
  public init(data: URL, saved: URL, options: Options = Options(threads: 2), sampling: Sampling = Sampling()) {
    (self.data, self.saved, self.options, self.sampling) = (data, saved, options, sampling)
  }

  /// Opens the model, and the saved chat if there is one.
  public func open() async {
    switch state {
    case .unloaded, .failed: break
    default: return
    }
    state = .loading
    do {
      let opened = try await MlcpipeEngine(data: data, options: options)
      engine = opened
      trimmed = false
      if FileManager.default.fileExists(atPath: saved.path) {
        await restore(with: opened)
      }
      state = .ready
    } catch {
      state = .failed(failure(error))
    }
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
    (state, statistics, trimmed) = (.answering, nil, false)
    messages.append(Message(role: "user", content: text))
    let prompt = messages
    messages.append(Message(role: "assistant", content: ""))
    let task = Task { await self.read(engine.chat(prompt, sampling: self.sampling)) }
    answer = task
    await task.value
    answer = nil
    if state == .answering { state = .ready }
  }

  private func read(_ stream: AsyncThrowingStream<Chunk, Error>) async {
    do {
      for try await chunk in stream {
        messages[messages.count - 1].content += chunk.text
        statistics = chunk.statistics
      }
    } catch {
      if !(error is CancellationError) { state = .failed(failure(error)) }
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
    guard let engine, !trimmed else { return await unload() }
    trimmed = true
    if state == .ready { try? await engine.trim() }
  }

  /// Saves the chat and gives all memory back; the next message opens the model again.
  public func unload() async {
    await stop()
    await save()
    await engine?.close()
    engine = nil
    if case .failed = state { return }
    state = .unloaded
  }

  /// Saves the chat, so that it continues when the app is opened again. Nothing while an answer is written.
  public func save() async {
    guard state == .ready, let engine, !messages.isEmpty else { return }
    try? await engine.save(messages, to: saved)
  }

  /// A device that is hot computes on fewer cores, also in the midst of an answer.
  public func heat(_ heat: Heat) throws {
    try MlcpipeEngine.setThreads(heat.threads(of: max(1, options.threads)))
  }

  private func failure(_ error: Error) -> MlcpipeError {
    error as? MlcpipeError ?? MlcpipeError(.internal, "the app failed", found: error.localizedDescription)
  }
}
