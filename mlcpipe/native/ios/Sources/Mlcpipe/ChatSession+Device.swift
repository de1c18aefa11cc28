#if canImport(UIKit)
  import UIKit

  extension ChatSession {
    /// Tells the session of the device's memory warnings and heat, until the task is cancelled.
    public func followDevice() async {
      await withTaskGroup(of: Void.self) { group in
        group.addTask { @MainActor in
          let warnings = NotificationCenter.default.notifications(
            named: UIApplication.didReceiveMemoryWarningNotification)
          for await _ in warnings.map({ _ in }) { await self.memoryWarning() }
        }
        group.addTask { @MainActor in
          self.takeHeat()
          let changes = NotificationCenter.default.notifications(named: ProcessInfo.thermalStateDidChangeNotification)
          for await _ in changes.map({ _ in }) { self.takeHeat() }
        }
      }
    }

    private func takeHeat() {
      try? heat(Heat(rawValue: ProcessInfo.processInfo.thermalState.rawValue) ?? .critical)
    }
  }
#endif
