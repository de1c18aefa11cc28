import Foundation
import XCTest

@testable import Mlcpipe

#if canImport(Glibc)
  import Glibc
#endif

/// What an app may do wrong, or find on its disk: an error with words, never a crash or a call that does not end.
final class BadInputTests: ModelTestCase {
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

  /// What is compiled for another version of the runtime.
  func testAnotherAbi() async throws {
    let text = String(decoding: try Data(contentsOf: expected.bundle.appendingPathComponent("mlcpipe.json")), as: UTF8.self)
    let hash = try XCTUnwrap(text.range(of: #""abi": *"[^"]+""#, options: .regularExpression))
    let other = try replaced(String(text[hash]), #""abi": "another""#)
    let error = await thrown { _ = try await self.open(other) }
    XCTAssertEqual(error?.code, .bundle)
    XCTAssertTrue(error?.found.contains("another") ?? false, error?.localizedDescription ?? "opened")
  }

  /// The plan says so before anything is loaded, and so does the engine.
  func testAModelWithoutMemoryForIt() async throws {
    let large = try changed("mlcpipe.json") {
      var manifest = try! JSONSerialization.jsonObject(with: $0) as! [String: Any]
      var plan = manifest["memory_plan"] as! [String: Any]
      plan["weights_bytes"] = 1 << 44
      manifest["memory_plan"] = plan
      return try! JSONSerialization.data(withJSONObject: manifest)
    }
    let plan = try Plan(data: large)
    XCTAssertTrue(!plan.fits && plan.weightsBytes == 1 << 44 && plan.freeBytes < 1 << 44)
    let error = await thrown { _ = try await self.open(large) }
    XCTAssertEqual(error?.code, .resource)
    XCTAssertTrue(error?.expected.contains("weights 16777216 MiB, KV cache") ?? false, error?.localizedDescription ?? "")
    XCTAssertNotEqual(error?.nextStep, "")
  }

  func testAChatThatFillsItsContext() async throws {
    let engine = try await open(nil, Options(contextLength: 128, threads: 1))
    var chat: [Message] = []
    let full = await thrown {
      while true {
        let asked = chat + [self.expected.messages[0]]
        let text = try await collected(engine.chat(asked, maxTokens: 16, sampling: .greedy)).map(\.text).joined()
        chat = asked + [Message(role: "assistant", content: text)]
      }
    }
    XCTAssertEqual(full?.code, .usage)
    XCTAssertEqual(full?.expected, "at most 128 tokens, prompt and answer")
    XCTAssertGreaterThan(chat.count, 2)
    let short = try await collected(engine.complete("Once", maxTokens: 2))
    XCTAssertEqual(short.last?.statistics?.completionTokens, 2)
  }

  func testWeightsThatAreRemovedWhileTheyAreUsed() async throws {
    let copy = try changed("tokenizer.json") { $0 }, engine = try await open(copy)
    _ = try await collected(engine.complete("Once", maxTokens: 2))  // the tokenizer is opened with the first text
    try FileManager.default.removeItem(at: copy)
    let question = Array(expected.messages.prefix(1))
    let tokens = try await collected(engine.chat(question, maxTokens: 60, sampling: .greedy)).flatMap(\.tokens)
    XCTAssertEqual(tokens, expected.answers[0])
    let again = await thrown { _ = try await self.open(copy) }
    XCTAssertEqual(again?.code, .bundle)
  }

  /// A file may have 1000 bytes, as where the disk has no more room: nothing is left of it, and the chat continues.
  func testADiskWithoutRoom() async throws {
    let engine = try await open(), file = folder.appendingPathComponent("chat")
    let question = Array(expected.messages.prefix(1))
    _ = try await collected(engine.chat(question, maxTokens: 4))
    var before = rlimit()
    XCTAssertEqual(getrlimit(__rlimit_resource_t(RLIMIT_FSIZE.rawValue), &before), 0)
    signal(SIGXFSZ, SIG_IGN)
    var small = rlimit(rlim_cur: 1000, rlim_max: before.rlim_max)
    XCTAssertEqual(setrlimit(__rlimit_resource_t(RLIMIT_FSIZE.rawValue), &small), 0)
    let full = await thrown { try await engine.save(question, to: file) }
    XCTAssertEqual(setrlimit(__rlimit_resource_t(RLIMIT_FSIZE.rawValue), &before), 0)
    XCTAssertEqual(full?.code, .resource)
    XCTAssertEqual(try FileManager.default.contentsOfDirectory(atPath: folder.path), [])
    try await engine.save(question, to: file)
    XCTAssertTrue(FileManager.default.fileExists(atPath: file.path))
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
