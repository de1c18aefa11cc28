// swift-tools-version:5.9
import PackageDescription

let package = Package(
  name: "MlcpipeTests",
  platforms: [.iOS(.v17)],
  dependencies: [.package(path: "../Mlcpipe")],
  targets: [.testTarget(name: "MlcpipeTests", dependencies: [.product(name: "Mlcpipe", package: "Mlcpipe")])]
)
