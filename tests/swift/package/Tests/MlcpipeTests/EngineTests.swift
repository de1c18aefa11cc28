import Foundation
import XCTest

@testable import Mlcpipe

/// What Python's engine answers, and where its bundle is: expected.json of test_package.py.
struct Expected: Decodable {
  let bundle: URL
  let messages: [Message]
  let answers: [[Int32]]
  let texts: [String]

  static func load() throws -> Expected {
    let path = ProcessInfo.processInfo.environment["MLCPIPE_EXPECTED"]!
    return try JSONDecoder().decode(Expected.self, from: Data(contentsOf: URL(fileURLWithPath: path)))
  }
}

func collected(_ stream: AsyncThrowingStream<Chunk, Error>) async throws -> [Chunk] {
  var chunks: [Chunk] = []
  for try await chunk in stream { chunks.append(chunk) }
  return chunks
}

func thrown(_ body: () async throws -> Void, file: StaticString = #filePath, line: UInt = #line) async -> MlcpipeError? {
  do {
    try await body()
  } catch {
    XCTAssertTrue(error is MlcpipeError, "\(error)", file: file, line: line)
    return error as? MlcpipeError
  }
  XCTFail("no error", file: file, line: line)
  return nil
}

/// Tests that open the model of Python's, with a folder for their files.
class ModelTestCase: XCTestCase {
  var expected: Expected!
  var folder: URL!

  override func setUpWithError() throws {
    expected = try Expected.load()
    folder = FileManager.default.temporaryDirectory.appendingPathComponent(UUID().uuidString)
    try FileManager.default.createDirectory(at: folder, withIntermediateDirectories: true)
  }

  override func tearDownWithError() throws {
    try FileManager.default.removeItem(at: folder)
  }

  func open(_ data: URL? = nil, _ options: Options = Options(threads: 1)) async throws -> MlcpipeEngine {
    try await MlcpipeEngine(data: data ?? expected.bundle, options: options)
  }
}

final class EngineTests: ModelTestCase {
  /// Turn by turn: the answer of each is in the prompt of the next.
  func testGreedyTokensAreThoseOfPython() async throws {
    let engine = try await open()
    var chat: [Message] = []
    for (turn, message) in expected.messages.enumerated() {
      chat.append(message)
      let chunks = try await collected(engine.chat(chat, maxTokens: 60, sampling: .greedy))
      XCTAssertEqual(chunks.flatMap(\.tokens), expected.answers[turn])
      XCTAssertEqual(chunks.map(\.text).joined(), expected.texts[turn])
      let statistics = try XCTUnwrap(chunks.last?.statistics)
      XCTAssertEqual(statistics.completionTokens, expected.answers[turn].count)
      XCTAssertEqual(statistics.cachedTokens > 0, turn > 0)
      chat.append(Message(role: "assistant", content: expected.texts[turn]))
    }
  }

  /// As the stream's end cancels it.
  func testACancelReachesTheAnswerUnderWay() async throws {
    let opened = try await OpenedEngine.open(expected.bundle.path, Options(threads: 1))
    var answer: Answer!
    let stream = AsyncThrowingStream<Chunk, Error> { continuation in
      answer = Answer(.text(Data("Once".utf8)), 400, Sampling(), [], continuation)
      opened.queue.async { [answer] in answer!.run(opened.handle) }
    }
    let error = await thrown {
      for try await _ in stream { answer.cancel(opened.handle) }
    }
    XCTAssertEqual(error?.code, .cancelled)
  }

  func testACancelledTaskEndsItsAnswer() async throws {
    let engine = try await open()
    let endless = engine.complete("Once", maxTokens: 400)
    let reader = Task {
      var tokens = 0
      for try await chunk in endless { tokens += chunk.tokens.count }
      return tokens
    }
    reader.cancel()
    let read = try await reader.value
    XCTAssertLessThan(read, 20)
    let chunks = try await collected(engine.chat(expected.messages, maxTokens: 2))  // the engine is free
    XCTAssertEqual(chunks.last?.statistics?.completionTokens, 2)
  }

  func testAnAnswerThatNobodyReadsEnds() async throws {
    let engine = try await open()
    for try await _ in engine.complete("Once", maxTokens: 400) { break }
    let chunks = try await collected(engine.complete("Once", maxTokens: 3))
    XCTAssertEqual(chunks.last?.statistics?.completionTokens, 3)
  }

  /// It waits for another answer: cancelled before it begins, it does not end that one.
  func testACancelledWaitingAnswerDisturbsNoOther() async throws {
    let engine = try await open()
    let first = engine.chat(Array(expected.messages.prefix(1)), maxTokens: 60, sampling: .greedy)
    let second = Task { try await collected(engine.complete("Once", maxTokens: 400)) }
    second.cancel()
    let chunks = try await collected(first)
    XCTAssertEqual(chunks.flatMap(\.tokens), expected.answers[0])
  }

  func testCloseEndsTheAnswerUnderWay() async throws {
    let engine = try await open()
    let stream = engine.complete("Once", maxTokens: 400)
    let error = await thrown {
      for try await _ in stream { await engine.close() }
    }
    XCTAssertEqual(error?.code, .cancelled)
    await engine.close()
    let late = await thrown { _ = try await collected(engine.complete("Once")) }
    XCTAssertEqual(late?.code, .usage)
    let trimmed = await thrown { try await engine.trim() }
    XCTAssertEqual(trimmed?.code, .usage)
  }

  func testErrorsSayWhatToDo() async throws {
    let missing = await thrown { _ = try await MlcpipeEngine(data: self.folder.appendingPathComponent("none")) }
    XCTAssertEqual(missing?.code, .bundle)
    XCTAssertTrue(missing?.place.hasSuffix("none") ?? false)
    XCTAssertEqual(missing?.errorDescription, missing?.localizedDescription)

    let cut = folder.appendingPathComponent("model.mlcp")
    try Data(repeating: 0, count: 5000).write(to: cut)
    let damaged = await thrown { _ = try await MlcpipeEngine(data: cut) }
    XCTAssertEqual(damaged?.code, .bundle)
    XCTAssertThrowsError(try Plan(data: cut))

    let variant = await thrown { _ = try await self.open(nil, Options(variant: "none")) }
    XCTAssertNotEqual(variant?.expected, "")
    let threads = await thrown { _ = try await self.open(nil, Options(threads: 1 << 40)) }
    XCTAssertEqual(threads?.code, .usage)

    let engine = try await open()
    let role = await thrown { _ = try await collected(engine.chat([])) }
    XCTAssertNotNil(role)
    var sampling = Sampling()
    sampling.temperature = -1
    let hot = await thrown { _ = try await collected(engine.complete("x", sampling: sampling)) }
    XCTAssertEqual(hot?.code, .usage)
    XCTAssertThrowsError(try MlcpipeEngine.setThreads(0))
    let long = await thrown { _ = try await collected(engine.complete(String(repeating: "word ", count: 100_000))) }
    XCTAssertEqual(long?.code, .usage)
  }

  func testASavedChatContinuesWithoutItsPrompt() async throws {
    let file = folder.appendingPathComponent("chat"), first = Array(expected.messages.prefix(1))
    var engine = try await open()
    let text = try await collected(engine.chat(first, maxTokens: 60, sampling: .greedy)).map(\.text).joined()
    let chat = first + [Message(role: "assistant", content: text)]
    try await engine.trim()
    try await engine.save(chat, to: file)
    await engine.close()

    engine = try await open()
    let restored = try await engine.restore(file)
    XCTAssertEqual(restored, chat)
    let chunks = try await collected(engine.chat(chat + [expected.messages[1]], maxTokens: 60, sampling: .greedy))
    XCTAssertEqual(chunks.flatMap(\.tokens), expected.answers[1])
    XCTAssertGreaterThan(try XCTUnwrap(chunks.last?.statistics).cachedTokens, 0)

    try Data("{}".utf8).write(to: file)
    let damaged = await thrown { _ = try await engine.restore(file) }
    XCTAssertEqual(damaged?.code, .usage)
  }

  /// The CPU has a name; a kind that the code is not for, and what is no kind, are refused in words.
  func testADevice() async throws {
    for device in [Device.auto, .cpu] {
      let engine = try await open(nil, Options(threads: 1, device: device, cache: folder))
      XCTAssertEqual(engine.device, .cpu)
      XCTAssertEqual(engine.deviceTitle, "")
    }
    let metal = await thrown { _ = try await self.open(nil, Options(device: .metal)) }
    XCTAssertEqual(metal?.code, .target)
    XCTAssertEqual(metal?.expected, "code for metal")
    let unknown = await thrown { _ = try await self.open(nil, Options(device: Device(rawValue: "toaster"))) }
    XCTAssertEqual(unknown?.code, .usage)
    XCTAssertEqual(unknown?.expected, "cpu, vulkan, metal or auto")
    XCTAssertEqual(unknown?.found, "toaster")
  }

  func testThePlanIsWhatIsOpened() async throws {
    let plan = try Plan(data: expected.bundle, options: Options(contextLength: 64))
    XCTAssertTrue(plan.fits && plan.weightsBytes > 0 && plan.freeBytes > plan.weightsBytes)
    let engine = try await open(nil, Options(contextLength: 64, threads: 1))
    XCTAssertEqual(engine.contextLength, plan.contextLength)
    XCTAssertEqual(plan.contextLength, 64)
    XCTAssertNotEqual(engine.variant, "")
  }
}
