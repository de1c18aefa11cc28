import Foundation

public enum ModelState: Equatable, Sendable {
  /// The file of data is not there.
  case absent
  /// The part of the file that is there is compared with the expected hashes.
  case verifying
  /// Bytes that are right.
  case downloading(Int64, of: Int64)
  case loading, ready
  /// An answer is written.
  case busy
  /// No memory is used: the next message opens the model.
  case dropped
  case failed(MlcpipeError)
}

/// Where a session's file of data is.
public enum ModelSource: Sendable {
  case file(URL)
  /// A host, and the store that the file is downloaded to.
  case host(ModelFile, URL, ModelStore)

  /// Where the file is or will be.
  var url: URL {
    switch self {
    case .file(let url): return url
    case .host(let file, _, let store): return store.folder.appendingPathComponent(file.name)
    }
  }

  /// The file if it is there as a whole.
  var found: URL? {
    if case .host(let file, _, let store) = self { return store.find(file) }
    return FileManager.default.fileExists(atPath: url.path) ? url : nil
  }
}

/// Levels of `ProcessInfo.ThermalState`.
public enum Heat: Int, Sendable {
  case nominal, fair, serious, critical

  /// Threads that a device uses which has `full` of them when it is cool.
  func threads(of full: Int) -> Int {
    switch self {
    case .nominal, .fair: return full
    case .serious: return max(1, full / 2)
    case .critical: return 1
    }
  }
}
