import CMlcpipe
import Foundation

enum Prompt {
  case chat(Data, variables: Data)
  case text(Data)
}

/// One answer: runs on its engine's queue, and is cancelled from any thread.
final class Answer: @unchecked Sendable {
  private enum State {
    case waiting, running, ended
  }

  private let prompt: Prompt
  private let maxTokens: Int
  private let sampling: Sampling
  private let stops: [String]
  private let continuation: AsyncThrowingStream<Chunk, Error>.Continuation
  private let lock = NSLock()
  private var state = State.waiting
  private var cancelled = false
  private var tokens: [Int32] = []  // of the callbacks, which run on one thread

  init(
    _ prompt: Prompt, _ maxTokens: Int, _ sampling: Sampling, _ stops: [String],
    _ continuation: AsyncThrowingStream<Chunk, Error>.Continuation
  ) {
    (self.prompt, self.maxTokens, self.sampling, self.stops) = (prompt, maxTokens, sampling, stops)
    self.continuation = continuation
  }

  /// Ends the answer, also in the midst of its prompt, or before it begins. No other call is disturbed.
  func cancel(_ engine: mlcpipe_engine) {
    lock.withLock {
      cancelled = true
      if state == .running { _ = mlcpipe_cancel(engine) }
    }
  }

  func run(_ engine: mlcpipe_engine) {
    let begins = lock.withLock {
      state = cancelled ? .ended : .running
      return !cancelled
    }
    guard begins else { return continuation.finish(throwing: CancellationError()) }
    var statistics = mlcpipe_statistics()
    statistics.size = MemoryLayout<mlcpipe_statistics>.size
    let result = Result { try generate(engine, &statistics) }
    lock.withLock { state = .ended }
    if case .success = result {
      continuation.yield(Chunk(text: "", tokens: taken(), statistics: Statistics(statistics)))
    }
    continuation.finish(throwing: result.error)
  }

  private func generate(_ engine: mlcpipe_engine, _ statistics: inout mlcpipe_statistics) throws {
    var request = mlcpipe_request()
    request.size = MemoryLayout<mlcpipe_request>.size
    request.max_tokens = Int64(maxTokens)
    request.context = Unmanaged.passUnretained(self).toOpaque()
    request.on_token = { Answer.of($0).take($1) }
    request.on_text = { Answer.of($0).show($1, $2) }
    let stopTexts = stops.map { Data($0.utf8) }
    try withUnsafePointer(to: sampling.native) { sampling in
      request.sampling = sampling
      try Answer.withTexts(stopTexts) { stops in
        (request.stops, request.stops_count) = (stops.baseAddress, stops.count)
        switch prompt {
        case .chat(let json, let variables):
          try json.withText { messages in
            try variables.withText { variables in
              (request.messages, request.variables) = (messages, variables)
              try MlcpipeError.check(mlcpipe_generate(engine, &request, &statistics))
            }
          }
        case .text(let data):
          try data.withText { text in
            request.text = text
            try MlcpipeError.check(mlcpipe_generate(engine, &request, &statistics))
          }
        }
      }
    }
  }

  private static func of(_ context: UnsafeMutableRawPointer?) -> Answer {
    Unmanaged<Answer>.fromOpaque(context!).takeUnretainedValue()
  }

  private func take(_ token: Int32) -> Int32 {
    tokens.append(token)
    return lock.withLock { cancelled ? 1 : 0 }
  }

  private func show(_ text: UnsafePointer<CChar>?, _ bytes: Int) -> Int32 {
    let piece = UnsafeRawBufferPointer(start: text, count: bytes)
    continuation.yield(Chunk(text: String(decoding: piece, as: UTF8.self), tokens: taken(), statistics: nil))
    return 0
  }

  private func taken() -> [Int32] {
    defer { tokens = [] }
    return tokens
  }

  /// Calls `body` with texts of the C API, which are valid until it returns.
  private static func withTexts(
    _ texts: [Data], _ made: [mlcpipe_text] = [], _ body: (UnsafeBufferPointer<mlcpipe_text>) throws -> Void
  ) throws {
    guard let first = texts.first else { return try made.withUnsafeBufferPointer(body) }
    try first.withText { try withTexts(Array(texts.dropFirst()), made + [$0], body) }
  }
}

extension Result {
  fileprivate var error: Failure? {
    if case .failure(let error) = self { return error }
    return nil
  }
}
