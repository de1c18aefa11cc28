import Foundation
import XCTest

@testable import Mlcpipe

#if canImport(FoundationNetworking)
  import FoundationNetworking
#endif

@MainActor
final class SessionTests: XCTestCase {
  var expected: Expected!
  var saved: URL!

  override func setUp() async throws {
    expected = try Expected.load()
    saved = FileManager.default.temporaryDirectory.appendingPathComponent(UUID().uuidString)
  }

  override func tearDown() async throws {
    try? FileManager.default.removeItem(at: saved)
  }

  func session(_ data: URL? = nil) -> ChatSession {
    session(.file(data ?? expected.bundle))
  }

  func session(_ model: ModelSource, contextLength: Int = 0) -> ChatSession {
    let options = Options(contextLength: contextLength, threads: 1)
    return ChatSession(model: model, saved: saved, options: options, sampling: .greedy)
  }

  func testAChatAnswersAsPythonDoes() async throws {
    let session = session()
    for (message, text) in zip(expected.messages, expected.texts) {
      await session.send(message.content)
      XCTAssertEqual(session.messages.last, Message(role: "assistant", content: text))
      XCTAssertEqual(session.state, .ready)
    }
    XCTAssertEqual(session.statistics?.completionTokens, expected.answers.last?.count)
  }

  func testMemoryWarningsTrimAndThenUnload() async throws {
    let session = session()
    await session.send(expected.messages[0].content)
    await session.memoryWarning()
    XCTAssertEqual(session.state, .ready)
    await session.memoryWarning()
    XCTAssertEqual(session.state, .dropped)
    XCTAssertTrue(FileManager.default.fileExists(atPath: saved.path))
    await session.send(expected.messages[1].content)  // opens the model and the chat again
    XCTAssertEqual(session.messages.last?.content, expected.texts[1])
    XCTAssertGreaterThan(try XCTUnwrap(session.statistics).cachedTokens, 0)
  }

  /// Another answer between the warnings: the first one counts for memory that was taken again.
  func testAnAnswerTakesMemoryAgain() async throws {
    let session = session()
    for message in expected.messages {
      await session.send(message.content)
      await session.memoryWarning()
      XCTAssertEqual(session.state, .ready)
    }
  }

  func testASavedChatIsThereWhenTheAppBeginsAgain() async throws {
    var session = session()
    await session.send(expected.messages[0].content)
    await session.save()
    let messages = session.messages
    session = self.session()
    await session.open()
    XCTAssertEqual(session.messages, messages)
    await session.clear()
    XCTAssertTrue(session.messages.isEmpty && !FileManager.default.fileExists(atPath: saved.path))
  }

  func testADamagedSavedChatIsDropped() async throws {
    try Data("damaged".utf8).write(to: saved)
    let session = session()
    await session.open()
    XCTAssertEqual(session.state, .ready)
    XCTAssertFalse(FileManager.default.fileExists(atPath: saved.path))
  }

  func testStopKeepsWhatIsWritten() async throws {
    let session = session()
    let sent = Task { await session.send(expected.messages[0].content) }
    while session.messages.last?.content.isEmpty ?? true { await Task.yield() }
    await session.stop()
    await sent.value
    XCTAssertEqual(session.state, .ready)
    XCTAssertTrue(expected.texts[0].hasPrefix(session.messages[1].content))
    await session.send(expected.messages[1].content)
    XCTAssertEqual(session.messages.count, 4)
  }

  func testAModelThatDoesNotOpenSaysWhy() async throws {
    let session = session(URL(fileURLWithPath: "/none"))
    await session.send("Hello")
    guard case .failed(let error) = session.state else { return XCTFail("\(session.state)") }
    XCTAssertEqual(error.code, .bundle)
    XCTAssertTrue(session.messages.isEmpty)
    await session.memoryWarning()
    XCTAssertEqual(session.state, .failed(error))
  }

  func testHeatTakesThreads() async throws {
    XCTAssertEqual([.nominal, .fair, .serious, .critical].map { (heat: Heat) in heat.threads(of: 4) }, [4, 4, 2, 1])
    XCTAssertEqual(Heat.serious.threads(of: 1), 1)
    try session().heat(.critical)
  }

  func testALoadThatEndedTheAppIsNotRepeatedUnasked() async throws {
    let marker = saved.appendingPathExtension("loading")
    try Data().write(to: marker)
    let session = session()
    await session.open()
    guard case .failed(let error) = session.state else { return XCTFail("\(session.state)") }
    XCTAssertEqual(error.code, .resource)
    await session.open()
    XCTAssertEqual(session.state, .ready)
    XCTAssertFalse(FileManager.default.fileExists(atPath: marker.path))
  }

  func testAMessageWithoutAnAnswerWasNotSaid() async throws {
    let session = session(.file(expected.bundle), contextLength: 64)
    await session.send(String(repeating: "word ", count: 100))
    guard case .failed(let error) = session.state else { return XCTFail("\(session.state)") }
    XCTAssertEqual(error.code, .usage)
    XCTAssertTrue(session.messages.isEmpty)
    await session.send(expected.messages[0].content)
    XCTAssertEqual(session.messages.count, 2)
    XCTAssertEqual(session.state, .ready)
  }

  /// Unloading ends the answer, and the chat with what there is of it is saved.
  func testUnloadDuringAnAnswerSavesTheChat() async throws {
    let session = session()
    let sent = Task { await session.send(expected.messages[0].content) }
    while session.messages.last?.content.isEmpty ?? true { await Task.yield() }
    await session.unload()
    await sent.value
    XCTAssertEqual(session.state, .dropped)
    XCTAssertTrue(FileManager.default.fileExists(atPath: saved.path))
  }

  func testAModelOfAHost() async throws {
    let folder = FileManager.default.temporaryDirectory.appendingPathComponent(UUID().uuidString)
    defer { try? FileManager.default.removeItem(at: folder) }
    let host = LocalHost(folder: folder)
    let model = ModelSource.host(host.file, URL(string: "http://localhost/data")!, ModelStore(folder: folder, transport: host))
    let session = session(model)
    XCTAssertEqual(session.state, .absent)
    let opened = Task { await session.open() }
    while await host.requests == 0 { await Task.yield() }
    XCTAssertEqual(session.state, .downloading(0, of: 10))
    opened.cancel()
    await opened.value
    XCTAssertEqual(session.state, .absent)
    await host.answer()
    await session.open()
    guard case .failed(let error) = session.state else { return XCTFail("\(session.state)") }
    XCTAssertEqual(error.code, .bundle)  // it came whole, and is no model
    XCTAssertEqual(try Data(contentsOf: folder.appendingPathComponent("data")), host.content)
  }
}

/// A host of ten bytes in parts of four, which answers when it is told to.
actor LocalHost: Transport {
  let content = Data("0123456789".utf8)
  let file: ModelFile
  private let folder: URL
  private(set) var requests = 0
  private var answers = false

  init(folder: URL) {
    let hashes = [
      "1be2e452b46d7a0d9656bbb1f768e8248eba1b75baed65f5d99eafa948899a6a",
      "db2e7f1bd5ab9968ae76199b7cc74795ca7404d5a08d78567715ce532f9d2669",
      "cd70bea023f752a0564abb6ed08d42c1440f2e33e29914e55e0be1595e24f45a",
    ]
    let parts: [String: Any] = ["name": "data", "bytes": 10, "part_bytes": 4, "sha256": hashes]
    file = try! ModelFile(json: JSONSerialization.data(withJSONObject: parts))
    self.folder = folder
  }

  func answer() { answers = true }

  func fetch(_ request: URLRequest, into name: String) async throws -> HTTPURLResponse {
    requests += 1
    while !answers { try await Task.sleep(nanoseconds: 1_000_000) }
    let range = request.value(forHTTPHeaderField: "Range")!.dropFirst(6).split(separator: "-").map { Int($0)! }
    try content[range[0]...range[1]].write(to: folder.appendingPathComponent(name))
    return HTTPURLResponse(url: request.url!, statusCode: 206, httpVersion: nil, headerFields: nil)!
  }
}
