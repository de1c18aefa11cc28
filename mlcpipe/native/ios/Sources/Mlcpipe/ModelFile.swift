import CMlcpipe
import Foundation

/// The expected file of weights: its size, and the SHA-256 of each part, hexadecimal.
public struct ModelFile: Equatable, Sendable {
  public let name: String
  public let bytes: Int64
  /// Of each part but the last.
  public let partBytes: Int64
  public let sha256: [String]

  /// Reads `model.json`, which `mlcpipe package --app ios` writes beside a `model.mlcp`. Throws `bundle`.
  public init(json: Data) throws {
    struct Read: Decodable {
      let name: String
      let bytes, part_bytes: Int64
      let sha256: [String]
    }
    let read = try? JSONDecoder().decode(Read.self, from: json)
    guard let read, read.name.range(of: "^[A-Za-z0-9_][A-Za-z0-9_.-]*$", options: .regularExpression) != nil,
      read.bytes > 0, read.part_bytes > 0, read.sha256.count == (read.bytes - 1) / read.part_bytes + 1
    else { throw MlcpipeError(.bundle, "the list of a model's parts is damaged") }
    (name, bytes, partBytes, sha256) = (read.name, read.bytes, read.part_bytes, read.sha256)
  }

  /// The bytes of a part in the file.
  func range(of part: Int) -> Range<Int64> {
    let begin = Int64(part) * partBytes
    return begin..<begin + min(partBytes, bytes - begin)
  }

  /// Whether these bytes are that part.
  func isPart(_ part: Int, _ data: Data) -> Bool {
    var digits = [CChar](repeating: 0, count: 65)
    data.withUnsafeBytes { mlcpipe_sha256($0.baseAddress, $0.count, &digits) }
    return String(cString: digits) == sha256[part]
  }
}
