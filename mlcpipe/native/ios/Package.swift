// swift-tools-version:5.9
import PackageDescription

// XCFrameworks and Metal are for Apple's systems. Elsewhere the engine opens bundles that have a shared library.
#if os(macOS)
  let metal = @GPU@
  let code: [Target] = [.binaryTarget(name: "Model", path: "Model.xcframework")]
  let model: [Target.Dependency] = ["Model"]
#else
  let metal = false
  let code: [Target] = []
  let model: [Target.Dependency] = []
#endif

let metalSources: [String] = metal ? ["metal.mm"] : []
let metalSettings: [CXXSetting] = metal ? [.define("MLCPIPE_METAL")] : []
let frameworks: [LinkerSetting] = metal ? [.linkedFramework("Foundation"), .linkedFramework("Metal")] : []

let package = Package(
  name: "Mlcpipe",
  platforms: [.iOS(.v17)],
  products: [.library(name: "Mlcpipe", targets: ["Mlcpipe"])],
  targets: code + [
    .target(
      name: "CMlcpipe",
      sources: ["pool.c", "runtime.cc", "tvm.cc", "runtime/text"]
        + metalSources,
      cSettings: [.define("MLCPIPE_RUNTIME")],
      cxxSettings: [@INCLUDES@].map { .headerSearchPath($0) }
        + metalSettings,
      linkerSettings: frameworks),
    .target(name: "Mlcpipe", dependencies: ["CMlcpipe"] + model),
  ],
  cxxLanguageStandard: .cxx17
)
