import Foundation

#if canImport(FoundationNetworking)
  import FoundationNetworking
#endif

/// Files of weights in a folder. A download continues where it ended, also in another process: the parts that are there are
/// checked and kept, and the file gets its name when all are right.
public actor ModelStore {
  public nonisolated let folder: URL
  private let transport: Transport
  private var busy: Set<String> = []

  /// - Parameter transport: By default transfers that end with the process.
  public init(folder: URL, transport: Transport? = nil) {
    self.folder = folder
    self.transport = transport ?? DownloadTransport(folder: folder)
  }

  /// The file if it is there.
  public nonisolated func find(_ file: ModelFile) -> URL? {
    let url = folder.appendingPathComponent(file.name)
    return Download.size(of: url) == file.bytes ? url : nil
  }

  /// Downloads the file unless it is there. `report` gets `verifying`, and `downloading` with the bytes that are right.
  ///
  /// Throws `network`, `resource` where the disk has no room, `bundle` where the host has another file, `usage` where
  /// another call downloads it, and CancellationError.
  public func download(
    _ file: ModelFile, from url: URL, report: @escaping @Sendable (ModelState) -> Void = { _ in }
  ) async throws -> URL {
    if let found = find(file) { return found }
    guard busy.insert(file.name).inserted else { throw MlcpipeError(.usage, "the model is downloaded by another call") }
    defer { busy.remove(file.name) }
    return try await Download(file, url, folder, transport, report).run()
  }

  /// Removes the file, and what was downloaded of it.
  public func remove(_ file: ModelFile) throws {
    guard !busy.contains(file.name) else { throw MlcpipeError(.usage, "the model is downloaded by another call") }
    for name in try FileManager.default.contentsOfDirectory(atPath: folder.path)
    where name == file.name || name.hasPrefix("\(file.name).part") {
      try FileManager.default.removeItem(at: folder.appendingPathComponent(name))
    }
  }
}

/// One download: a file with all parts at their places, and a file for each part that comes.
private actor Download {
  private static let attempts = 4
  private static let pauseNanoseconds: UInt64 = 200_000_000
  private static let refusals = [400, 401, 403, 404, 410]

  private let file: ModelFile
  private let url: URL
  private let folder: URL
  private let transport: Transport
  private let report: @Sendable (ModelState) -> Void
  private var missing: [Int]
  private var tag: String?
  private var handle = FileHandle.nullDevice

  init(
    _ file: ModelFile, _ url: URL, _ folder: URL, _ transport: Transport, _ report: @escaping @Sendable (ModelState) -> Void
  ) {
    (self.file, self.url, self.folder, self.transport, self.report) = (file, url, folder, transport, report)
    missing = Array(file.sha256.indices)
  }

  static func size(of url: URL) -> Int64? {
    try? (FileManager.default.attributesOfItem(atPath: url.path)[.size] as? NSNumber)?.int64Value
  }

  func run() async throws -> URL {
    let unfinished = place("part"), finished = folder.appendingPathComponent(file.name)
    do {
      try FileManager.default.createDirectory(at: folder, withIntermediateDirectories: true)
      if Download.size(of: unfinished) == nil { try Data().write(to: unfinished) }
      handle = try FileHandle(forUpdating: unfinished)
      defer { try? handle.close() }
      try verify()
      try checkRoom()
      try await transfer()
      try handle.truncate(atOffset: UInt64(file.bytes))
      try handle.synchronize()
      try FileManager.default.moveItem(at: unfinished, to: finished)
      try exclude(finished)
    } catch let error where !(error is MlcpipeError || error is CancellationError) {
      throw MlcpipeError(.resource, "cannot write", place: unfinished.path, found: error.localizedDescription)
    }
    for part in file.sha256.indices { try? FileManager.default.removeItem(at: place("part\(part)")) }
    return finished
  }

  private func place(_ suffix: String) -> URL {
    folder.appendingPathComponent("\(file.name).\(suffix)")
  }

  /// Keeps the parts that are right, of this file and of those that came while no process ran.
  private func verify() throws {
    report(.verifying)
    let kept = try Data(contentsOf: place("part"), options: .alwaysMapped)
    for part in missing {
      try Task.checkCancellation()
      let range = file.range(of: part)
      if kept.count >= range.upperBound && file.isPart(part, kept[Int(range.lowerBound)..<Int(range.upperBound)]) {
        missing.removeAll { $0 == part }
      } else if Download.size(of: place("part\(part)")) != nil {
        try take(part)
      }
    }
  }

  private func checkRoom() throws {
    let needed = missing.reduce(0) { $0 + Int64(file.range(of: $1).count) }
    let found = try FileManager.default.attributesOfFileSystem(forPath: folder.path)[.systemFreeSize] as? NSNumber
    guard let free = found?.int64Value, free < needed else { return }
    throw MlcpipeError(
      .resource, "the disk has no room for the model", place: folder.path, expected: "\(needed) bytes",
      found: "\(free) bytes free")
  }

  /// The first part says whether the host knows ranges: one that does not sends all parts. The others are requested at
  /// once, so that the system can bring them while the app is suspended.
  private func transfer() async throws {
    report(downloading())
    if let first = missing.first { try await bring(first) }
    try await withThrowingTaskGroup(of: Void.self) { group in
      for part in missing { group.addTask { try await self.bring(part) } }
      while try await group.next() != nil {
        if missing.isEmpty { group.cancelAll() }
      }
    }
  }

  private func bring(_ part: Int) async throws {
    var failures = 0, wrong = 0
    while missing.contains(part) {
      do {
        let response = try await transport.fetch(request(part), into: place("part\(part)").lastPathComponent)
        guard try accept(response) else { throw URLError(.badServerResponse) }
        if missing.contains(part) { try take(part) }
        guard missing.contains(part) else { break }
        wrong += 1
        if wrong == Download.attempts {
          throw MlcpipeError(
            .bundle, "the host has another file than the app expects", place: url.absoluteString, found: "part \(part)")
        }
      } catch is CancellationError {
        if missing.contains(part) { throw CancellationError() }
      } catch let error where !(error is MlcpipeError) {
        failures += 1
        if failures == Download.attempts { throw failed(error.localizedDescription) }
        try await Task.sleep(nanoseconds: Download.pauseNanoseconds << UInt64(failures))
      }
    }
  }

  private func request(_ part: Int) -> URLRequest {
    var request = URLRequest(url: url, timeoutInterval: 30)
    let range = file.range(of: part)
    request.setValue("bytes=\(range.lowerBound)-\(range.upperBound - 1)", forHTTPHeaderField: "Range")
    request.setValue("identity", forHTTPHeaderField: "Accept-Encoding")
    if let tag { request.setValue(tag, forHTTPHeaderField: "If-Range") }
    return request
  }

  /// Whether there is a body. Throws where there never will be.
  private func accept(_ response: HTTPURLResponse) throws -> Bool {
    let status = response.statusCode
    if Download.refusals.contains(status) { throw failed("status \(status)") }
    guard status == 200 || status == 206 else { return false }
    tag = response.value(forHTTPHeaderField: "ETag").flatMap { $0.hasPrefix("W/") ? nil : $0 }
    return true
  }

  /// Writes what came for a part to its place if it is right; a host that ignores ranges sent all parts.
  private func take(_ part: Int) throws {
    let came = place("part\(part)")
    defer { try? FileManager.default.removeItem(at: came) }
    guard let data = try? Data(contentsOf: came, options: .alwaysMapped) else { return }
    let whole = data.count == Int(file.bytes)
    for part in whole ? missing : [part] {
      let range = file.range(of: part), begin = whole ? Int(range.lowerBound) : 0
      guard data.count >= begin + range.count else { return }
      let content = data[begin..<begin + range.count]
      guard file.isPart(part, content) else { continue }
      try handle.seek(toOffset: UInt64(range.lowerBound))
      try handle.write(contentsOf: content)
      missing.removeAll { $0 == part }
      report(downloading())
    }
  }

  private func downloading() -> ModelState {
    .downloading(file.bytes - missing.reduce(0) { $0 + Int64(file.range(of: $1).count) }, of: file.bytes)
  }

  private func failed(_ found: String) -> MlcpipeError {
    MlcpipeError(
      .network, "the download failed", place: url.absoluteString, found: found, nextStep: "try again later")
  }

  /// From backups, which have no room for what can be downloaded again.
  private func exclude(_ finished: URL) throws {
    #if canImport(UIKit)
      var url = finished, values = URLResourceValues()
      values.isExcludedFromBackup = true
      try url.setResourceValues(values)
    #endif
  }
}
