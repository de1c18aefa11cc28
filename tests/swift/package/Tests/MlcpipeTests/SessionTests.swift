import Foundation
import XCTest

@testable import Mlcpipe

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
    ChatSession(model: .file(data ?? expected.bundle), saved: saved, options: Options(threads: 1), sampling: .greedy)
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
}
