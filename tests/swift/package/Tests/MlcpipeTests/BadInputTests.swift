import Foundation
import XCTest

@testable import Mlcpipe

#if canImport(Glibc)
  import Glibc
#endif

/// What an app may do wrong, or find on its disk: an error with words, never a crash or a call that does not end.
final class BadInputTests: XCTestCase {
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

  /// A copy of the bundle, in which one file is changed.
  func changed(_ name: String, _ change: (Data) -> Data?) throws -> URL {
    let copy = folder.appendingPathComponent(UUID().uuidString), file = copy.appendingPathComponent(name)
    try FileManager.default.copyItem(at: expected.bundle, to: copy)
    let content = change(try Data(contentsOf: file))
    try FileManager.default.removeItem(at: file)
    try content?.write(to: file)
    return copy
  }

  func replaced(_ old: String, _ new: String) throws -> URL {
    try changed("mlcpipe.json") {
      let text = String(decoding: $0, as: UTF8.self)
      XCTAssertTrue(text.contains(old), old)
      return Data(text.replacingOccurrences(of: old, with: new).utf8)
    }
  }

  func testBundlesThatAreNotWhatTheyWere() async throws {
    let flipped = { (data: Data) in data.prefix(200) + [data[200] ^ 1] + data.dropFirst(201) }
    let bundles = [
      try changed("mlcpipe.json") { $0.prefix($0.count / 2) },
      try changed("mlcpipe.json") { _ in Data() },
      try changed("params_shard_0.bin") { _ in nil },
      try changed("params_shard_0.bin") { $0.prefix($0.count - 1) },
      try changed("tokenizer.bin", flipped),
      try changed("template.bin", flipped),
    ]
    for bundle in bundles {
      let error = await thrown { _ = try await self.open(bundle) }
      XCTAssertEqual(error?.code, .bundle, error?.localizedDescription ?? "opened")
      XCTAssertNotEqual(error?.place, "")
    }
    let machine = await thrown { _ = try await self.open(try self.replaced("x86_64", "aarch64")) }
    XCTAssertTrue([.bundle, .target].contains(machine?.code), machine?.localizedDescription ?? "opened")
  }

  func testFilesThatAreNone() async throws {
    let pipe = folder.appendingPathComponent("pipe")
    XCTAssertEqual(mkfifo(pipe.path, 0o600), 0)
    for url in [pipe, URL(fileURLWithPath: "/dev/null"), folder!] {
      let error = await thrown { _ = try await self.open(url) }
      XCTAssertEqual(error?.code, .bundle, url.path)
    }
    let engine = try await open()
    let restored = await thrown { _ = try await engine.restore(pipe) }
    XCTAssertEqual(restored?.code, .usage)
    let saved = await thrown { try await engine.save([], to: URL(fileURLWithPath: "/dev/full/chat")) }
    XCTAssertNotEqual(saved?.what, "")
  }

  func testAnswersThatDoNotFit() async throws {
    let context = await thrown { _ = try await self.open(nil, Options(contextLength: 1 << 40)) }
    XCTAssertNotEqual(context?.expected, "")
    let engine = try await open(nil, Options(contextLength: 64, threads: 1))
    let full = await thrown {
      _ = try await collected(engine.complete(String(repeating: "word ", count: 70), maxTokens: 1))
    }
    XCTAssertEqual(full?.code, .usage)
    let prompt = String(repeating: "word ", count: 2_000_000)  // 10 MB
    let long = await thrown { _ = try await collected(engine.complete(prompt)) }
    XCTAssertEqual(long?.code, .usage)
    let odd = try await collected(engine.complete("\0\u{FFFD}\u{10FFFF}🏳️‍🌈", maxTokens: 2))
    XCTAssertEqual(odd.last?.statistics?.completionTokens, 2)
    let json = await thrown { _ = try await collected(engine.chat([], variables: Data([0xff, 0xfe]))) }
    XCTAssertNotNil(json)
  }

  func testTasksTakeTurns() async throws {
    let engine = try await open()
    let question = Array(expected.messages.prefix(1))
    try await withThrowingTaskGroup(of: [Int32].self) { group in
      for _ in 0..<4 {
        group.addTask { try await collected(engine.chat(question, maxTokens: 60, sampling: .greedy)).flatMap(\.tokens) }
      }
      for try await tokens in group { XCTAssertEqual(tokens, expected.answers[0]) }
    }
    for try await _ in engine.chat(question, maxTokens: 60, sampling: .greedy) {  // a call while its answer is read
      let inner = try await collected(engine.complete("Once", maxTokens: 2))
      XCTAssertEqual(inner.last?.statistics?.completionTokens, 2)
      break
    }
  }

  func testEveryCallAfterCloseSaysSo() async throws {
    let engine = try await open()
    await withTaskGroup(of: Void.self) { group in
      for _ in 0..<8 { group.addTask { await engine.close() } }
    }
    let calls: [() async throws -> Void] = [
      { try await engine.reset() }, { try await engine.trim() },
      { try await engine.save([], to: self.folder.appendingPathComponent("chat")) },
      { _ = try await engine.restore(self.folder.appendingPathComponent("chat")) },
      { _ = try await collected(engine.chat(self.expected.messages)) },
      { _ = try await collected(engine.complete("Once")) },
    ]
    for call in calls {
      let error = await thrown(call)
      XCTAssertEqual(error?.code, .usage)
      XCTAssertTrue(error?.found.contains("closed") ?? false, error?.localizedDescription ?? "")
    }
  }

  /// Each answer ends, with its engine or before it.
  func testCloseWhileSeveralTasksRead() async throws {
    for _ in 0..<5 {
      let engine = try await open()
      let readers = (0..<3).map { _ in Task { try await collected(engine.complete("Once", maxTokens: 400)) } }
      readers[2].cancel()
      await Task.yield()
      await engine.close()
      for reader in readers {
        if case .failure(let error) = await reader.result {
          XCTAssertTrue([.cancelled, .usage].contains((error as? MlcpipeError)?.code), "\(error)")
        }
      }
    }
  }
}
