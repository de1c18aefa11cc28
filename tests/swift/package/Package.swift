// swift-tools-version:5.9
import PackageDescription

let library: Target.Dependency = .product(name: "Mlcpipe", package: "Mlcpipe")
let package = Package(
  name: "MlcpipeTests",
  platforms: [.iOS(.v17)],
  dependencies: [.package(path: "../Mlcpipe")],
  targets: [
    .executableTarget(name: "Download", dependencies: [library]),
    .testTarget(name: "MlcpipeTests", dependencies: [library]),
  ]
)
