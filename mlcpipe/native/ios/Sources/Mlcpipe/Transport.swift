import Foundation

#if canImport(FoundationNetworking)
  import FoundationNetworking
#endif

/// Brings what a host has into files of one folder, perhaps also while the app does not run.
public protocol Transport: Sendable {
  /// Requests a body, or waits for it where an earlier process requested it, and puts it into the file `name` if the
  /// answer is 200 or 206. Throws what ended the connection, `MlcpipeError` for a disk, and CancellationError.
  func fetch(_ request: URLRequest, into name: String) async throws -> HTTPURLResponse
}

/// Downloads of a `URLSession`. In a background session the system continues them while the app is suspended, or was
/// ended to free memory, and starts it when they have ended.
public final class DownloadTransport: NSObject, Transport, URLSessionDownloadDelegate, @unchecked Sendable {
  private let folder: URL
  private let lock = NSLock()
  private var session: URLSession!
  private var waiting: [String: CheckedContinuation<HTTPURLResponse, Error>] = [:]
  private var tasks: [String: URLSessionTask] = [:]
  private var problems: [String: MlcpipeError] = [:]
  private var listeners: [CheckedContinuation<Void, Never>] = []

  /// - Parameter background: The session's name, one for each folder; nil: transfers end with the process.
  public init(folder: URL, background: String? = nil) {
    self.folder = folder
    super.init()
    var configuration = URLSessionConfiguration.default
    #if canImport(UIKit)
      if let background { configuration = .background(withIdentifier: background) }
    #endif
    configuration.requestCachePolicy = .reloadIgnoringLocalCacheData
    configuration.urlCache = nil
    session = URLSession(configuration: configuration, delegate: self, delegateQueue: nil)
  }

  public func fetch(_ request: URLRequest, into name: String) async throws -> HTTPURLResponse {
    let under = await session.tasksUnderWay().first { $0.taskDescription == name }
    return try await withTaskCancellationHandler {
      do {
        return try await withCheckedThrowingContinuation { begin(request, name, under, $0) }
      } catch {
        try Task.checkCancellation()
        throw error
      }
    } onCancel: {
      lock.withLock { tasks[name] }?.cancel()
    }
  }

  private func begin(
    _ request: URLRequest, _ name: String, _ under: URLSessionTask?,
    _ continuation: CheckedContinuation<HTTPURLResponse, Error>
  ) {
    let task = under ?? session.downloadTask(with: request)
    task.taskDescription = name
    lock.withLock { (waiting[name], tasks[name]) = (continuation, task) }
    task.resume()
    if Task.isCancelled { task.cancel() }  // before `onCancel` knew of it
  }

  public func urlSession(_ session: URLSession, downloadTask: URLSessionDownloadTask, didFinishDownloadingTo file: URL) {
    guard let name = downloadTask.taskDescription, let response = downloadTask.response as? HTTPURLResponse,
      [200, 206].contains(response.statusCode)
    else { return }
    let target = folder.appendingPathComponent(name)
    do {
      try? FileManager.default.removeItem(at: target)
      try FileManager.default.moveItem(at: file, to: target)
    } catch {
      let problem = MlcpipeError(.resource, "cannot write", place: target.path, found: error.localizedDescription)
      lock.withLock { problems[name] = problem }
    }
  }

  public func urlSession(_ session: URLSession, task: URLSessionTask, didCompleteWithError error: Error?) {
    guard let name = task.taskDescription else { return }
    let (continuation, problem) = lock.withLock {
      tasks[name] = nil
      return (waiting.removeValue(forKey: name), problems.removeValue(forKey: name))
    }
    if let response = task.response as? HTTPURLResponse, error == nil, problem == nil {
      continuation?.resume(returning: response)
    } else {
      continuation?.resume(throwing: problem ?? error ?? URLError(.badServerResponse))
    }
  }

  #if canImport(UIKit)
    /// Returns when the transfers are in their files that ended while the app did not run: what `backgroundTask` waits for.
    public func finishEvents() async {
      await withCheckedContinuation { continuation in lock.withLock { listeners.append(continuation) } }
    }

    public func urlSessionDidFinishEvents(forBackgroundURLSession session: URLSession) {
      let finished = lock.withLock {
        defer { listeners = [] }
        return listeners
      }
      for continuation in finished { continuation.resume() }
    }
  #endif
}

extension URLSession {
  fileprivate func tasksUnderWay() async -> [URLSessionTask] {
    await withCheckedContinuation { continuation in getAllTasks { continuation.resume(returning: $0) } }
  }
}
