import CMlcpipe
import Foundation

/// One message of a chat; `role` is one that the model's template knows, such as system, user and assistant.
public struct Message: Codable, Equatable, Sendable {
  public let role: String
  public var content: String

  public init(role: String, content: String) {
    (self.role, self.content) = (role, content)
  }
}

/// A piece of an answer. The last one has no text, and the statistics of all.
public struct Chunk: Equatable, Sendable {
  public let text: String
  /// Ids of the tokens since the last piece; the one that ended the answer is among them.
  public let tokens: [Int32]
  public let statistics: Statistics?
}

public struct Statistics: Equatable, Sendable {
  public enum Finish: Int32, Sendable {
    case stop = 1
    case length = 2
  }

  public let finish: Finish
  public let promptTokens: Int
  /// Of the prompt, which the KV cache held already.
  public let cachedTokens: Int
  public let completionTokens: Int
  /// Seconds until the first token.
  public let prefillSeconds: Double
  /// Seconds of all later tokens.
  public let decodeSeconds: Double

  init(_ taken: mlcpipe_statistics) {
    finish = Finish(rawValue: taken.finish) ?? .stop
    (promptTokens, cachedTokens) = (Int(taken.prompt_tokens), Int(taken.cached_tokens))
    completionTokens = Int(taken.completion_tokens)
    (prefillSeconds, decodeSeconds) = (taken.prefill_s, taken.decode_s)
  }
}

/// How tokens are drawn; a temperature of 0 takes the most probable one. Equal seeds draw equal tokens.
public struct Sampling: Equatable, Sendable {
  public var temperature: Double
  public var topP: Double
  public var minP: Double
  public var topK: Int
  public var repetitionPenalty: Double
  public var presencePenalty: Double
  public var frequencyPenalty: Double
  public var seed: UInt64

  /// The defaults of mlcpipe.
  public init() {
    var defaults = mlcpipe_sampling()
    defaults.size = MemoryLayout<mlcpipe_sampling>.size
    mlcpipe_default_sampling(&defaults)
    (temperature, topP, minP) = (defaults.temperature, defaults.top_p, defaults.min_p)
    (topK, repetitionPenalty) = (Int(defaults.top_k), defaults.repetition_penalty)
    (presencePenalty, frequencyPenalty) = (defaults.presence_penalty, defaults.frequency_penalty)
    seed = defaults.seed
  }

  public static var greedy: Sampling {
    var sampling = Sampling()
    sampling.temperature = 0
    return sampling
  }

  var native: mlcpipe_sampling {
    var made = mlcpipe_sampling()
    made.size = MemoryLayout<mlcpipe_sampling>.size
    (made.temperature, made.top_p, made.min_p) = (temperature, topP, minP)
    (made.top_k, made.repetition_penalty) = (Int64(topK), repetitionPenalty)
    (made.presence_penalty, made.frequency_penalty, made.seed) = (presencePenalty, frequencyPenalty, seed)
    return made
  }
}

/// A kind of device.
public struct Device: RawRepresentable, Hashable, Sendable {
  public let rawValue: String

  public init(rawValue: String) { self.rawValue = rawValue }

  /// The device that the model was compiled for.
  public static let auto = Device(rawValue: "auto")
  public static let cpu = Device(rawValue: "cpu")
  public static let metal = Device(rawValue: "metal")
}

/// How an engine is opened.
public struct Options: Equatable, Sendable {
  /// Of the kernels, such as "i8mm"; nil: the best that this machine can run.
  public var variant: String?
  /// Tokens of prompt and answer; 0: what the model allows and memory has room for.
  public var contextLength = 0
  /// 1 to 1024; 0: the fast cores.
  public var threads = 0
  /// One that the model was not compiled for, or that the package was built without, is an error.
  public var device = Device.auto
  /// A folder of the app's for what is learned of the GPU's driver; nil: each process learns it again.
  public var cache: URL?

  public init(
    variant: String? = nil, contextLength: Int = 0, threads: Int = 0, device: Device = .auto, cache: URL? = nil
  ) {
    (self.variant, self.contextLength, self.threads) = (variant, contextLength, threads)
    (self.device, self.cache) = (device, cache)
  }

  func native<Result>(_ body: (UnsafePointer<mlcpipe_options>) throws -> Result) throws -> Result {
    var made = mlcpipe_options()
    made.size = MemoryLayout<mlcpipe_options>.size
    made.context_length = Int64(contextLength)
    guard let threads = Int32(exactly: threads) else {
      throw MlcpipeError(.usage, "threads", expected: "1 to 1024", found: "\(threads)")
    }
    made.threads = threads
    made.code = mlcpipe_model_code()
    return try (variant ?? "").withCString { variant in
      try device.rawValue.withCString { device in
        try (cache?.path ?? "").withCString { cache in
          (made.variant, made.device, made.cache) = (variant, device, cache)
          return try body(&made)
        }
      }
    }
  }
}

/// Bytes that a model takes, and that can be had.
public struct Plan: Equatable, Sendable {
  /// Mapped: shared with the system's cache of files.
  public let weightsBytes: Int64
  public let kvBytes: Int64
  /// At most.
  public let workspaceBytes: Int64
  public let freeBytes: Int64
  /// Tokens that an engine would take.
  public let contextLength: Int
  /// Whether an engine would open.
  public let fits: Bool

  /// Reads the manifest of the data, nothing else.
  public init(data: URL, options: Options = Options()) throws {
    var plan = mlcpipe_plan_info()
    plan.size = MemoryLayout<mlcpipe_plan_info>.size
    try options.native { try MlcpipeError.check(mlcpipe_plan(data.path, $0, &plan)) }
    (weightsBytes, kvBytes, workspaceBytes) = (plan.weights_bytes, plan.kv_bytes, plan.workspace_bytes)
    (freeBytes, contextLength, fits) = (plan.free_bytes, Int(plan.context_length), plan.fits != 0)
  }
}
