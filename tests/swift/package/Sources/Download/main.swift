// Downloads a file: model.json, folder, URL, and what happens at the first part that is right beyond so many bytes:
// "end" of the process, "cancel" and once more. Prints a line of JSON for each download.
import Foundation
import Mlcpipe

let words = CommandLine.arguments
let file = try ModelFile(json: Data(contentsOf: URL(fileURLWithPath: words[1])))
let store = ModelStore(folder: URL(fileURLWithPath: words[2]))
let host = URL(string: words[3])!

final class Seen: @unchecked Sendable {
  private let lock = NSLock()
  private var bytes: [Int64] = []
  private var verified = false

  func add(_ state: ModelState) {
    lock.withLock {
      if case .downloading(let right, _) = state { bytes.append(right) }
      if state == .verifying { verified = true }
    }
  }

  func values() -> (progress: [Int64], verified: Bool) { lock.withLock { (bytes, verified) } }
}

@Sendable func download(_ onProgress: @escaping @Sendable (Int64) -> Void) async {
  let seen = Seen()
  var line: [String: Any] = ["code": 0]
  do {
    _ = try await store.download(file, from: host) {
      seen.add($0)
      if case .downloading(let bytes, _) = $0 { onProgress(bytes) }
    }
  } catch let error as MlcpipeError {
    line = ["code": error.code.rawValue, "line": error.localizedDescription]
  } catch {
    line = ["code": -1, "cancelled": error is CancellationError]
  }
  line["there"] = store.find(file) != nil
  line["progress"] = seen.values().progress
  line["verified"] = seen.values().verified
  print(String(decoding: try! JSONSerialization.data(withJSONObject: line), as: UTF8.self))
}

if words.count == 4 {
  await download { _ in }
} else if words[4] == "cancel" {
  let (begun, continuation) = AsyncStream.makeStream(of: Void.self)
  let task = Task { await download { if $0 > 0 { continuation.yield() } } }
  for await _ in begun { break }
  task.cancel()
  await task.value
  await download { _ in }
} else {
  let end = Int64(words[4])!
  await download { if $0 >= end { exit(0) } }
}
