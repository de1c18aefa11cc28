import CMlcpipe
import Foundation

/// A model that is open. Its calls run one after the other, on a thread of their own; `close` ends the running one.
public actor MlcpipeEngine {
  private nonisolated let opened: OpenedEngine
  /// Tokens of prompt and answer.
  public nonisolated let contextLength: Int
  /// Of the kernels that run.
  public nonisolated let variant: String
  /// The device that computes.
  public nonisolated let device: Device
  /// The GPU, "" for the CPU.
  public nonisolated let deviceTitle: String

  /// Opens the file of data that `mlcpipe package` made; its code is in the app.
  public init(data: URL, options: Options = Options()) async throws {
    let opened = try await OpenedEngine.open(data.path, options)
    var info = mlcpipe_engine_info()
    info.size = MemoryLayout<mlcpipe_engine_info>.size
    try MlcpipeError.check(mlcpipe_info(opened.handle, &info))
    contextLength = Int(info.context_length)
    (variant, deviceTitle) = (String(cString: info.variant), String(cString: info.device_title))
    device = Device(rawValue: String(cString: info.device))
    self.opened = opened
  }

  /// Answers a chat, of which only what is new is computed. The answer begins at once, and ends within a token when the
  /// task that reads it is cancelled or the stream has no owner; then the stream ends without an error.
  ///
  /// - Parameters:
  ///   - maxTokens: Of the answer; 0: what the context has room for.
  ///   - stops: Texts that end the answer and are not shown.
  ///   - variables: JSON, an object with more variables of the model's template: tools, documents, …
  public nonisolated func chat(
    _ messages: [Message], maxTokens: Int = 0, sampling: Sampling = Sampling(), stops: [String] = [],
    variables: Data = Data()
  ) -> AsyncThrowingStream<Chunk, Error> {
    do {
      let json = try JSONEncoder().encode(messages)
      return stream(.chat(json, variables: variables), maxTokens, sampling, stops)
    } catch {
      return AsyncThrowingStream { $0.finish(throwing: error) }
    }
  }

  /// Continues a text; control tokens that it names are control tokens.
  public nonisolated func complete(
    _ text: String, maxTokens: Int = 0, sampling: Sampling = Sampling(), stops: [String] = []
  ) -> AsyncThrowingStream<Chunk, Error> {
    stream(.text(Data(text.utf8)), maxTokens, sampling, stops)
  }

  private nonisolated func stream(_ prompt: Prompt, _ maxTokens: Int, _ sampling: Sampling, _ stops: [String])
    -> AsyncThrowingStream<Chunk, Error>
  {
    AsyncThrowingStream { continuation in
      let answer = Answer(prompt, maxTokens, sampling, stops, continuation)
      continuation.onTermination = { [opened] _ in answer.cancel(opened.handle) }
      opened.queue.async { [opened] in answer.run(opened.handle) }
    }
  }

  /// Forgets all prompts and answers.
  public func reset() async throws {
    try await opened.call { mlcpipe_reset($0) }
  }

  /// Gives memory back to the system that the next answer takes again.
  public func trim() async throws {
    try await opened.call { mlcpipe_trim($0) }
  }

  /// Saves the last prompt and answer with their keys and values, and the messages, as a whole or not at all.
  public func save(_ messages: [Message], to file: URL) async throws {
    let json = try JSONEncoder().encode(["messages": messages])
    try await opened.call { handle in
      json.withText { mlcpipe_save(handle, file.path, $0) }
    }
  }

  /// Continues a saved chat without computing its prompt again, and gives its messages.
  public func restore(_ file: URL) async throws -> [Message] {
    let saved = SavedChat()
    try await opened.call { handle in
      mlcpipe_restore(
        handle, file.path,
        { context, text, bytes in
          let saved = Unmanaged<SavedChat>.fromOpaque(context!).takeUnretainedValue()
          saved.json = Data(bytes: text!, count: bytes)
          return 0
        }, Unmanaged.passUnretained(saved).toOpaque())
    }
    guard !saved.json.isEmpty else { return [] }
    return try JSONDecoder().decode([String: [Message]].self, from: saved.json)["messages"] ?? []
  }

  /// Ends the running call, and gives all memory back when it has ended. Later calls throw `usage`.
  public func close() {
    opened.close()
  }

  /// Threads of the kernels of all engines of this app: 1 to 1024. Also between the tokens of an answer.
  public static func setThreads(_ threads: Int) throws {
    guard let count = Int32(exactly: threads) else {
      throw MlcpipeError(.usage, "threads", expected: "1 to 1024", found: "\(threads)")
    }
    try MlcpipeError.check(mlcpipe_set_threads(count))
  }

  /// Of the app: the system ends one that uses Metal in the background. Metal has ended what it computed when this
  /// returns; what needs it, also `save`, throws `target` until the app is back.
  public static func setBackground(_ background: Bool) throws {
    try MlcpipeError.check(mlcpipe_set_background(background ? 1 : 0))
  }
}

/// A handle of the C API with the queue of its calls, which block: they may not run on the threads of Swift's tasks.
final class OpenedEngine: Sendable {
  let handle: mlcpipe_engine
  let queue: DispatchQueue

  private init(_ handle: mlcpipe_engine, _ queue: DispatchQueue) {
    (self.handle, self.queue) = (handle, queue)
  }

  deinit { close() }

  func close() { _ = mlcpipe_close(handle) }

  static func open(_ path: String, _ options: Options) async throws -> OpenedEngine {
    let queue = DispatchQueue(label: "mlcpipe", qos: .userInitiated)
    return try await OpenedEngine(
      run(on: queue) {
        var handle: mlcpipe_engine = 0
        try options.native { try MlcpipeError.check(mlcpipe_open(path, $0, &handle)) }
        return handle
      }, queue)
  }

  /// Runs a call of the C API. Throws its error.
  func call(_ body: @escaping @Sendable (mlcpipe_engine) -> Int32) async throws {
    try await OpenedEngine.run(on: queue) { [self] in try MlcpipeError.check(body(handle)) }
  }

  private static func run<Result: Sendable>(on queue: DispatchQueue, _ body: @escaping @Sendable () throws -> Result)
    async throws -> Result
  {
    try await withCheckedThrowingContinuation { continuation in
      queue.async { continuation.resume(with: Swift.Result { try body() }) }
    }
  }
}

/// A callback of `mlcpipe_restore` fills this before that returns.
private final class SavedChat: @unchecked Sendable {
  var json = Data()
}

extension Data {
  /// Calls `body` with these bytes as a text of the C API.
  func withText<Result>(_ body: (mlcpipe_text) throws -> Result) rethrows -> Result {
    try withUnsafeBytes { bytes in
      try body(mlcpipe_text(data: bytes.bindMemory(to: CChar.self).baseAddress, bytes: bytes.count))
    }
  }
}
