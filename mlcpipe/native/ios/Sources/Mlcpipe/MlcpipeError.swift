import CMlcpipe
import Foundation

/// An error: what failed and, if known, else "": where, what was expected, what was found, and the next step.
public struct MlcpipeError: LocalizedError, Equatable, Sendable {
  public enum Code: Int32, Sendable {
    /// An argument that cannot be honoured, an engine that is closed or in use.
    case usage = 1
    /// Of a model that is not known.
    case config, tokenizer, template
    /// Data that is broken, altered or made for other code.
    case bundle
    /// Not enough memory, or no room on the disk.
    case resource
    /// Code for another machine.
    case target
    /// The model computed NaN or infinity.
    case compute
    case cancelled, `internal`
    /// A server or the connection to it.
    case network
  }

  public let code: Code
  public let what: String
  public let place: String
  public let expected: String
  public let found: String
  public let nextStep: String

  public init(
    _ code: Code, _ what: String, place: String = "", expected: String = "", found: String = "", nextStep: String = ""
  ) {
    (self.code, self.what, self.place) = (code, what, place)
    (self.expected, self.found, self.nextStep) = (expected, found, nextStep)
  }

  /// All parts as one line.
  public var errorDescription: String? {
    let parts = [
      what, place.isEmpty ? "" : "in \(place)", expected.isEmpty ? "" : "expected \(expected)",
      found.isEmpty ? "" : "found \(found)", nextStep,
    ]
    return parts.filter { !$0.isEmpty }.joined(separator: "; ")
  }

  /// Throws the error of a call of this thread that gave `code`, unless that is MLCPIPE_OK.
  static func check(_ code: Int32) throws {
    guard code != 0 else { return }
    var error = mlcpipe_error()
    error.size = MemoryLayout<mlcpipe_error>.size
    mlcpipe_last_error(&error)
    func text(_ words: UnsafePointer<CChar>?) -> String { words.map { String(cString: $0) } ?? "" }
    throw MlcpipeError(
      Code(rawValue: code) ?? .internal, text(error.what), place: text(error.where), expected: text(error.expected),
      found: text(error.found), nextStep: text(error.next_step))
  }
}
